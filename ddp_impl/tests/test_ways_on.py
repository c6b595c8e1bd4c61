"""After a backward that left gradients out, nothing that a wrapper offers communicates before it has said so.

Other ranks may wait in that backward's reduction, and would meet the wrong collective.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, JoinHook

from ddp_impl import DistributedDataParallel
from ddp_impl.base.errors import ReductionError
from ddp_impl.reducer.company import Participant
from ddp_impl.tests.ranks import group_of_one
from ddp_impl.wire import collectives


class Forgetful(nn.Module):
    """A layer that forward does not use, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.forgotten = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_buffer("statistics", torch.zeros(2))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.used(inputs)
        return output


class Communicated(BaseException):
    """A collective was called; nothing that is called may take it for an error of its own."""


@contextlib.contextmanager
def unfinished_backward() -> Iterator[DistributedDataParallel]:
    """Give a wrapper after a backward without all gradients; its collectives raise `Communicated` from then on."""

    def communicate(*_: Any, **__: Any) -> Any:
        raise Communicated

    with group_of_one() as group, pytest.MonkeyPatch.context() as patch:
        ddp = DistributedDataParallel(Forgetful())
        ddp.reducer.arrivals.num_to_learn_from = 0  # buckets could be rebuilt
        ddp(torch.ones(1, 2)).sum().backward()
        for name in ("allreduce", "broadcast", "allgather", "reduce", "barrier"):
            patch.setattr(type(group), name, communicate, raising=False)
        for name, _ in inspect.getmembers(collectives, inspect.isfunction):
            patch.setattr(collectives, name, communicate)
        patch.setattr(Join, "notify_join_context", communicate)
        yield ddp


def forward_under(block: Callable[[DistributedDataParallel], Any]) -> Callable[[DistributedDataParallel], None]:
    def go_on(ddp: DistributedDataParallel) -> None:
        with block(ddp):
            ddp(torch.ones(1, 2))

    return go_on


def leave_join(ddp: DistributedDataParallel) -> None:
    with ddp.join():
        pass


def update_group(ddp: DistributedDataParallel) -> None:
    ddp._update_process_group(ddp.process_group)


@pytest.mark.parametrize(
    "go_on",
    [
        forward_under(lambda ddp: contextlib.nullcontext()),
        forward_under(lambda ddp: ddp.no_sync()),
        forward_under(lambda ddp: torch.no_grad()),
        forward_under(lambda ddp: torch.inference_mode()),
        forward_under(lambda ddp: ddp.join()),
        leave_join,
        update_group,
        copy.deepcopy,
        pickle.dumps,
    ],
    ids=["synchronised", "no_sync", "no_grad", "inference", "in_join", "leave_join", "update_group", "copy", "pickle"],
)
def test_every_way_on_is_refused(go_on: Callable[[Any], Any]) -> None:
    with unfinished_backward() as ddp, pytest.raises(ReductionError, match=r"forgotten\.weight"):
        go_on(ddp)


def callables(owner: object) -> list[str]:
    """Return the names of the methods that `owner` has and `nn.Module` has not, and that need no argument."""
    names = []
    for name in sorted(set(dir(type(owner))) - set(dir(nn.Module))):
        method = inspect.getattr_static(type(owner), name)
        if not inspect.isfunction(method):
            continue
        needed = [p for p in inspect.signature(method).parameters.values() if p.default is p.empty]
        if all(p.name == "self" or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in needed):
            names.append(name)
    return names


#: Parts of a backward that are public for those who replace them.
SEAMS = {
    "output_reached",
    "begin_backward",
    "open_iteration",
    "watch_backward",
    "announce",
    "launch_full_buckets",
    "finalize",
}

_TORCHS: dict[str, type] = {
    "ddp": nn.parallel.DistributedDataParallel,
    "reducer": dist.Reducer,  # type: ignore[attr-defined]
    "join_hook": JoinHook,
}


@pytest.mark.parametrize("owner", list(_TORCHS))
def test_no_method_communicates(owner: str) -> None:
    communicating = []
    with unfinished_backward() as ddp:
        of: Any = {"ddp": ddp, "reducer": ddp.reducer, "join_hook": ddp.join_hook()}[owner]
        for name in callables(of):
            if name.startswith("_") and not hasattr(_TORCHS[owner], name):
                continue  # a part of another method
            if hasattr(Participant, name) or name in SEAMS:
                continue  # autograd calls it within a backward, and nobody else
            try:
                with contextlib.suppress(Exception):
                    getattr(of, name)()
            except Communicated:
                communicating.append(name)
            assert ddp.reducer.reduction.iteration.is_incomplete, f"{name} has forgotten the backward"
    assert communicating == []
