"""A rank that stops, in many different places: who is missing, from which collective, in time.

Each place is a scenario of the chapters and a fault in it. What the other ranks must be said to wait for is known from
the same scenario without the fault: the collective that the rank would have issued next.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from conformance.backends.backend import get_backend
from conformance.observation import Collective, Observation
from conformance.programs.registry import get_program
from conformance.run.judge import judge
from conformance.scenario import Fault, Scenario
from conformance.subjects.subject import get_subject
from conformance.suite import load_scenarios
from conformance.verdict import Verdict
from conformance.workers.controller import Controller
from conformance.workers.zygote_process import ZygoteProcess

DEADLINE_S = 1.5

OURS = get_subject("ddp_impl")
BY_ID = {scenario.id: scenario for scenario in load_scenarios()}


@dataclass(frozen=True)
class Place:
    """Where `rank` stops (`kind`): before the collective number `at`, or on entering the `occurrence`-th phase `at`.

    For a phase, `next_collective` is the number of the first collective that the rank does not come to, in the history
    of the whole scenario.
    """

    name: str
    scenario: str
    at: int | str
    next_collective: int = -1
    occurrence: int = 0
    kind: str = "stop"
    rank: int = 1

    @property
    def fault(self) -> Fault:
        if isinstance(self.at, int):
            return Fault(self.kind, self.rank, "collective", self.at)
        return Fault(self.kind, self.rank, self.at, self.occurrence)

    @property
    def missed(self) -> int:
        return self.at if isinstance(self.at, int) else self.next_collective


TRAIN = "gradients/GRAD-01/many-small-layers-world2"
THREE = "gradients/GRAD-01/mlp-world3"
BUFFERS = "buffers/BUFFER-03/saved-3-forwards-world2"
UNUSED = "unused/UNUSED-03/changing-world2"
STATIC = "static_graph/STATIC-01/mlp-world2"
DELAYED = "delayed_all_reduce/DELAY-02/weight-each-alone-world2"
LOCAL = "accumulation/ACCUM-01/local-world2"
SECOND = "membership/MEMBER-08/outsider-each-alone-world3"

PLACES = [
    Place("construction, comparing modules", TRAIN, at=0),
    Place("construction, copying the state", TRAIN, at=1),
    Place("construction, in its own code", TRAIN, at="construct", next_collective=0, kind="loop"),
    Place("first bucket", DELAYED, at=5),
    Place("middle bucket, busy", DELAYED, at=8, kind="loop"),
    Place("last bucket", DELAYED, at=12),
    Place("rebuilding buckets", TRAIN, at=3),
    Place("buffers before a forward", BUFFERS, at=6),
    Place("map of unused parameters", UNUSED, at=6),
    Place("static graph, second step", STATIC, at=5),
    Place("static graph, usage of the first step", STATIC, at=3),
    Place("comm hook", "comm_hooks/HOOK-01/raw-world2", at=5),
    Place("mixed precision", "mixed_precision/MIXED-01/mlp-half-world2", at=4),
    Place("optimizer in the backward", "optimizer_in_backward/OPTIM-01/sgd-world2", at=4),
    Place("join, shadowing a bucket", "join/JOIN-01/mlp-24-world2", at=11, rank=0),
    Place("join, the last copy of the state", "join/JOIN-01/mlp-24-world2", at=17, rank=0),
    Place("last local backward", LOCAL, at="backward", occurrence=3, next_collective=4),
    Place("forward, before anything is communicated", TRAIN, at="forward", occurrence=1, next_collective=4),
    Place("backward, busy", TRAIN, at="backward", occurrence=2, next_collective=5, kind="loop"),
    Place("optimizer", TRAIN, at="optimizer", next_collective=4),
    Place("one of three, in the middle", THREE, at=4),
    Place("one of three, rank 0", THREE, at="optimizer", occurrence=1, next_collective=5, rank=0),
    Place("a second group", SECOND, at=22),
    Place("a second group, its first collective", SECOND, at=19),
]


#: A place of each kind; the nightly tries the others, too.
OF_EVERY_PUSH = {
    "construction, comparing modules", "last bucket", "buffers before a forward", "map of unused parameters",
    "static graph, second step", "join, shadowing a bucket", "backward, busy", "optimizer",
    "one of three, in the middle", "a second group",
}  # fmt: skip


def _places() -> list[Any]:
    return [
        pytest.param(place, marks=() if place.name in OF_EVERY_PUSH else pytest.mark.nightly, id=place.name)
        for place in PLACES
    ]


@pytest.fixture(scope="module")
def controller(zygote: ZygoteProcess) -> Iterator[Controller]:
    with Controller(get_backend("gloo"), zygote=zygote) as controller:
        yield controller


@pytest.fixture(scope="module")
def whole(controller: Controller) -> Callable[[Scenario], Mapping[int, Observation]]:
    """Run a scenario to its end, once."""
    seen: dict[str, Mapping[int, Observation]] = {}

    def run(scenario: Scenario) -> Mapping[int, Observation]:
        if scenario.id not in seen:
            seen[scenario.id] = controller.run(scenario, OURS)
        assert {str(one.fate) for one in seen[scenario.id].values()} == {"returned"}
        return seen[scenario.id]

    return run


@pytest.mark.parametrize("place", _places())
def test_a_hang_is_explained_in_time(
    controller: Controller, whole: Callable[[Scenario], Mapping[int, Observation]], place: Place
) -> None:
    scenario = BY_ID[place.scenario]
    missed: Collective = whole(scenario)[place.rank].history[place.missed]
    idle = scenario.replace(id="hangs/HANG/idle", program="train", schedule=(), options={}, arguments={})
    controller.run(idle, OURS)  # ranks are there: their making is not part of the deadline

    started = time.monotonic()
    stopped = scenario.replace(faults=(place.fault,), deadline_s=DEADLINE_S)
    observations = controller.run(stopped, OURS)
    verdict, findings = judge(stopped, get_program(scenario.program), observations, None, None)
    elapsed_s = time.monotonic() - started

    assert verdict is Verdict.HANG, findings
    (finding,) = [one for one in findings if one.verdict is Verdict.HANG]
    group = "" if missed.group == "default" else r" of group \d+"  # groups that a process made before count
    sentence = re.escape(f"rank {place.rank} is missing from {missed.describe()}") + group + "; "
    assert re.match(sentence, finding.summary), finding.summary
    assert ("stopped by a signal" in finding.summary) == (place.kind == "stop")
    assert observations[place.rank].faults_fired == 1
    assert observations[place.rank].phase == (place.at if isinstance(place.at, str) else missed.phase)
    assert elapsed_s >= DEADLINE_S


def test_places_are_different() -> None:
    assert len({(place.scenario, place.fault) for place in PLACES}) == len(PLACES)
