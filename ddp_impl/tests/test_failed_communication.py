"""No failed collective becomes a value: wherever its work or its future tells of it, whoever waits hears of it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.futures import Future

from ddp_impl import DistributedDataParallel, SyncBatchNorm
from ddp_impl.base.errors import CommunicationError
from ddp_impl.buckets.comm_hooks import tensor_in
from ddp_impl.compile.averaging import CheckedGroup, checked
from ddp_impl.tests.compiled_models import average_in_graph
from ddp_impl.tests.ranks import group_of_one, run_ranks
from ddp_impl.wire.collectives import finished, value_of


class Work(dist.Work):
    """A work that answers as it is told to."""

    def __init__(
        self, waited: Callable[[], bool | None] = lambda: True, future: Any = None, error: Exception | None = None
    ) -> None:
        super().__init__()
        self._waited, self._future, self._error = waited, future, error

    def wait(self, *timeout: Any) -> bool:
        return self._waited()  # type: ignore[return-value]

    def get_future(self) -> Future[Any]:
        return self._future if self._future is not None else super().get_future()

    def exception(self) -> Any:
        return self._error

    def is_success(self) -> bool:
        return self._error is None


def future_of(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future


def lost() -> bool:
    raise ConnectionError("lost")


SENT = torch.zeros(3)


@pytest.mark.parametrize(
    "work",
    [
        Work(),
        Work(lambda: None),
        Work(future=future_of(None)),
        Work(future=future_of([SENT])),
        Work(future=future_of(SENT)),
        Work(future=future_of([torch.view_as_real(torch.zeros(3, dtype=torch.complex64))[:, 0]])),
    ],
    ids=["no-future", "wait-none", "holds-none", "holds-list", "holds-tensor", "other-shape"],
)
def test_a_work_without_an_error_is_finished(work: Work) -> None:
    finished(work, "all_reduce", [SENT])


@pytest.mark.parametrize(
    ("work", "error", "text"),
    [
        (Work(lost), ConnectionError, "lost"),
        (Work(lambda: False), CommunicationError, "wait returned False"),
        (Work(error=ValueError("told")), ValueError, "told"),
        (Work(future=future_of(RuntimeError("held"))), RuntimeError, "held"),
        (Work(future=future_of([torch.zeros(2)])), CommunicationError, "12 bytes were expected, its future holds 8"),
        (Work(future=future_of(torch.zeros(3, dtype=torch.float64))), CommunicationError, "holds 24"),
    ],
    ids=["wait", "false", "told", "future", "size", "dtype"],
)
def test_a_failure_is_raised_wherever_it_is_told(work: Work, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        finished(work, "all_reduce", [SENT])
    assert "in all_reduce" in caught.value.__notes__


def test_what_a_hook_returns_is_read() -> None:
    cpu = torch.device("cpu")
    with group_of_one() as group:
        assert value_of(future_of(3), group, cpu) == 3
        with pytest.raises(RuntimeError, match="held"):
            value_of(future_of(RuntimeError("held")), group, cpu)
        with pytest.raises(CommunicationError):
            value_of(Work(lambda: False), group, cpu)


def test_a_future_that_is_never_done_ends_with_the_timeout_of_the_group() -> None:
    timeout = timedelta(seconds=0.5)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)  # type: ignore[attr-defined]
    try:
        ddp = DistributedDataParallel(nn.Linear(2, 2))
        ddp.register_comm_hook(None, _never_done)
        with pytest.raises(CommunicationError, match=r"not done after 0\.5 s, the timeout of the group") as caught:
            ddp(torch.ones(1, 2)).sum().backward()
        assert "the comm hook _never_done of bucket 0 of 1 (weight, bias)" in "".join(caught.value.__notes__)
    finally:
        dist.destroy_process_group()


def _never_done(state: Any, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations
    return Future()


@pytest.mark.parametrize(
    "held",
    [
        None, True, [], torch.zeros(1), SENT[:2], torch.zeros(4), torch.zeros(3, dtype=torch.complex64),
        torch.zeros(3).to_sparse(),
    ],
)  # fmt: skip
def test_what_cannot_take_a_buckets_place_is_refused(held: Any) -> None:
    with pytest.raises(CommunicationError, match=r"\[rank 5\] a comm hook's future must hold the reduced tensor"):
        tensor_in(held, SENT, "[rank 5]")


@pytest.mark.parametrize("held", [SENT, [SENT], torch.zeros(3, 1), torch.zeros(3, dtype=torch.float16)])
def test_what_can_take_a_buckets_place_is_taken(held: Any) -> None:
    assert tensor_in(held, SENT, "").numel() == 3


class Failing(dist.ProcessGroup):
    """A group of one rank, whose all-reduces fail in their future alone once it is told to."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self.inner, self.fails, self.works = inner, False, list[Work]()

    def getBackendName(self) -> str:  # noqa: N802
        return "failing"

    def allreduce(self, tensors: list[Tensor], *options: Any) -> dist.Work:  # type: ignore[override]
        if not self.fails:
            return self.inner.allreduce(tensors, *options)
        self.works.append(Work(future=future_of(RuntimeError("held"))))
        return self.works[-1]


