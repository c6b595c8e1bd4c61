"""Memory that is gathered in huge pages holds what it held, and forks see it."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from pathlib import Path

import pytest

from conformance.workers import huge_pages

_KERNEL = tuple(map(int, platform.release().split("-")[0].split(".")[:2]))
CAN_GATHER = _KERNEL >= (6, 1) and Path("/sys/kernel/mm/transparent_hugepage").is_dir()
_PATTERN = bytes(range(256)) * 4096  # 1 MiB


def huge_kb(pid: int | str = "self") -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:"))


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> mmap.mmap:
    """Return 8 MiB of its own, to which a gathering here is limited."""
    memory = mmap.mmap(-1, 2**23, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(_PATTERN * 8)
    (region,) = [one for one in huge_pages._regions() if one[1] - one[0] >= 2**23 and _holds(one, memory)]
    monkeypatch.setattr(huge_pages, "_regions", lambda: iter([region]))
    return memory


def _holds(region: tuple[int, int], memory: mmap.mmap) -> bool:
    return region[0] <= ctypes.addressof(ctypes.c_char.from_buffer(memory)) < region[1]


@pytest.mark.skipif(not CAN_GATHER, reason="this kernel gathers no memory on request")
def test_what_is_gathered_is_huge_and_unchanged(memory: mmap.mmap) -> None:
    before_kb = huge_kb()
    huge_pages.gather()
    assert huge_kb() >= before_kb + 3 * 2048
    assert memory[:] == _PATTERN * 8
    pid = os.fork()
    if pid == 0:
        memory[0:1] = b"x"
        os._exit(0 if memory[1:] == (_PATTERN * 8)[1:] else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert memory[:] == _PATTERN * 8


def test_a_kernel_that_refuses_changes_nothing(memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_MADV_COLLAPSE", 9999)
    before_kb = huge_kb()
    huge_pages.gather()
    assert huge_kb() <= before_kb
    assert memory[:] == _PATTERN * 8
