"""Runs scenarios on a subject, beside torch's own DDP, and judges both against the truth.

The command line and the mutants are thin layers over `run`; pytest, which orders scenarios itself, uses the
`ScenarioRunner` underneath.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import partial

import trio

from conformance.backends.backend import Backend
from conformance.errors import BackendError, ScenarioError, SubjectError, present
from conformance.models.catalogue import get_fixture
from conformance.observation import IMPORT, Observation
from conformance.programs.registry import get_program, preloads_of
from conformance.run.attempt import Ranks
from conformance.run.environment import capture_environment
from conformance.run.first_uses import first_uses
from conformance.run.known_failures import Excuses
from conformance.run.lanes import Enough, batches_of, in_lanes
from conformance.run.order import LISTED, Order
from conformance.run.outcome import Outcome, Progress
from conformance.run.patience import nothing_but_hangs
from conformance.run.report import JudgedSubject, Report
from conformance.run.scenario_runner import OnObserved, ScenarioRunner
from conformance.scenario import DEFAULT_DEADLINE_S, Scenario, Step
from conformance.spec.catalogue import load_catalogue
from conformance.subjects.subject import KNOWN, Subject
from conformance.waiting import loop
from conformance.waiting.limits import LOOK_S, PATIENCE_S
from conformance.waiting.processors import Processors
from conformance.workers.controller import Controller
from conformance.workers.deadline import MOST_DEADLINES
from conformance.workers.zygote_process import ZygoteProcess

OnEvent = Callable[[Progress], None]

#: While one scenario is judged, the next one runs. The one after that begins, too, while so many processors are idle:
#: ranks that hang, until their deadline or another one's timeout, or that wait for each other, leave them so.
_IDLE_PROCESSORS = 0.3
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
    on_observed: OnObserved = lambda scenario, observations: None,
) -> Report:
    """Run `scenarios` on `subject` and, with `native`, on torch's own DDP, and return what was found.

    Ctrl-C ends the run early with a report of what is known so far. `excuses` says which failures were known
    beforehand. With `most_hangs` the run ends when so many scenarios have run and every one hung, and after so many
    `seconds` in any case. A passed `controller` stays open; without one, ranks come from `zygote`, which stays open,
    too, or else from a new one. While some ranks wait, others run further scenarios, unless `one_at_a_time`; outcomes
    are in order. With more than one of `jobs` there are so many lanes, processes with ranks of their own; a passed
    `controller` has one. `on_observed` is called in the lane, see `ScenarioRunner`.

    Raises, before anything starts:
        ScenarioError: there is no scenario, or one names a program or model that does not exist.
        BackendError: the backend is unavailable or serves none of the world sizes.
        SubjectError: the subject cannot be constructed around the simplest model.

    """
    chosen = order.apply(scenarios)
    check(chosen, backend)
    started = time.monotonic()
    preload, batches, first = preloads_of(chosen), batches_of(chosen), first_uses(chosen, subject, backend)
    judged: dict[int, Outcome] = {}  # by the scenario's place
    interrupted = False

    def judge(ranks: Ranks, places: Iterator[int], take: Callable[[tuple[int, Outcome]], None]) -> None:
        judging = ScenarioRunner(
            subject, backend, ranks, native=native, excuses=excuses, first=first, on_observed=on_observed
        )
        at_once = backend.runs_side_by_side and not one_at_a_time
        loop.run(_judge_all, judging, ((place, chosen[place]) for place in places), take, at_once)

    def lane(places: Iterator[int], take: Callable[[tuple[int, Outcome]], None]) -> None:
        with present(shared).local() as branch, Controller(backend, preload=preload, zygote=branch) as own:
            judge(own, places, take)

    def begin(place: int) -> int:
        on_event(Progress(chosen[place], len(judged), len(chosen)))
        return place

    def take(ended: tuple[int, Outcome]) -> None:
        if not goes_on():  # others ended in the same moment
            raise Enough
        place, judged[place] = ended
        on_event(Progress(chosen[place], len(judged), len(chosen), judged[place]))
        if not goes_on():
            raise Enough

    def goes_on() -> bool:
        if time.monotonic() - started > seconds:
            return False
        if fail_fast and any(one.is_failure or one.contaminated_by for one in judged.values()):
            return False
        return most_hangs is None or nothing_but_hangs(judged.values()) < most_hangs

    lent = nullcontext(zygote) if zygote or controller else closing(ZygoteProcess(None, preload))
    try:
        with (
            lent as shared,
            nullcontext(controller) if controller else Controller(backend, preload=preload, zygote=shared) as ranks,
        ):
            if subject.is_ddp:
                probe(subject, chosen[0].world_size, ranks, backend.source or backend.name)
            if shared is not None:
                shared.await_ready()  # before it is forked with this process
            num_lanes = 1 if controller else min(jobs, len(batches))
            work = lane if num_lanes > 1 else partial(judge, ranks)
            in_lanes(work, (map(begin, batch) for batch in batches), num_lanes, take)
    except KeyboardInterrupt:
        interrupted = len(judged) < len(chosen)  # what is known so far is worth a report
    return Report.of(
        [judged[place] for place in sorted(judged)],
        load_catalogue(),
        subject=JudgedSubject.of(subject),
        backend=backend.source or backend.name,  # by which it is found again
        num_selected=len(chosen),
        interrupted=interrupted,
        environment={**capture_environment(), "device_type": backend.device_type},
        duration_s=time.monotonic() - started,
    )


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
    constructor: then no requirement can be judged. Ranks that another's failure stopped before do not count.
    """
    scenario = Scenario("probe", ("PROBE",), "train", "mlp", world_size, schedule=(Step(),))
    observations = loop.run(controller.observe, scenario, subject, False).values()
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


