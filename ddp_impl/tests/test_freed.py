"""What a dropped wrapper leaves in memory: nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import _MixedPrecision

from ddp_impl import DistributedDataParallel
from ddp_impl.base.errors import ReductionError
from ddp_impl.tests.ranks import group_of_one


@pytest.fixture(autouse=True)
def without_collections() -> Iterator[None]:
    """Let no collection of garbage run but those of the test."""
    gc.disable()
    with group_of_one():
        yield
    gc.enable()


def _hooked(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)


WAYS: dict[str, tuple[dict[str, Any], Callable[[DistributedDataParallel], object]]] = {
    "plain": ({}, lambda ddp: None),
    "views": ({"gradient_as_bucket_view": True}, lambda ddp: None),
    "search": ({"find_unused_parameters": True}, lambda ddp: None),
    "static": ({"static_graph": True}, lambda ddp: None),
    "cast": ({"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16)}, lambda ddp: None),
    "hooked": ({}, _hooked),
    "built_in": ({}, lambda ddp: ddp._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)),
    "buffers": ({}, lambda ddp: ddp._register_buffer_comm_hook(None, lambda state, buffers: None)),
    "compiled": ({}, lambda ddp: ddp.compile(backend="eager")),
}


def _steps(ddp: DistributedDataParallel) -> None:
    for _ in range(3):
        ddp(torch.ones(3, 2)).sum().backward()


def _leaves_a_loss(ddp: DistributedDataParallel) -> None:
    ddp(torch.ones(3, 2))


def _raises_in_backward(ddp: DistributedDataParallel) -> None:
    layers: Any = ddp.module
    handle = layers[0].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ddp(torch.ones(3, 2)).sum().backward()
    handle.remove()


class _FailingFuture:
    """Of a hook: it is done, and its wait raises."""

    def done(self) -> bool:
        return True

    def wait(self) -> Any:
        raise ValueError


def _raises_at_the_end(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(None, lambda state, bucket: _FailingFuture())
    with pytest.raises(ValueError):  # noqa: PT011 # it says nothing
        ddp(torch.ones(3, 2)).sum().backward()


def _refuses(ddp: DistributedDataParallel) -> None:
    layers: Any = ddp.module
    layers[0].weight.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", one.grad.to_sparse()))
    with pytest.raises(ReductionError):
        ddp(torch.ones(3, 2)).sum().backward()
    assert not any(bucket.gradients for bucket in ddp.reducer.buckets)


def _accumulates(ddp: DistributedDataParallel) -> None:
    with ddp.no_sync():
        _steps(ddp)


def _joins(ddp: DistributedDataParallel) -> None:
    with ddp.join():
        _steps(ddp)


ENDS = {
    "steps": _steps, "loss": _leaves_a_loss, "raised": _raises_in_backward, "failed": _raises_at_the_end,
    "refused": _refuses, "no_sync": _accumulates, "join": _joins,
}  # fmt: skip


@pytest.mark.parametrize(("way", "end"), [*((way, "steps") for way in WAYS), *(("search", end) for end in ENDS)])
def test_a_dropped_wrapper_is_freed_at_once_with_all_that_it_had(way: str, end: str) -> None:
    """Torch's is; in a cycle it would keep parameters, gradients and buckets until the garbage collector runs."""
    options, prepare = WAYS[way]
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    parameters = [weakref.ref(parameter) for parameter in module.parameters()]
    ddp = DistributedDataParallel(module, **options)
    prepare(ddp)
    _steps(ddp)
    gc.collect()  # what the first steps of a process leave
    ENDS[end](ddp)
    wrapper, reducer = weakref.ref(ddp), weakref.ref(ddp.reducer)
    del ddp, module
    if way == "compiled":  # the module is in a cycle with its compiled call
        gc.collect()
    assert wrapper() is None, "the wrapper is in a cycle"
    assert reducer() is None, "the reducer is in a cycle"
    assert [parameter() for parameter in parameters] == [None] * len(parameters)


@pytest.mark.parametrize("optimize_ddp", ["ddp_optimizer", "python_reducer", "no_optimization"])
def test_graphs_keep_no_wrapper(optimize_ddp: str) -> None:
    """Dynamo keeps a backend for as long as what it has compiled, and that for as long as the parameters live."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    parameters = [weakref.ref(parameter) for parameter in module.parameters()]
    ddp = DistributedDataParallel(module)
    with torch._dynamo.config.patch(optimize_ddp=optimize_ddp):
        compiled: Any = torch.compile(ddp, backend="aot_eager")
        _steps(compiled)
    del ddp, module, compiled
    gc.collect()
    assert [parameter() for parameter in parameters] == [None] * len(parameters)


def test_backwards_that_a_graph_leaves_to_the_reducer_leave_nothing_to_call() -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        compiled: Any = torch.compile(ddp, backend="aot_eager")
        for _ in range(3):  # into a `.grad` that is there, from the second step on
            compiled(torch.ones(1, 2)).sum().backward()
    assert not ddp._in_graph_backwards._is_plain, "the graph averaged the last one itself"
    assert ddp.reducer.after_captured == []


def test_a_wrapper_around_another_is_freed_though_the_other_awaits_a_backward() -> None:
    """After a forward under `no_sync` a reducer keeps nodes of outputs, which are those of the wrapper around it."""
    module: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1] = DistributedDataParallel(module[1], find_unused_parameters=True)
    module._ddp_params_and_buffers_to_ignore = ["1.module.weight", "1.module.bias"]
    ddp = DistributedDataParallel(module, find_unused_parameters=True)
    with ddp.no_sync(), module[1].no_sync():
        ddp(torch.ones(1, 2)).sum().backward()
    ddp(torch.ones(1, 2))  # a loss that is thrown away
    kept = [weakref.ref(one) for one in (ddp, ddp.reducer, module[1], module[1].reducer)]
    del ddp, module
    gc.collect()
    assert [one() for one in kept] == [None] * 4
