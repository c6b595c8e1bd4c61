"""Disables the skip decorators that keep torch's DDP tests from running on a machine without GPUs.

Most of these tests ask for GPUs but do not need them for what they test. This module also enables tests that torch
skips with a link to an issue (`unittest.skip`). That is safe, because only tests that torch's DDP passes under the same
conditions count.
"""

import contextlib
import importlib
import unittest
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any
from unittest import mock

_COMMON = "torch.testing._internal.common_distributed"

#: Skip decorators of `_COMMON`: those applied to the test directly, and those called with arguments first.
_GATES = ("skip_if_no_gpu", "skip_if_small_worldsize", "skip_if_rocm_multiprocess")
_GATES_WITH_ARGUMENTS = ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu", "require_n_gpus_for_nccl_backend")
_UNITTEST_GATES = ("skip", "skipIf", "skipUnless")


@contextlib.contextmanager
def opened_gates() -> Iterator[None]:
    """Within the block, replace skip decorators by ones that do nothing, for the modules imported in it.

    A decorator that only marks a test (`__unittest_skip__`) does not stop a launcher that calls the method;
    `wants_other_world_size` reads the marks that the launcher must respect.
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
    """Whether a test's mark says that it cannot run at the world size for which its module was imported."""
    return getattr(test, "__unittest_skip__", False) and "world size" in getattr(test, "__unittest_skip_why__", "")


def _unchanged(test: FunctionType) -> FunctionType:
    return test


def _open_gate(*args: Any, **kwargs: Any) -> Callable[[FunctionType], FunctionType]:
    return _unchanged


def _one_each(world_size: int) -> dict[int, list[int]]:
    return {rank: [rank] for rank in range(world_size)}
