"""What counts as left behind. Every kind of leak is shown on real ranks in test_pool."""

import json
import subprocess
import sys
from collections.abc import Mapping

import pytest
import torch
from hostile_subjects import STATE

from conformance.surroundings.hygiene import seed_everything, surroundings, violations

#: Prints what is noticed of every act, each in a process that is forked for it before torch has computed anything.
_NOTICED = """
import json, os, sys
sys.path[:0] = sys.argv[1:]
import torch
import torch.distributed as dist
from hostile_subjects import STATE
from conformance.surroundings.hygiene import surroundings, violations

torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for name, hostile in STATE.items():
    child = os.fork()
    if child == 0:
        told = os.dup(1)
        before = surroundings()
        try:
            hostile.act()
            found = violations(before, surroundings())
        except RuntimeError as refusal:  # this machine cannot do it
            found = str(refusal)
        finally:
            os.write(told, json.dumps([name, found]).encode() + b"\\n")
            os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def noticed() -> Mapping[str, list[str] | str]:
    """Return what is noticed of every change of a process's state that a hostile subject makes."""
    command = [sys.executable, "-W", "ignore", "-c", _NOTICED, *sys.path]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.splitlines()
    return dict(json.loads(line) for line in lines)


@pytest.mark.parametrize("name", STATE)
def test_a_changed_state_is_noticed(noticed: Mapping[str, list[str] | str], name: str) -> None:
    found = noticed[name]
    if isinstance(found, str):
        pytest.skip(found)
    assert found


def test_nothing_changed() -> None:
    assert violations(surroundings(), surroundings()) == ()


def test_every_change_is_a_phrase() -> None:
    before = {"environment": {"A": "1", "B": "2"}, "grad mode": True, "process group": {"0": ""}}
    after = {"environment": {"B": "3", "C": "4"}, "grad mode": False, "process group": {"0": "", "7": ""}}
    assert violations(before, after) == (
        "environment left behind: C (4)",
        "environment taken away: A (1)",
        "environment changed: B (3)",
        "grad mode changed: True before, False after",
        "process group left behind: 7",
    )


def test_what_ends_or_is_renamed_by_itself_is_not_missed() -> None:
    before = {"thread": {"1": "timer"}, "child process": {"2": "sleep", "4": "python"}, "process group": {"3": ""}}
    after = {"thread": {}, "child process": {"4": "server"}, "process group": {}}
    assert violations(before, after) == ("process group taken away: 3",)


def test_every_child_process_is_distinguished() -> None:
    with subprocess.Popen(["sleep", "60"]) as first:
        before = surroundings()
        with subprocess.Popen(["sleep", "60"]) as second:
            (found,) = violations(before, surroundings())
            assert found.startswith(f"child process left behind: {second.pid} (")  # not yet its own name, it may be
            second.kill()
        assert violations(before, surroundings()) == ()
        first.kill()


def test_seeds() -> None:
    with torch.random.fork_rng(devices=[]):
        seed_everything(3)
        first = torch.rand(2)
        seed_everything(3)
        assert torch.equal(torch.rand(2), first)
