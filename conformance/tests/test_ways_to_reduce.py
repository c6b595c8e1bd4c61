"""A DDP that is right may average gradients by any means: no check of the traffic fails it, or claims to have counted.

What all-reduces of the gradients' own elements must look like is found by the mutants of chapter buckets.
"""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from conformance.backends.backend import get_backend
from conformance.chapters.accumulation import scenarios as accumulation
from conformance.chapters.accumulation.micro_batches import Branches, moves_gradients
from conformance.chapters.buckets import scenarios as buckets
from conformance.observation import Collective
from conformance.programs.bucket_traffic import but_for_agreement
from conformance.programs.gradient_traffic import num_issued, uncounted
from conformance.run.scenario_runner import ScenarioRunner
from conformance.tests.evidence_by_hand import collective
from conformance.tests.ways_to_reduce import WAYS
from conformance.verdict import Verdict
from conformance.workers.controller import Controller
from conformance.workers.zygote_process import ZygoteProcess

#: Cheap scenarios of all that is asked about traffic, and what can be judged of any means.
SCENARIOS = {
    "buckets/BUCKET-01/all-world2": False,
    "buckets/BUCKET-09/default-cap-world2": False,
    "buckets/BUCKET-10/registered-world2": True,
    "buckets/BUCKET-17/cap-400-plain-world2": False,
    "buckets/BUCKET-12/mlp-world3": False,
    "accumulation/ACCUM-01/local-world2": True,
}
BY_ID = {one.id: one for one in (*buckets.scenarios(), *accumulation.scenarios())}
#: Those whose means can be counted: by all-reduces of the gradients' own elements.
COUNTED = {"InThread", "AlwaysAgrees"}
OF_EVERY_PUSH = {"Sends", "Pads", "InPairs", "InThread"}


@pytest.fixture(scope="module")
def controller(zygote: ZygoteProcess) -> Iterator[Controller]:
    with Controller(get_backend("gloo"), preload=("conformance.tests.ways_to_reduce",), zygote=zygote) as controller:
        yield controller


@pytest.mark.parametrize(
    "way", [way if way in OF_EVERY_PUSH else pytest.param(way, marks=pytest.mark.nightly) for way in WAYS]
)
def test_who_averages_by_other_means_does_not_fail(controller: Controller, way: str) -> None:
    runner = ScenarioRunner(WAYS[way], get_backend("gloo"), controller, native=False)
    for id_, of_any_means in SCENARIOS.items():
        result = runner.run(BY_ID[id_]).subject
        expected = {Verdict.PASS} if of_any_means or way in COUNTED else {Verdict.PASS, Verdict.UNKNOWN}
        assert result.verdict in expected, f"{id_}: {result.summary}"
        if result.verdict is Verdict.UNKNOWN:
            assert "could not be measured: this DDP" in result.summary


def _sent(*sizes: int, op: str = "all_reduce", **changes: Any) -> list[Collective]:
    return [collective(index, size, op, **changes) for index, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sent", "why_not"),
    [
        (_sent(193), ""),
        (_sent(64, 129), ""),
        (_sent(64, 129, members=(0, 1, 2, 3)), ""),
        (_sent(129), ""),  # some were left out
        (_sent(64, 129, 64, 129), ""),  # each was reduced twice
        (_sent(193, 193), ""),
        (_sent(193, dtypes=("float16",)), ""),  # half of their digits were left out
        (_sent(193 + 64), ""),  # more than belongs to the gradients
        (_sent(), ""),
        (_sent(64, op="all_gather"), ""),
        (_sent(193, op="recv"), ""),
        (_sent(193, dtypes=("float64",)), "this DDP reduces gradients in another dtype: float64"),
        (_sent(64, 192), "this DDP reduces 63 elements more than there are, as if they were padding"),
        (_sent(193, op="all_gather"), "this DDP moves gradients by all_gather"),
        (_sent(193, op="send"), "this DDP moves gradients by send"),
        (_sent(193, 193, members=(0, 2)), "this DDP reduces gradients in groups of 2 of 4 ranks"),
    ],
)
def test_what_can_be_counted_is_counted(sent: list[Collective], why_not: str) -> None:
    agreement = collective(9, 500, dtypes=("int32",))
    assert uncounted([*sent, agreement], {"float32": 193}, 4) == why_not


@pytest.mark.parametrize(
    ("one", "moves"),
    [
        (collective(0, 26, "all_gather"), True),
        (collective(0, 1, "send", phase="forward"), True),  # a part of them, after backward
        (collective(0, 4 * 26, "all_gather", dtypes=("uint8",)), True),  # their bytes
        (collective(0, 5, dtypes=("int32",)), False),
        (collective(0, 0, "barrier", dtypes=()), False),
    ],
)
def test_no_sync_is_broken_by_whatever_can_hold_gradients(one: Collective, *, moves: bool) -> None:
    assert sum(parameter.numel() for parameter in Branches().parameters()) == 26
    assert moves_gradients(one, Branches()) is moves


def test_one_agreement_of_all_ranks_belongs_to_a_step() -> None:
    def left(*sent: Collective) -> list[str]:
        return [f"{one.op} {one.numel}" for one in but_for_agreement(sent, num_parameters=6)]

    flags = collective(0, 6, dtypes=("int32",))
    assert left(flags, collective(1)) == ["all_reduce 4"]
    assert left(collective(0, 6, "all_gather", dtypes=("uint8",))) == []
    assert left(flags, collective(1, 6, dtypes=("int32",)), collective(2)) == ["all_reduce 6", "all_reduce 4"]
    assert left(collective(0, 7, dtypes=("int32",))) == ["all_reduce 7"]
    assert left(collective(0, 6, "broadcast", dtypes=("int32",))) == ["broadcast 6"]


def test_waits_for_what_another_thread_issues() -> None:
    issued: list[Collective] = []
    asked = threading.Event()

    def so_far() -> list[Collective]:
        asked.set()
        return list(issued)

    def issue() -> None:
        asked.wait()
        issued.extend(_sent(64, 129))

    thread = threading.Thread(target=issue)
    thread.start()
    assert num_issued(so_far, awaited=2) == 2
    thread.join()
    assert num_issued(so_far, awaited=0) == 2


def test_waits_no_longer_than_a_thread_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.programs.gradient_traffic._PATIENCE_S", 0.0)
    assert num_issued(lambda: _sent(64), awaited=2) == 1
