"""The simulated device: what runs on it, what it calls a race, and what is said where it cannot be compiled."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conformance.backends.backend import get_backend
from conformance.errors import BackendError
from conformance.sim_device import build

#: A process of its own: the device, once loaded, is torch's accelerator for good.
_RACE = """
import torch
from conformance.sim_device.module import install
device = install()
ones = torch.ones(8, device="sim")
side = torch.Stream("sim")
if {ordered}:
    side.wait_stream(torch.accelerator.current_stream())
with side:
    ones.add_(1)
print(len(device.take_races()))
"""
_TOUCH = """
import ctypes, torch
from conformance.sim_device.module import install
install()
print(ctypes.c_float.from_address(torch.ones(8, device="sim").data_ptr()).value)
"""

needs_compiler = pytest.mark.skipif(bool(build.why_not()), reason=build.why_not())


def run(code: str) -> subprocess.CompletedProcess[str]:
    build.build()
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@needs_compiler
@pytest.mark.parametrize(("ordered", "races"), [(True, 0), (False, 1)])
def test_an_access_that_no_event_orders_is_a_race(ordered: bool, races: int) -> None:
    done = run(_RACE.format(ordered=ordered))
    assert done.stdout.split() == [str(races)], done.stderr


@needs_compiler
def test_the_host_cannot_touch_device_memory() -> None:
    assert run(_TOUCH).returncode < 0


def test_without_a_compiler_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BackendError, match="install g\\+\\+, or set CXX"):
        build.build()
    assert "\n" not in get_backend("sim").unavailable()
