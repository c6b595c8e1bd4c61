"""What a replay says of the values that collectives carried, and of the lines that issued them."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from conformance.recorder.look import Look, in_short
from conformance.recorder.recorded_group import RecordedWork
from conformance.recorder.recorder import Recorder


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([torch.tensor([1.0, 2.5])], "[1, 2.5]"),
        ([torch.arange(6)], "[0, 1, 2, 3, ...] sum 15"),
        ([torch.tensor([[1.0], [2.0]]), torch.tensor([3.0, 4.0, 5.0])], "[1, 2, 3, 4, ...] sum 15"),
        ([torch.tensor([True, False])], "[True, False]"),
        ([torch.tensor([0.0, 3.0]).to_sparse()], "[0, 3]"),
        ([torch.tensor([1 + 2j])], "[(1+2j)]"),
        ([torch.full((5,), 1 + 2j)], "[(1+2j), (1+2j), (1+2j), (1+2j), ...]"),
        ([torch.empty(0)], "[]"),
        ([], "[]"),
    ],
)
def test_the_first_values_and_the_sum_are_shown(tensors: list[Tensor], words: str) -> None:
    assert in_short(tensors) == words


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def grouped(recorder: Recorder) -> dist.ProcessGroup:
    return recorder.wrap(dist.ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=10)), "alone")


def test_a_collective_is_looked_at_when_it_is_issued_and_when_it_has_landed(recorder: Recorder) -> None:
    recorder.start(looks=True)
    group = grouped(recorder)
    value = torch.tensor([1.0, 2.0])
    work = group.allreduce([value])
    (waiting,) = recorder.carried()
    assert (waiting.given, waiting.left) == ("[1, 2]", "")
    assert waiting.issued_at.startswith("tests/test_look.py:")
    assert " in test_a_collective_is_looked_at" in waiting.issued_at
    work.wait()
    value.zero_()  # what a DDP does afterwards is not what the collective has left
    assert recorder.carried()[0].left == "[1, 2]"


def test_whoever_takes_a_future_may_change_what_the_collective_has_left(recorder: Recorder) -> None:
    group = grouped(recorder)
    for _ in range(200):  # whose thread runs a callback is a race: of 3,000 rounds, 89 once found the zeros
        recorder.start(looks=True)
        value = torch.tensor([1.0, 2.0])
        future = group.allreduce([value]).get_future()
        future.then(lambda _, changed=value: changed.zero_()).wait()  # type: ignore[misc]
        assert recorder.carried()[0].left == "[1, 2]"


def test_a_future_that_is_looked_at_raises_what_the_collective_has_raised(recorder: Recorder) -> None:
    class Failed(dist.Work):
        def get_future(self) -> torch.futures.Future[Any]:
            future: torch.futures.Future[Any] = torch.futures.Future()
            future.set_exception(ValueError("the peer is gone"))
            return future

    recorder.start(looks=True)
    flight = recorder.issue("all_reduce", "alone", ((1,),), ("float32",), "SUM", -1, (0,))
    flight.look = Look([], [])
    with pytest.raises(ValueError, match="the peer is gone"):
        RecordedWork(Failed(), [flight], recorder).get_future().wait()


def test_nothing_is_looked_at_unless_somebody_asks(recorder: Recorder) -> None:
    grouped(recorder).allreduce([torch.ones(1)]).wait()
    assert recorder.carried() == ()
