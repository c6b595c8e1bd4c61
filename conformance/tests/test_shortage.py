"""What the kernel denies a container is read from its cgroups, of both versions."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.run import shortage

_DENIED = "may have no more (pids.max"
_KILLED = "container has no more memory (memory.max"


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(shortage, "_MOUNT", tmp_path)
    shortage._files.cache_clear()
    yield tmp_path
    shortage._files.cache_clear()


def put(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def test_version_2_counts_in_the_group_and_around_it(mount: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = mount / "machine" / "job"
    monkeypatch.setattr(shortage, "_groups", lambda: [(own, tuple(shortage._COUNTS))])
    put(own, "pids.events", "max 3\n")
    put(own.parent, "pids.events", "max 1\n")
    put(own, "memory.events", "low 9\nhigh 9\nmax 9\noom 2\noom_kill 0\noom_group_kill 0\n")
    before = shortage.denials()
    assert shortage.shortage_since(before) == ""
    put(own.parent, "pids.events", "max 2\n")
    assert "refused a process or thread 1 time," in shortage.shortage_since(before)
    assert _KILLED not in shortage.shortage_since(before)
    put(own, "memory.events", "max 9\noom 2\noom_kill 2\noom_group_kill 0\n")
    assert _DENIED in shortage.shortage_since(before)
    assert f"killed a process 2 times, because this {_KILLED}" in shortage.shortage_since(before)


def test_version_1_counts_in_a_tree_per_controller(mount: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        shortage, "_groups", lambda: [(mount / "pids" / "job", ("pids",)), (mount / "memory" / "job", ("memory",))]
    )
    put(mount / "pids" / "job", "pids.events", "max 0\n")
    put(mount / "memory" / "job", "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    before = shortage.denials()
    put(mount / "memory" / "job", "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    assert "killed a process 1 time," in shortage.shortage_since(before)


def test_where_nothing_counts_nothing_was_denied(mount: Path) -> None:
    assert shortage.shortage_since(shortage.denials()) == ""
