"""Where parameters are on several devices, one of autograd's threads is in a reducer at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddp_impl import DistributedDataParallel
from ddp_impl.autograd.hooks import one_thread
from ddp_impl.tests.ranks import group_of_one


def test_a_backward_begins_and_gradients_arrive_under_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    with group_of_one():
        ddp = DistributedDataParallel(nn.Linear(2, 2))
        reducer = ddp.reducer
        reducer._has_threads = True
        reducer.hooks.remove()
        reducer.hooks = type(reducer.hooks)(reducer.members, reducer.arrivals, reducer, has_threads=True)
        held: dict[str, bool] = {}
        for name in ("backward_begins", "take_gradient", "bucket_is_full"):
            method = getattr(reducer, name)

            def noted(*arguments: int, name: str = name, method: object = method) -> None:
                held[name] = one_thread._is_owned()  # type: ignore[attr-defined]
                method(*arguments)  # type: ignore[operator]

            monkeypatch.setattr(reducer, name, noted)
        ddp(torch.ones(1, 2)).sum().backward()
    assert held == {"backward_begins": True, "take_gradient": True, "bucket_is_full": True}
