"""An issue for torch's developers: its programs are right where a backend is, and short."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.cli.issue import CALLS, _output, programs_of
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

_PLAIN = replace(_BARE, program="train", schedule=(Step(local_backwards=1), Step()), options={"bucket_cap_mb": 1})
_TRAININGS = (
    _PLAIN,
    replace(_PLAIN, program="mixed_precision_case", options={"mixed_precision": {"param_dtype": "float16"}}),
    replace(_BARE, program="optimizer_in_backward", needs=("optimizer_in_backward",)),
)


def _of_cells(*cells: Cell) -> list[str]:
    scenario = replace(_BARE, arguments={"cells": [cell.to_json() for cell in cells]})
    return list(programs_of(scenario, "gloo", ""))


def test_programs_find_a_right_backend_right(tmp_path: Path) -> None:
    # Each in a process of its own would take a minute: here one process runs all of them, as a group of one rank.
    programs = [program for cell in _CELLS for program in _of_cells(cell)]
    for training in _TRAININGS:  # of which torch's DDP does one alone
        (program,) = programs_of(training, "gloo", "")
        programs.append(program.replace("torch.nn.parallel.Dist", "__import__('ddp_impl').Dist"))
    lines = ["import torch.distributed as dist"]
    for number, program in enumerate(programs):
        lines += [f"space = {{'__name__': 'no main'}}; exec({program!r}, space)"]
        lines += [f"space['run'](0, {str(tmp_path / str(number))!r}, 1); dist.destroy_process_group()"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split(",")[0] for line in done.stdout.splitlines()] == ["rank 0: right"] * len(programs)


@pytest.mark.nightly
def test_a_mean_over_three_ranks_is_exact() -> None:
    (program,) = programs_of(replace(_PLAIN, world_size=3), "gloo", "")
    assert _output(program, "") == ""


def test_a_program_has_thirty_lines_at_most() -> None:
    programs = [*map(_of_cells, _CELLS), *(list(programs_of(training, "gloo", "")) for training in _TRAININGS)]
    assert max(len(program.splitlines()) for (program,) in programs) <= 30


def test_where_no_program_is_known_there_is_none() -> None:
    assert _of_cells(Cell("send_recv"), Cell("all_reduce", lifetime="polled")) == []
    assert list(programs_of(replace(_BARE, program="refused_calls"), "gloo", "")) == []


def test_an_error_is_shown_where_the_evidence_has_it_too() -> None:
    raises = "raise RuntimeError('there is no stream on this device: 0x7f')"
    assert "no stream" in _output(raises, "A raised RuntimeError: there is no stream on this device: 0x3e")
    assert _output(raises, "the gradient is wrong") == ""
    assert _output("print('WRONG')", "") == "WRONG\n"
    assert _output("print('right')", "") == ""
