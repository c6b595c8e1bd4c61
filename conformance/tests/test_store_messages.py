"""Messages of ranks through the store, and for how long one rank waits for another."""

import os
from collections.abc import Iterable, Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from conformance.programs.operations import store_messages
from conformance.programs.operations.store_messages import Board, all_publish, introduce

SHORT = timedelta(milliseconds=1)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    store = HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    return store


@pytest.mark.usefixtures("store")
def test_a_board_reports_missing_notes() -> None:
    board = Board("test")
    board.put("here")
    assert board.lacking(["here"], SHORT) == []
    assert board.lacking(["here", "there"], SHORT) == ["there"]


def test_a_rank_that_others_keep_waiting_is_waited_for_by_their_time(
    store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[int] = []

    def slow(pids: Iterable[int], seconds: float, *, pause_s: float) -> Iterator[None]:
        watched.extend(pids)
        yield
        if watched:
            store.set("said/it/[0, 1]/1/1", "")  # the other rank says so once the machine has let it
            yield

    monkeypatch.setattr(store_messages, "seconds_of", slow)
    monkeypatch.setattr(store_messages, "_AT_ONCE", SHORT)
    monkeypatch.setattr(store_messages, "_num_published", type(store_messages._num_published)())
    introduce()
    for number, told in ((2, f"4711 {os.uname().nodename}"), (3, "815 another-host")):
        store.set(f"process/{number}", told)
        store.add("processes", 1)
    assert all_publish("it", 0, [0, 1])
    assert watched == [4711]
    assert not all_publish("something else", 0, [0, 2])