async def _judge_all(
    runner: ScenarioRunner,
    scenarios: Iterable[tuple[int, Scenario]],
    take: Callable[[tuple[int, Outcome]], None],
    at_once: bool,
) -> None:
    """Judge the scenarios, begun in this order; call `take` with each place and outcome when a scenario has ended."""
    running: list[_Running] = []

    async def judge(one: _Running) -> None:
        outcome = await runner.judge(one.scenario)
        running.remove(one)
        one.has_ended.set()
        take((one.place, outcome))

    processors = Processors()
    async with trio.open_nursery() as nursery:
        for place, scenario in scenarios:
            running.append(_Running(place, scenario))
            nursery.start_soon(judge, running[-1])
            if not at_once:
                await running[-1].has_ended.wait()
            await _room_beside(running, processors)


async def _room_beside(running: Sequence[_Running], processors: Processors) -> None:
    """Return when another scenario may begin beside those that are `running`."""
    await trio.lowlevel.checkpoint()  # the latest begins
    awaited, since_s = _to_await(running), trio.current_time()
    while awaited is not None:
        with trio.move_on_after(LOOK_S):
            await awaited.has_ended.wait()
        is_full = len(running) > _MOST_WAITING
        if awaited.has_ended.is_set():
            awaited, since_s = _to_await(running) if is_full else None, trio.current_time()
            continue
        is_patient = awaited.needs_all or trio.current_time() < since_s + PATIENCE_S
        if not is_full and (processors.num_idle() >= _IDLE_PROCESSORS or not is_patient):
            return


def _to_await(running: Sequence[_Running]) -> _Running | None:
    """Return the scenario that the next one is to await: the last but one, so that two overlap; None if none is."""
    if running and running[-1].needs_all:
        return running[-1]
    return running[-2] if len(running) > 1 else None


@dataclass(eq=False)
class _Running:
    """A scenario that has been started."""

    place: int
    scenario: Scenario
    has_ended: trio.Event = field(default_factory=trio.Event)

    @property
    def needs_all(self) -> bool:
        """Whether it has a longer deadline than most: it compiles, say, without progress and on every processor."""
        return self.scenario.deadline_s > DEFAULT_DEADLINE_S
