"""An issue for torch's developers: its programs are right where a backend is, and short."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.cli.issue import CALLS, programs_of
from conformance.programs.operations.cell import Cell
from conformance.scenario import Scenario, Step

_BARE = Scenario(id="chapter/REQ-01/name", requirements=("REQ-01",), program="operation_cells", world_size=1)
_CELLS = (
    *(Cell(operation, lifetime="wait") for operation in CALLS),
    Cell("all_reduce", "bool", "MAX"),
    Cell("all_reduce", op="AVG"),
    Cell("broadcast", numel=20, reads="transposed", writes="transposed"),
    Cell("scatter", "complex64"),
)


def _of_cells(*cells: Cell) -> list[str]:
    scenario = replace(_BARE, arguments={"cells": [cell.to_json() for cell in cells]})
    return list(programs_of(scenario, "gloo", ""))


def test_programs_find_a_right_backend_right(tmp_path: Path) -> None:
    # Each in a process of its own would take a minute: here one process runs all of them, as a group of one rank.
    programs = [program for cell in _CELLS for program in _of_cells(cell)]
    training = replace(_BARE, program="train", schedule=(Step(local_backwards=1), Step()), options={"bucket_cap_mb": 1})
    programs += programs_of(training, "gloo", "")
    assert len(programs) == len(_CELLS) + 1
    lines = ["import torch.distributed as dist"]
    for number, program in enumerate(programs):
        lines += [f"space = {{'__name__': 'no main'}}; exec({program!r}, space)"]
        lines += [f"space['run'](0, {str(tmp_path / str(number))!r}, 1); dist.destroy_process_group()"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split(",")[0] for line in done.stdout.splitlines()] == ["rank 0: right"] * len(programs)


@pytest.mark.parametrize("cell", _CELLS, ids=Cell.describe)
def test_a_program_has_thirty_lines_at_most(cell: Cell) -> None:
    (program,) = _of_cells(cell)
    assert len(program.splitlines()) <= 30


def test_where_no_program_is_known_there_is_none() -> None:
    assert _of_cells(Cell("send_recv"), Cell("all_reduce", lifetime="polled")) == []
    assert list(programs_of(replace(_BARE, program="buffer_sync"), "gloo", "")) == []
