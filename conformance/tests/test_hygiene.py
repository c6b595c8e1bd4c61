"""What counts as left behind. Every kind of leak is shown on real ranks in test_pool."""

from __future__ import annotations

import subprocess

import torch

from conformance.workers.hygiene import seed_everything, surroundings, violations


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


def test_every_child_process_is_told_apart() -> None:
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
