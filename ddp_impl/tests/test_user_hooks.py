"""Hooks of the user on accumulated gradients: the reducer's own runs last, whenever the user's were registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_impl import DistributedDataParallel
from ddp_impl.tests.ranks import group_of_one
from ddp_impl.torch_internals.tensors import post_accumulate_hooks


def _step(*models: Any) -> None:
    torch.stack([model(torch.ones(1, 2)).sum() for model in models]).sum().backward()


def _nothing(_: Tensor) -> None:
    """Stand for a hook of the user."""


def _keys(parameter: Tensor) -> list[int]:
    return list(post_accumulate_hooks(parameter))


def test_hooks_of_the_user_keep_their_order_and_may_be_removed() -> None:
    with group_of_one():
        module = nn.Linear(2, 1)
        ddp: Any = DistributedDataParallel(module)
        (own,) = _keys(module.weight)
        handles = [module.weight.register_post_accumulate_grad_hook(_nothing) for _ in range(3)]
        _step(ddp)
        assert _keys(module.weight) == [*(handle.id for handle in handles), own]
        handles[1].remove()
        _step(ddp)
        assert _keys(module.weight) == [handles[0].id, handles[2].id, own]
        ddp.reducer.remove_hooks()
        assert _keys(module.weight) == [handles[0].id, handles[2].id]
        assert not ddp.reducer.hooks.run_after_user_hooks()


@pytest.mark.parametrize("register", [None, _nothing])
def test_reducers_that_share_a_parameter_do_not_overtake_each_other(register: Callable[[Tensor], None] | None) -> None:
    with group_of_one():
        module: Any = nn.Linear(2, 1)
        both: list[Any] = [DistributedDataParallel(module) for _ in range(2)]
        _step(*both)
        first, second = _keys(module.weight)
        if register is not None:
            handle = module.weight.register_post_accumulate_grad_hook(register)
            _step(*both)
            assert _keys(module.weight) == [handle.id, first, second]
            handle.remove()
        _step(*both)
        assert _keys(module.weight) == [first, second]
