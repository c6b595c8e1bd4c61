"""Disables the skip decorators that keep torch's DDP tests from running on a machine without GPUs.

Most of those tests need no GPU for what they test: they were written where there is one. Those that torch keeps in
quarantine (`unittest.skip` with a link) are let in as well. It costs nothing: what counts is what torch's DDP passes
here, under the same conditions.
"""

from __future__ import annotations

import contextlib
import importlib
import unittest
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any
from unittest import mock

_COMMON = "torch.testing._internal.common_distributed"

#: Decorators of `_COMMON` that take the test itself, and those that are called with the number of GPUs or the like.
_GATES = ("skip_if_no_gpu", "skip_if_small_worldsize", "skip_if_rocm_multiprocess")
_GATES_WITH_ARGUMENTS = ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu", "require_n_gpus_for_nccl_backend")
_UNITTEST_GATES = ("skip", "skipIf", "skipUnless")


@contextlib.contextmanager
def opened_gates() -> Iterator[None]:
    """Within the block, let modules that are imported decorate their tests with gates that are open.

    The gates that only mark a test (`__unittest_skip__`) are none to a launcher that calls the method; `is_gated` reads
    from their marks what must be respected.
    """
    common = importlib.import_module(_COMMON)
    with contextlib.ExitStack() as stack:
        for name in _GATES:
            stack.enter_context(mock.patch.object(common, name, _unchanged))
        for name in _GATES_WITH_ARGUMENTS:
            stack.enter_context(mock.patch.object(common, name, _open_gate))
        for name in _UNITTEST_GATES:
            stack.enter_context(mock.patch.object(unittest, name, _open_gate))
        # One process drives one device, however many there are.
        stack.enter_context(
            mock.patch.object(common, "init_multigpu_helper", lambda world_size, backend: _one_each(world_size))
        )
        yield


def wants_other_world_size(test: Callable[..., Any]) -> bool:
    """Whether a test is marked as one that cannot run at the world size its module was imported for."""
    return getattr(test, "__unittest_skip__", False) and "world size" in getattr(test, "__unittest_skip_why__", "")


def _unchanged(test: FunctionType) -> FunctionType:
    return test


def _open_gate(*args: Any, **kwargs: Any) -> Callable[[FunctionType], FunctionType]:
    return _unchanged


def _one_each(world_size: int) -> dict[int, list[int]]:
    return {rank: [rank] for rank in range(world_size)}
