"""What profilers and other observers see of a wrapper."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from ddp_impl import DistributedDataParallel
from ddp_impl.tests.ranks import group_of_one

FORWARD = "DistributedDataParallel.forward"


@pytest.fixture
def ddp() -> Iterator[DistributedDataParallel]:
    with group_of_one():
        yield DistributedDataParallel(nn.Linear(2, 2))


def test_a_profiler_may_begin_and_end_within_a_forward_and_within_a_backward(ddp: DistributedDataParallel) -> None:
    # In a thread of its own: torch restores a thread's state behind a backward, so that the profiler stays noted there.
    with ThreadPoolExecutor(1) as threads:
        names = threads.submit(_profiled, ddp).result()
    assert any("AddmmBackward" in name for name in names)


def _profiled(ddp: DistributedDataParallel) -> list[str]:
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    (weight, _) = ddp.module.parameters()
    beginning = ddp.module.register_forward_hook(lambda *_: profiler.start())
    output = ddp(torch.ones(1, 2))
    beginning.remove()
    ending = weight.register_post_accumulate_grad_hook(lambda _: profiler.stop())
    output.sum().backward()
    ending.remove()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.ones(2, 2))
    return [event.name for event in profiler.events() or ()]


def test_an_observer_that_is_no_profiler_sees_forwards(ddp: DistributedDataParallel, tmp_path: Path) -> None:
    observer = torch.profiler.ExecutionTraceObserver().register_callback(str(tmp_path / "trace.json"))
    observer.start()
    ddp(torch.ones(1, 2))
    observer.stop()
    observer.unregister_callback()
    assert FORWARD in [node["name"] for node in json.loads((tmp_path / "trace.json").read_text())["nodes"]]
