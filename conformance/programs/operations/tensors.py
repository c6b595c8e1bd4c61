"""The tensors of one call on one rank, filled by its truth."""

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
    """A rank's inputs and outputs: the same arenas if the operation works in place."""

    truth: Truth
    inputs: tuple[Arena, ...]
    outputs: tuple[Arena, ...]

    @staticmethod
    def of(truth: Truth, device: torch.device, arena: Callable[[Blocks], Arena] | None = None) -> Tensors:
        """Return new tensors, the inputs filled; `arena` makes the arena of a tensor with these blocks, if given."""

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
        """Issue the call in `group`, by a method with a `timeout` if given; all its ranks must call it."""
        passed, room = ([one.tensor for one in side] for side in (self.inputs, self.outputs))
        return issue(self.truth.cell, group, None, self.truth.place, passed, room, timeout)

    def wrong(self) -> str:
        """Return what is wrong with the rank's outputs, as a clause; empty if nothing is."""
        return wrong_outputs(self.truth, [one.tensor for one in self.outputs])
