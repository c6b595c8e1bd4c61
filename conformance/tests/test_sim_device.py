"""The simulated device: what runs on it, what it calls a race, and what is said where it cannot be compiled."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conformance.backends.backend import get_backend
from conformance.backends.sim_device import build
from conformance.errors import BackendError
from conformance.run import runner
from conformance.subjects.subject import NO_DDP
from conformance.suite import load_scenarios
from conformance.verdict import Verdict
from conformance.workers.zygote_process import ZygoteProcess

#: The first of them compiles the device: half a minute on an idle machine, and many on one with which others are busy.
pytestmark = pytest.mark.timeout(1800)

#: A process of its own: the device, once loaded, is torch's accelerator for good.
_RACE = """
import torch
from conformance.backends.sim_device.module import install
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
from conformance.backends.sim_device.module import install
install()
print(ctypes.c_float.from_address(torch.ones(8, device="sim").data_ptr()).value)
"""
_MADE = """
import torch
from conformance.backends.sim_device.module import install
install()
made = torch._efficientzerotensor((2,), device=torch.device("sim", 1))
print(made.device, torch.zeros(2, device=torch.device("sim", 1)).device)
"""
_RECORDED = """
import torch
from conformance.backends.sim_device.module import install
install()
side = torch.Stream("sim")
for view in (torch._neg_view, torch.conj):
    lazy = view(torch.ones(8, dtype=torch.complex64, device="sim"))
    with torch.sim.stream(side):
        torch.ones(8, device="sim")
    address = lazy.data_ptr()
    lazy.record_stream(side)
    lazy = None
    early = torch.empty(8, device="sim")
    torch.accelerator.synchronize()
    print(early.data_ptr() == address, torch.empty(8, device="sim").data_ptr() == address)
"""

#: On this device an operation takes a millisecond: what the host's clock tells would be no whole numbers.
_AUTO = """
import sys
import torch, torch.distributed as dist
from datetime import timedelta
from conformance.backends.sim import SIM
from ddp_impl import DistributedDataParallel
from ddp_impl.reducer import planning as bucket_planning
store = dist.FileStore(sys.argv[1], 1)
group = SIM.create(store, 0, 1, timedelta(seconds=30))
told = []
choose = bucket_planning.choose_caps
bucket_planning.choose_caps = lambda specs, ready_s, *rest: told.append(ready_s) or choose(specs, ready_s, *rest)
module = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))).to("sim:0")
model = DistributedDataParallel(module, process_group=group, bucket_cap_mb="auto")
for _ in range(5):
    model(torch.ones(2, 4, device="sim:0")).sum().backward()
(ready_s,) = told
times = sorted(1000 * seconds for seconds in ready_s.values())
print(len(times), times[0] < times[-1], all(abs(time - round(time)) < 1e-6 for time in times))
"""

needs_compiler = pytest.mark.skipif(bool(build.why_unavailable()), reason=build.why_unavailable())


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    build.build()
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


@needs_compiler
@pytest.mark.parametrize(("ordered", "races"), [(True, 0), (False, 1)])
def test_an_access_that_no_event_orders_is_a_race(ordered: bool, races: int) -> None:
    done = run(_RACE.format(ordered=ordered))
    assert done.stdout.split() == [str(races)], done.stderr


@needs_compiler
def test_the_host_cannot_touch_device_memory() -> None:
    assert run(_TOUCH).returncode < 0


@pytest.mark.nightly
@needs_compiler
def test_an_operation_makes_its_tensor_on_the_device_that_it_names() -> None:
    """Whatever the current device is, as in a thread that has set none: `torch.func.jvp` makes such zeros."""
    assert run(_MADE).stdout.split() == ["sim:1", "sim:1"]


@pytest.mark.nightly
@needs_compiler
def test_memory_of_a_lazy_tensor_waits_for_the_stream_that_was_recorded() -> None:
    done = subprocess.run([sys.executable, "-c", _RECORDED], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False", "True"] * 2, done.stderr


@pytest.mark.nightly
@needs_compiler
def test_auto_caps_are_chosen_by_the_times_of_the_device(tmp_path: Path) -> None:
    done = run(_AUTO, str(tmp_path / "store"))
    assert done.stdout.split() == ["6", "True", "True"], done.stderr


@needs_compiler
def test_a_wait_raises_what_gloo_has_ended_with(zygote: ZygoteProcess) -> None:
    bitwise = next(one for one in load_scenarios() if one.id == "reductions/OP-10/bitwise-of-floats-world2")
    (found,) = runner.run([bitwise], NO_DDP, get_backend("sim"), native=False, zygote=zygote).scenarios
    assert found.subject.verdict is Verdict.PASS, found.subject.summary


def test_without_a_compiler_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BackendError, match="install g\\+\\+, or set CXX"):
        build.build()
    assert "\n" not in get_backend("sim").unavailable()


def test_of_processes_that_need_it_at_once_one_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(
        """#!/bin/bash
echo compiled >> "$(dirname "$0")/log"
sleep 0.2
while [ "$1" != -o ]; do shift; done
echo device > "$2"
"""
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: build.build(), range(4)))
    assert [path.read_text() for path in paths] == ["device\n"]
    assert (tmp_path / "log").read_text() == "compiled\n"
