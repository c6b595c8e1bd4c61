"""Runs scenarios on a subject, beside torch's own DDP, and judges both against the truth.

The command line and the mutants are thin layers over `run`; pytest, which orders scenarios itself, uses the
`ScenarioRunner` underneath.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass

from conformance.backends.backend import Backend
from conformance.errors import BackendError, ScenarioError, SubjectError
from conformance.models.catalogue import get_fixture
from conformance.observation import IMPORT, Observation
from conformance.programs.registry import get_program, preloads_of
from conformance.run.attempt import Ranks
from conformance.run.environment import capture_environment
from conformance.run.first_uses import first_uses
from conformance.run.known_failures import Excuses
from conformance.run.lanes import in_lanes
from conformance.run.order import LISTED, Order
from conformance.run.outcome import Outcome, Progress
from conformance.run.patience import nothing_but_hangs
from conformance.run.report import JudgedSubject, Report
from conformance.run.scenario_runner import OnObserved, ScenarioRunner
from conformance.run.schedule import Schedule, Span, batches_of
from conformance.scenario import DEFAULT_DEADLINE_S, Scenario, Step
from conformance.spec.catalogue import load_catalogue
from conformance.subjects.subject import KNOWN, Subject
from conformance.waiting.pending import Pending
from conformance.waiting.processors import Processors
from conformance.workers.controller import Controller
from conformance.workers.hearing import MOST_DEADLINES
from conformance.workers.zygote_process import ZygoteProcess

OnEvent = Callable[[Progress], None]

#: While one scenario is judged, the next one runs. The one after that begins, too, while so many processors are idle:
#: ranks that hang, until their deadline or another one's timeout, or that wait for each other, leave them so.
_IDLE_PROCESSORS = 0.3
#: So often that is looked at, and so long another one waits in any case.
_LOOK_S, _PATIENCE_S = 0.05, 2.0
#: So many scenarios at most are waited for.
_MOST_WAITING = 9


def run(
    scenarios: Iterable[Scenario],
    subject: Subject,
    backend: Backend,
    *,
    native: bool = True,
    fail_fast: bool = False,
    order: Order = LISTED,
    on_event: OnEvent = lambda event: None,
    most_hangs: int | None = None,
    seconds: float = math.inf,
    excuses: Excuses = lambda scenario, verdict: None,
    controller: Ranks | None = None,
    zygote: ZygoteProcess | None = None,
    one_at_a_time: bool = False,
    jobs: int = 1,
    on_schedule: Callable[[Schedule], None] = lambda schedule: None,
    on_observed: OnObserved = lambda scenario, observations: None,
) -> Report:
    """Run `scenarios` on `subject` and, with `native`, on torch's own DDP, and return what was found.

    Ctrl-C ends the run early with a report of what is known so far. `excuses` says which failures were known
    beforehand. With `most_hangs` the run ends when so many scenarios have run and every one hung, and after so many
    `seconds` it does in any case. A passed `controller`
    stays open; without one, ranks come from `zygote`, which stays open, too, or else from a new one. While some ranks
    wait, others run further scenarios, unless `one_at_a_time`; outcomes are in order. With more than one of `jobs`
    there are so many lanes, processes with ranks of their own; a passed `controller` has one. `on_schedule` is told in
    the end when what ran; `on_observed` is called in the lane, see `ScenarioRunner`.

    Raises, before anything starts:
        ScenarioError: there is no scenario, or one names a program or model that does not exist.
        BackendError: the backend is unavailable or serves none of the world sizes.
        SubjectError: the subject cannot be constructed around the simplest model.

    """
    chosen = order.apply(scenarios)
    check(chosen, backend)
    preload = preloads_of(chosen)
    judging = _Judging(
        chosen, subject, backend, native, excuses, one_at_a_time, first_uses(chosen, subject, backend),
        on_observed,
    )  # fmt: skip
    if controller is not None or jobs == 1:
        ranks = nullcontext(controller) if controller else Controller(backend, preload=preload, zygote=zygote)
        with ranks as own:
            return _run(
                judging,
                lambda batches, begin: judging.outcomes(map(begin, itertools.chain(*batches)), own),
                own, fail_fast, most_hangs, seconds, on_event, on_schedule, jobs=1,
            )  # fmt: skip

    def lane(places: Iterator[int]) -> Generator[_Judged]:
        with shared.here() as branch, Controller(backend, preload=preload, zygote=branch) as own:
            yield from judging.outcomes(places, own)

    def in_them(batches: list[tuple[int, ...]], begin: Callable[[int], int]) -> Generator[_Judged]:
        shared.await_ready()
        return in_lanes(lane, (tuple(map(begin, batch)) for batch in batches), min(jobs, len(batches)))

    lent = nullcontext(zygote) if zygote else closing(ZygoteProcess(None, preload))
    with lent as shared, Controller(backend, preload=preload, zygote=shared) as probed:
        return _run(judging, in_them, probed, fail_fast, most_hangs, seconds, on_event, on_schedule, jobs=jobs)


def check(scenarios: Iterable[Scenario], backend: Backend) -> None:
    """Raise the errors of `run` that can be known without starting a process."""
    scenarios = tuple(scenarios)
    if not scenarios:
        raise ScenarioError("no scenario to run; a run of nothing would show nothing")
    if wrong := backend.misdeclared():
        raise BackendError(f"backend {backend.name!r}: {wrong}")
    backend.require()
    check_world_sizes([min(scenario.world_size for scenario in scenarios)], backend)
    for scenario in scenarios:
        try:
            get_program(scenario.program)
            dtypes = get_fixture(scenario.model).dtypes
            if scenario.dtype not in dtypes:
                raise ScenarioError(f"model {scenario.model} exists in {', '.join(dtypes)}, got {scenario.dtype}")
        except ScenarioError as error:
            raise ScenarioError(f"{scenario.id}: {error}") from error


def check_world_sizes(world_sizes: Iterable[int], backend: Backend) -> None:
    """Raise `BackendError` when `backend` cannot serve a world size that was asked for by number."""
    limit = backend.max_world_size()
    for world_size in world_sizes:
        if limit is not None and world_size > limit:
            raise BackendError(
                f"backend {backend.name!r} serves at most {limit} rank(s) here, got world size {world_size}"
            )


def probe(subject: Subject, world_size: int, controller: Ranks, backend: str = "gloo") -> None:
    """Construct `subject` around a small MLP and take one step over `backend`, before any requirement is judged.

    Raises `BackendError` when ranks cannot connect to each other, and `SubjectError` when every rank fails in the
    constructor: then nothing can be said about any requirement. A rank that had not come so far when another failed has
    no say.
    """
    scenario = Scenario("probe", ("PROBE",), "train", "mlp", world_size, schedule=(Step(),))
    observations = controller.start(scenario, subject).wait().values()
    failed = [one for one in observations if one.fate.kind not in ("returned", "abandoned")]
    if apart := [one for one in failed if one.phase == "rendezvous"]:
        raise BackendError(
            f"the ranks cannot connect to each other, with no DDP yet; rank {apart[0].rank}: "
            f"{apart[0].raised or apart[0].fate}. `ddp-conformance smoke` tries the backend step by step"
        )
    tried = [one for one in observations if one.fate.kind != "abandoned" or one.phase not in ("rendezvous", "start")]
    if not tried or not all(map(_died_in_constructor, tried)):
        return
    first = min(tried, key=lambda observation: observation.rank)
    remedy = "It must be called like torch's DistributedDataParallel(module, process_group=...) and return a Module."
    if first.raised is not None and first.raised.type == ModuleNotFoundError.__name__:
        remedy = "Install what it needs in this environment; docs/scoreboard.md says it for other projects' DDPs."
    if first.fate.kind == "hung" and first.phase == IMPORT:
        remedy = (
            f"Its import must end within {MOST_DEADLINES * scenario.deadline_s:g} s, whether it compiles or reads; "
            "`ddp-conformance doctor` shows this machine, `python -X importtime` where an import spends its time."
        )
    elif first.fate.kind == "hung":
        remedy = (
            f"It must return, or go on to communicate, within {scenario.deadline_s:g} s; what takes longer, such as a"
            " first torch.compile, belongs to the import of its module."
        )
    if subject in KNOWN.values() and backend != "gloo":
        remedy = (
            f"{subject.name} works over gloo, so look at the backend first:"
            f" `ddp-conformance smoke --backend {backend}` tries it step by step."
        )
    raise SubjectError(
        f"{subject.name} cannot be constructed around a small MLP at world size {world_size};"
        f" rank {first.rank}: {str(first.raised or first.fate).rstrip('.')}. {remedy}"
    )


def _died_in_constructor(observation: Observation) -> bool:
    return observation.phase in (IMPORT, "construct") and observation.fate.kind != "returned"


@dataclass(frozen=True, slots=True)
class _Judged:
    """The outcome of the scenario at a place, and when it ran in which process."""

    place: int
    outcome: Outcome
    span: Span


@dataclass(frozen=True)
class _Judging:
    """What it takes to judge some scenarios on any ranks."""

    scenarios: tuple[Scenario, ...]
    subject: Subject
    backend: Backend
    native: bool
    excuses: Excuses
    one_at_a_time: bool
    first: frozenset[str]  # of all, whichever lane runs them
    on_observed: OnObserved

    def outcomes(self, places: Iterable[int], ranks: Ranks) -> Generator[_Judged]:
        """Run the scenarios at `places`, in this order, and yield their outcomes in that in which they come."""
        runner = ScenarioRunner(
            self.subject, self.backend, ranks, native=self.native, excuses=self.excuses, first=self.first,
            on_observed=self.on_observed,
        )  # fmt: skip
        waiting: list[_Waiting] = []
        processors = Processors()
        for place in places:
            waiting.append(_Waiting(place, time.monotonic(), runner.start(self.scenarios[place])))
            if self.one_at_a_time:
                yield self._judged(waiting[0], waiting.pop().pending.wait())
            yield from self._until_another_may_begin(waiting, processors)
        for one in waiting:
            yield self._judged(one, one.pending.wait())

    def _until_another_may_begin(self, waiting: list[_Waiting], processors: Processors) -> Generator[_Judged]:
        """Yield the outcomes of scenarios that end, and remove these, until another one may begin beside the rest."""
        awaited, since_s = self._awaited(waiting), time.monotonic()
        while True:
            for one in tuple(waiting):
                outcome = one.pending.within(_LOOK_S if one is awaited else 0.0)
                if outcome is not None:
                    waiting.remove(one)
                    yield self._judged(one, outcome)
            is_full = len(waiting) > _MOST_WAITING
            if awaited is None:
                return
            if awaited not in waiting:
                awaited, since_s = self._awaited(waiting) if is_full else None, time.monotonic()
                continue
            is_patient = self._needs_all(awaited) or time.monotonic() < since_s + _PATIENCE_S
            if not is_full and (processors.num_idle() >= _IDLE_PROCESSORS or not is_patient):
                return

    def _awaited(self, waiting: Sequence[_Waiting]) -> _Waiting | None:
        """Return the scenario that must end before another begins, unless processors are idle; None if none must."""
        if waiting and self._needs_all(waiting[-1]):
            return waiting[-1]
        return waiting[-2] if len(waiting) > 1 else None

    def _needs_all(self, one: _Waiting) -> bool:
        """Whether it has a longer deadline than most: it compiles, say, without progress and on every processor."""
        return self.scenarios[one.place].deadline_s > DEFAULT_DEADLINE_S

    def _judged(self, one: _Waiting, outcome: Outcome) -> _Judged:
        return _Judged(one.place, outcome, Span(os.getpid(), outcome.id, one.started_s, time.monotonic()))


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A scenario that has been started."""

    place: int
    started_s: float
    pending: Pending[Outcome]


