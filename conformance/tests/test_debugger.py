"""`replay --pdb` at a terminal: a person looks into one rank, and the others wait for it."""

import os
import pty
import sys
import time
from pathlib import Path

import pytest

from conformance.scenario import Scenario
from conformance.waiting.limits import RAISE_GRACE_S

DDPS = "conformance.tests.peculiar_ddps"
PLAIN = Scenario("gradients/GRAD-01/plain", ("GRAD-01",), "train", world_size=2)
_PROMPT = b"(Pdb) "


def typed(command: list[str], answers: list[bytes], reads_for_s: float = 0.0) -> str:
    """Run the command at a terminal as a person who reads before each answer; return what was shown."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "conformance", *command])
    shown = b""
    while True:
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # the command has ended
            break
        if shown.endswith(_PROMPT) and answers:
            time.sleep(reads_for_s)
            os.write(terminal, answers.pop(0) + b"\n")
    os.waitpid(pid, 0)
    return shown.decode().replace("\r\n", "\n")


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "scenario.json"
    path.write_text(PLAIN.dumps())
    return str(path)


@pytest.mark.nightly
def test_a_rank_stops_where_its_code_calls_breakpoint_and_no_other_does(file: str) -> None:
    shown = typed(["replay", file, "--ddp", f"{DDPS}:Stopping", "--pdb", "1"], [b"p self.calls", b"c"])
    assert "rank 1 stops at breakpoint()" in shown
    assert "rank 0 stops" not in shown
    assert "(Pdb) p self.calls\n1\n" in shown
    assert "PASS" in shown


@pytest.mark.nightly
def test_a_rank_that_raised_can_be_looked_into_while_others_wait(file: str) -> None:
    long = 5 * RAISE_GRACE_S  # longer than a rank outlives others that have raised
    shown = typed(["replay", file, "--ddp", f"{DDPS}:Raising", "--pdb", "1"], [b"p reason", b"q"], long)
    assert shown.count("rank 1 raised ValueError: no forward; leave with `q`") == 1
    assert "(Pdb) p reason\n'no forward'\n" in shown
    assert "every rank raised ValueError: no forward" in shown