def test_a_wait_in_a_graph_raises_what_the_future_holds() -> None:
    torch._dynamo.reset()
    with group_of_one() as group:
        assert checked(group) is group
        failing = Failing(group)
        assert isinstance(checked(failing), CheckedGroup)
        ddp = DistributedDataParallel(nn.Linear(2, 2), process_group=failing, init_sync=False)
        average_in_graph(ddp)
        call = torch.compile(ddp, backend="aot_eager")
        call(torch.ones(1, 2)).sum().backward()
        assert ddp.module.weight.grad is not None
        failing.fails = True
        ddp.zero_grad()
        with pytest.raises(RuntimeError, match="held"):
            call(torch.ones(1, 2)).sum().backward()
        assert failing.works
        assert ddp.module.weight.grad is None


def rank_with_a_hook(rank: int) -> list[float]:
    """Train with all three ranks, and then with two of them; return the gradients."""
    layer = nn.Linear(1, 1, bias=False)
    ddp = DistributedDataParallel(layer)
    ddp._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)
    found = []
    pair = dist.new_group([0, 1])
    for group, size in ((dist.group.WORLD, 3), (pair, 2)):
        if rank < size:
            assert group is not None
            ddp._update_process_group(group)
            layer.zero_grad()
            ddp(torch.full((1, 1), 6.0 * rank)).sum().backward()
            assert layer.weight.grad is not None
            found.append(float(layer.weight.grad))
    dist.barrier()
    return found


def test_a_built_in_hook_follows_the_wrappers_group(tmp_path: Path) -> None:
    assert run_ranks(rank_with_a_hook, 3, tmp_path) == [[6.0, 3.0], [6.0, 3.0], [6.0]]


def rank_normalising(rank: int) -> list[str]:
    """Let the first all-gather, and then the all-reduce of a SyncBatchNorm fail in its future."""
    told = []
    layer = SyncBatchNorm(2)
    rows = torch.ones(2, 2, requires_grad=True)
    places: tuple[tuple[Any, str], ...] = ((dist, "all_gather"), (dist.ProcessGroup, "allreduce"))
    for place, operation in places:
        original = getattr(place, operation)

        def fail(*args: Any, original: Any = original, **kwargs: Any) -> dist.Work:
            original(*args, **kwargs).wait()
            return Work(future=future_of(RuntimeError("held")))

        setattr(place, operation, fail)
        try:
            layer(rows).sum().backward()
        except RuntimeError as error:
            told.append("\n".join((str(error), *getattr(error, "__notes__", ()))))
        finally:
            setattr(place, operation, original)
    assert rows.grad is None
    return told


def test_statistics_that_did_not_come_are_no_statistics(tmp_path: Path) -> None:
    for told in run_ranks(rank_normalising, 2, tmp_path):
        assert [text.splitlines() for text in told] == [["held", "in all_gather"], ["held", "in all_reduce"]]