#: Takes the places of scenarios in batches, and what is to be called when one begins; yields outcomes.
_Judge = Callable[[list[tuple[int, ...]], Callable[[int], int]], Generator[_Judged]]


def _run(
    judging: _Judging,
    judge: _Judge,
    ranks: Ranks,
    fail_fast: bool,
    most_hangs: int | None,
    seconds: float,
    on_event: OnEvent,
    on_schedule: Callable[[Schedule], None],
    *,
    jobs: int,
) -> Report:
    started = time.monotonic()
    scenarios, subject, backend = judging.scenarios, judging.subject, judging.backend
    judged: dict[int, _Judged] = {}  # by the scenario's place
    interrupted = False

    def begin(place: int) -> int:
        on_event(Progress(scenarios[place], len(judged), len(scenarios)))
        return place

    def goes_on() -> bool:
        outcomes = [one.outcome for one in judged.values()]
        if fail_fast and any(one.is_failure or one.contaminated_by for one in outcomes):
            return False
        if time.monotonic() - started > seconds:
            return False
        return most_hangs is None or nothing_but_hangs(outcomes) < most_hangs

    try:
        if subject.is_ddp:
            probe(subject, scenarios[0].world_size, ranks, backend.source or backend.name)
        with closing(judge(batches_of(scenarios), begin)) as outcomes:
            for one in outcomes:
                judged[one.place] = one
                on_event(Progress(scenarios[one.place], len(judged), len(scenarios), one.outcome))
                if not goes_on():
                    break
    except KeyboardInterrupt:
        interrupted = True  # what is known so far is worth a report
    ended = time.monotonic()
    on_schedule(Schedule(jobs, tuple(one.span for one in judged.values()), started, ended))
    return Report.of(
        [judged[place].outcome for place in sorted(judged)],
        load_catalogue(),
        subject=JudgedSubject.of(subject),
        backend=backend.source or backend.name,  # by which it is found again
        num_selected=len(scenarios),
        interrupted=interrupted,
        environment={**capture_environment(), "device_type": backend.device_type},
        duration_s=ended - started,
    )
