"""A call that must fail because a rank does not take part, and calls of its kind before it that succeed."""

from dataclasses import replace
from datetime import timedelta

import torch

from conformance.programs.operations.cell import Cell
from conformance.programs.operations.description import CALLED, Place
from conformance.programs.operations.judging import Truth
from conformance.programs.operations.tensors import Tensors
from conformance.scenario import Scenario


def failing_call(scenario: Scenario) -> Cell:
    """Return the call that the last rank leaves out: `operation` of `dtype`, `numel` elements in each part.

    Its root is the last rank if the root sends, else rank 0.
    """
    given = scenario.arguments
    root = CALLED[given["operation"]].root_needing(scenario.world_size - 1)
    return Cell(given["operation"], given["dtype"], numel=given["numel"], root=root)


def go_well(number: int, cell: Cell, place: Place, group: object, device: torch.device, timeout: timedelta) -> None:
    """Make `number` calls that succeed, each with a `timeout`; none of messages, whose methods take no timeout.

    Every rank of the group must call it.
    """
    called = replace(cell, lifetime="wait", path="group")
    for _ in range(0 if cell.what.of_pairs else number):
        for work in Tensors.of(Truth(called, place), device).issue(group, timeout).works:
            work.wait()
