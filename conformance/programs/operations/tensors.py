"""The tensors of one call on one rank, made and filled as its truth says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch

from conformance.programs.operations.calls import Issued, issue
from conformance.programs.operations.data import dtype_of
from conformance.programs.operations.description import Blocks
from conformance.programs.operations.judging import Truth, wrong_outputs
from conformance.programs.operations.memory import Arena


@dataclass(frozen=True, slots=True)
class Tensors:
    """What a rank passes and what it gets: the same arenas where the operation works in place."""

    truth: Truth
    inputs: tuple[Arena, ...]
    outputs: tuple[Arena, ...]

    @staticmethod
    def of(truth: Truth, device: torch.device, arena: Callable[[Blocks], Arena] | None = None) -> Tensors:
        """Return new tensors, the inputs filled; `arena` makes one for a tensor with these blocks, if given."""

        def new(blocks: Blocks) -> Arena:
            return Arena.of(truth.shape(blocks), dtype_of(truth.cell.dtype), "contiguous", device)

        make, what, place = arena or new, truth.cell.what, truth.place
        inputs = tuple(make(blocks) for blocks in what.inputs(place))
        for one, blocks in zip(inputs, what.inputs(place), strict=True):
            one.fill(truth.sent(blocks).to(device))
        if what.in_place and inputs:
            return Tensors(truth, inputs, inputs)
        return Tensors(truth, inputs, tuple(make(blocks) for blocks in what.outputs(place)))

    def issue(self, group: object, timeout: timedelta | None = None) -> Issued:
        """Issue the call in `group`, by a method with a `timeout` of its own if given; every rank of it must."""
        passed, room = ([one.tensor for one in side] for side in (self.inputs, self.outputs))
        return issue(self.truth.cell, group, None, self.truth.place, passed, room, timeout)

    def wrong(self) -> str:
        """Return what is wrong with what the rank got, as a clause; empty if nothing is."""
        return wrong_outputs(self.truth, [one.tensor for one in self.outputs])
