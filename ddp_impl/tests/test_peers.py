"""What ranks tell each other when one fails: bounded, without cost in a good step, never in the error's way."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from ddp_impl import DistributedDataParallel
from ddp_impl.base.errors import CommunicationError, ReplicaMismatchError
from ddp_impl.base.telemetry import log
from ddp_impl.tests.ranks import group_of_one, run_ranks
from ddp_impl.wire import peers
from ddp_impl.wire.peers import Peers, SlowWaits


class Group(dist.ProcessGroup):
    """One of two ranks that have a store and no connection."""

    def __init__(self, rank: int, store: Any) -> None:
        super().__init__(rank, 2)  # type: ignore[call-arg]
        self._rank, self.store = rank, store

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 2

    def get_group_store(self) -> Any:
        if self.store is None:
            raise RuntimeError("no store")
        return self.store


def pair(store: Any) -> list[Peers]:
    return [Peers(Group(rank, store)) for rank in range(2)]


def failed_wait(waiting: Peers) -> str:
    with pytest.raises(ConnectionError, match="closed") as caught, waiting.awaiting("backward", "bucket 0"):
        raise ConnectionError("closed")
    return "\n".join(getattr(caught.value, "__notes__", ()))


def test_the_first_word_of_a_step_is_read_and_kept() -> None:
    zero, one = pair(dist.HashStore())  # type: ignore[attr-defined]
    with pytest.raises(KeyError), one.publishing_errors("forward"):
        raise KeyError("first")
    one.publish("raised something later")
    told = failed_wait(zero)
    assert "[rank 0] waited in vain for bucket 0 in backward of step 0" in told
    assert "rank 1 raised KeyError in forward of step 0" in told
    assert "later" not in told


def test_words_of_steps_long_past_and_of_other_wrappers_are_not_read() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    groups = [Group(rank, store) for rank in range(2)]
    zero, one = map(Peers, groups)
    one.publish("raised this long ago")
    zero.step = 5
    assert "No other rank has said why" in failed_wait(zero)
    later = [Peers(group) for group in groups]
    assert "No other rank has said why" in failed_wait(later[0])


def test_a_store_may_hold_what_an_earlier_run_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words of runs over one store, whether or not the ranks have agreed on a name for the run."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    for run in ("", "one", "two"):
        monkeypatch.setattr(peers, "_began", time.time())
        assert "No other rank has said why" in failed_wait(pair(store)[0])
        zero, one = pair(store)
        zero.refuse_unlike(compares=True)
        zero.company.run = one.company.run = run
        with ThreadPoolExecutor() as pool:
            told = [pool.submit(each.compare_buffers, run, timedelta(seconds=30)) for each in (zero, one)]
            assert [each.result() for each in told] == [[run, run] if run else None] * 2
        one.publish("raised, perhaps")
        assert "rank 1 raised, perhaps" in failed_wait(zero)
        one.publish_init_sync(False)
        zero.refuse_unlike(compares=False)
        with pytest.raises(ReplicaMismatchError, match=r"init_sync.* is True on rank 0 and False on rank 1"):
            zero.refuse_unlike(compares=True)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux says when a process began")
def test_a_rank_that_imports_late_reads_what_others_have_left_before() -> None:
    """A fork takes what was left before it for an earlier run's."""
    code = (
        "import json, os, sys, time; started = time.time(); time.sleep(0.5)\n"
        "from ddp_impl.wire import peers; of = peers.Peers._of_this_run\n"
        "class Unagreed: company = type('', (), {'run': ''})\n"
        "def reads(at): return of(Unagreed, json.dumps([at, True])) is True\n"
        "time.sleep(0.5); forked = time.time()\n"
        "if os.fork() == 0: print(reads(started), reads(forked + 0.5)); sys.exit()\n"
        "os.wait(); print(reads(started), reads(started - 60))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout.split() == ["False", "True", "True", "False"], ran.stderr


def test_a_wait_in_vain_elsewhere_is_no_cause() -> None:
    zero, one = pair(dist.HashStore())  # type: ignore[attr-defined]
    failed_wait(one)
    told = failed_wait(zero)
    assert "rank 1 waited in vain for bucket 0" in told
    assert "No other rank has said why" in told


def test_without_a_store_only_this_rank_is_described() -> None:
    zero, one = pair(None)
    one.publish("raised")
    assert "waited in vain for bucket 0" in failed_wait(zero)


def test_a_store_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Frozen:
        def set(self, key: str, value: str) -> None:
            raise OSError("broken pipe")

        def check(self, keys: list[str]) -> bool:
            return threading.Event().wait()

    monkeypatch.setattr(peers, "_STORE_ANSWERS_S", 0.1)
    zero, _ = pair(Frozen())
    begin = time.monotonic()
    assert "store does not answer" in failed_wait(zero)
    assert time.monotonic() - begin < 30


def test_a_good_step_does_not_touch_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with group_of_one():
        ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
        monkeypatch.setattr(Peers, "_store", lambda _: pytest.fail("asked for the store"))
        for _ in range(3):
            ddp(torch.ones(1, 2)).sum().backward()


def rank_that_fails(rank: int) -> tuple[str, str]:
    group = dist.new_group()
    layer = torch.nn.Linear(2, 2)
    ddp = DistributedDataParallel(layer, process_group=group)

    def refuse(gradient: torch.Tensor) -> torch.Tensor:
        if rank == 1:
            raise ArithmeticError("no such gradient")
        dist.barrier()  # only now does rank 0 begin to wait for what rank 1 will never send, and not for long
        _set_pg_timeout(timedelta(seconds=2), group)
        return gradient

    layer.weight.register_hook(refuse)
    try:
        ddp(torch.ones(1, 2)).sum().backward()
    except Exception as error:
        if rank == 1:
            dist.barrier()
        dist.barrier()
        return type(error).__name__, "\n".join((str(error), *getattr(error, "__notes__", ())))
    raise AssertionError("nothing was raised")


def test_an_exception_in_a_hook_is_reported_by_name_and_place(tmp_path: Path) -> None:
    (_, waited), (name, own) = run_ranks(rank_that_fails, 2, tmp_path)
    assert (name, own) == ("ArithmeticError", "no such gradient")
    assert "rank 1 raised ArithmeticError in backward of step 0" in waited
    assert "in refuse): no such gradient" in waited


def test_an_exception_in_a_backward_is_looked_for_among_young_objects_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("no such gradient")

    def young(generation: int) -> list[Any]:
        assert generation < 2, "how many objects the process holds must not count"
        return objects_of(generation)

    objects_of = gc.get_objects
    monkeypatch.setattr(gc, "get_objects", young)
    monkeypatch.setattr(gc, "get_referrers", lambda *_: pytest.fail("went through all objects"))
    with group_of_one():
        layer = torch.nn.Linear(2, 2)
        ddp = DistributedDataParallel(layer)
        layer.weight.register_hook(fail)
        with pytest.raises(ArithmeticError):
            ddp(torch.ones(1, 2)).sum().backward()
        told = ddp.reducer.peers._published
    assert told is not None
    assert "raised ArithmeticError in backward of step 0" in told.reason
    assert "in fail): no such gradient" in told.reason


def test_an_error_of_our_own_needs_no_word_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    zero, _ = pair(dist.HashStore())  # type: ignore[attr-defined]
    monkeypatch.setattr(Peers, "reports", lambda *_, **__: pytest.fail("waited for words"))
    with pytest.raises(ReplicaMismatchError) as caught, zero.awaiting("construction", "the other ranks' modules"):
        raise ReplicaMismatchError("differs")
    assert not hasattr(caught.value, "__notes__")


def rank_that_waits(rank: int) -> list[str]:
    """Rank 1 comes to its backward only when rank 0 has said that it waits."""
    store = dist.distributed_c10d._get_default_store()
    layer = torch.nn.Linear(2, 2)
    ddp = DistributedDataParallel(layer)
    peers.slow_waits._slow_s = 0.2  # now: on a busy machine ranks wait as long in the constructor
    said: list[str] = []
    handler = logging.Handler()

    def note(record: logging.LogRecord) -> None:
        said.append(record.getMessage())
        if len(said) == 2:
            store.set("rank 0 has spoken", "")

    handler.emit = note  # type: ignore[method-assign]
    log.addHandler(handler)
    loss = ddp(torch.ones(1, 2)).sum()
    if rank == 1:
        store.wait(["rank 0 has spoken"], timedelta(seconds=60))
    loss.backward()
    return said


def test_a_rank_that_waits_long_says_for_what_and_who_has_not_come(tmp_path: Path) -> None:
    of_zero, _ = run_ranks(rank_that_waits, 2, tmp_path)
    assert of_zero[0].startswith("[rank 0] has waited ")
    assert "bucket 0 of 1" in of_zero[0]
    assert "weight" in of_zero[0]
    assert "in backward of step 0, and goes on waiting" in of_zero[0]
    assert of_zero[1].startswith("[rank 0] meanwhile rank 1 has not come and does not say that it waits")


class _Waiting:
    """Waits for ever."""

    def __init__(self) -> None:
        self.wait: Any = (0.0, "backward", "more")
        self.logged = 0

    def log_slow_wait(self, wait: Any, seconds: float) -> None:
        self.logged += 1

    def answer(self, wait: Any, seconds: float) -> None:
        pass


def test_each_slow_wait_is_logged_once_though_several_last(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = SlowWaits(slow_s=0.0)
    waiting: list[Any] = [_Waiting(), _Waiting()]
    monkeypatch.setattr(peers, "all_peers", lambda: waiting)
    looks = iter([False, False, False, True])
    monkeypatch.setattr(waits._is_over, "wait", lambda _: next(looks))
    waits._watch()
    assert [each.logged for each in waiting] == [1, 1]


def test_waits_for_a_bucket_are_watched_however_long_ago_it_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watcher ends by itself when nobody waits: sending a bucket and awaiting it each need one."""
    with group_of_one():
        ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
        ddp.reducer.reduction.num_ranks = 2  # alone, nobody is waited for
        started: list[Any] = []
        monkeypatch.setattr(peers.slow_waits, "watcher", None)
        monkeypatch.setattr(peers.slow_waits, "start", lambda: started.append(ddp.reducer.peers.wait))
        ddp(torch.ones(1, 2)).sum().backward()
    assert [phase for _, phase, _ in started] == ["backward", "backward"]


def test_after_a_failure_of_one_wrapper_no_other_of_its_group_goes_on() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    group = Group(0, store)
    failing, other = Peers(group), Peers(group)
    with pytest.raises(ArithmeticError), failing.awaiting("backward", "a bucket", with_reports=False):
        raise ArithmeticError("no such sum")
    with pytest.raises(CommunicationError, match="Another DistributedDataParallel"), other.awaiting("backward", "more"):
        pytest.fail("its collective would meet another one of the other ranks")
    with Peers(group).awaiting("forward", "a new beginning"):
        pass
