"""A call that is going to fail, because a rank does not take part, and those of its kind that go well before."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import torch

from conformance.programs.operations.cell import Cell
from conformance.programs.operations.description import CALLED, Place
from conformance.programs.operations.judging import Truth
from conformance.programs.operations.tensors import Tensors
from conformance.scenario import Scenario


def failing_call(scenario: Scenario) -> Cell:
    """Return what is called without the last rank: `operation`, of `dtype`, with `numel` elements in each part.

    Its root is the last rank, if it sends, else rank 0.
    """
    given = scenario.arguments
    root = CALLED[given["operation"]].root_needing(scenario.world_size - 1)
    return Cell(given["operation"], given["dtype"], numel=given["numel"], root=root)


def go_well(number: int, cell: Cell, place: Place, group: object, device: torch.device, timeout: timedelta) -> None:
    """Call so many that end, each with a `timeout` of its own; none of messages, whose methods take no timeout.

    Every rank of the group calls it.
    """
    called = replace(cell, lifetime="wait", path="group")
    for _ in range(0 if cell.what.of_pairs else number):
        for work in Tensors.of(Truth(called, place), device).issue(group, timeout).works:
            work.wait()
