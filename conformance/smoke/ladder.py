"""Climbs the smoke ladder on a backend and a DDP: tries rung after rung and stops at the first that breaks."""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import islice

import torch

from conformance.backends.backend import UNKNOWN_TO_TORCH, Backend
from conformance.errors import BackendError, ReplicaError, SubjectError
from conformance.observation import Facts, Observation
from conformance.run.lacking import lacking
from conformance.run.needs import needs_of
from conformance.run.scenario_runner import ScenarioRunner
from conformance.scenario import Scenario
from conformance.smoke.breakage import Breakage, find_breakage
from conformance.smoke.rungs import ALL_REDUCE, COLLECTIVES, STEP, STEP_OF_KNOWN, Rung
from conformance.smoke.without_option import without_option
from conformance.subjects.subject import CAPABILITIES as SUBJECT_CAPABILITIES
from conformance.subjects.subject import KNOWN, Subject, swallows
from conformance.suite import load_scenarios
from conformance.verdict import ScenarioResult, Verdict
from conformance.waiting import loop
from conformance.workers.controller import Controller
from conformance.workers.finder import find_backend, find_subject
from conformance.workers.zygote_process import ZygoteProcess

DEFAULT_DEADLINE_S = 30.0
#: With two ranks, a rank's neighbour is every other rank, so some bugs stay hidden.
DEFAULT_WORLD_SIZE = 3

#: Short, because the backend or DDP has not declared that this works.
_UNDECLARED_DEADLINE_S = 5.0

#: Capabilities that a DDP can lack without an error: how its first scenario is recognised then, and what to say.
_SILENTLY = {"ignored_parameters": ("broadcast-unasked", "it synchronises what the module names to be ignored")}

#: A constructor may take an option by `**kwargs` and ignore it. So many scenarios that need the option are searched for
#: ones that depend on it, and so many of these must agree.
_MOST_LOOKED_AT, _MOST_TELLING = 16, 2

_CREATE_ADVICE = (
    "create(store, rank, world_size, timeout) must return a connected c10d Backend or ProcessGroup of that rank and"
    " world size, on every rank."
)
_STEPS = (STEP, STEP_OF_KNOWN)
_ALONE = Rung("factory", "one rank alone gets a process group", _CREATE_ADVICE, program="smoke_presence")
_TOGETHER = Rung(
    "rendezvous",
    "all ranks get a process group that knows who they are",
    f"{_CREATE_ADVICE} Ranks find each other through the store: what one sets, the others can wait for.",
    program="smoke_presence",
)
_NAMED = Rung(
    "name",
    "the group knows its backend's name and its own",
    "A process group in Python returns the backend's name in getBackendName, and in getGroupName the name that torch"
    " gives by setGroupName. Without the first torch calls the backend 'undefined', and whatever asks"
    " dist.get_backend(group) goes wrong; without the others functional collectives and destroy_process_group raise.",
    program="smoke_name",
)


class Status(Enum):
    """The result of a rung; only BROKEN ends the climb and fails."""

    HOLDS = "ok"
    UNDECLARED = "undeclared"  # it works, but no scenario will use it because the backend does not declare it
    ABSENT = "absent"  # not declared, and raises an error
    UNCLEAN = "unclean"  # not declared, and gives a wrong result, a hang or a crash instead of an error
    LACKING = "lacking"  # a DDP has not got it, and its author has declared nothing
    GLOOS = "gloo's"  # broken by torch's own gloo, which is there to judge a DDP
    BROKEN = "BROKEN"


@dataclass(frozen=True, slots=True)
class Footing:
    """The result of one rung. `breakage` says why it broke; `duration_ms` is the time until all ranks had ended."""

    rung: str
    asks: str
    status: Status
    detail: str = ""
    breakage: Breakage | None = None
    duration_ms: float = 0.0


def climb(
    backend_name: str,
    ddp_name: str,
    *,
    world_size: int | None = None,
    deadline_s: float = DEFAULT_DEADLINE_S,
    zygote: ZygoteProcess | None = None,
    keep_going: bool = False,
) -> Iterator[Footing]:
    """Yield one footing per rung; stop after a BROKEN one, with `keep_going` only if the rungs above need it to hold.

    Also tries rungs that the backend does not declare; these cannot be BROKEN. Nor can those of torch's own gloo, some
    versions of which break a few, up to the steps of the DDPs: nobody but torch can mend it. Without `world_size`,
    uses three ranks, or fewer if the backend serves fewer. A rung may take `deadline_s` seconds. Passing a running
    `zygote` saves starting one.

    Raises:
        BackendError: the backend cannot serve the given `world_size`.

    """
    try:
        backend = find_backend(backend_name)
    except BackendError as error:
        yield _broken("import", "the backend is found", f"{error}", "Correct the import, or the name after --backend.")
        return
    try:
        subject = find_subject(ddp_name)
    except SubjectError as error:
        yield _broken("import DDP", "the DDP is found", f"{error}", "Correct the import, or the name after --ddp.")
        return
    found = Footing("import", "the backend is found", Status.HOLDS, backend.source)
    found_ddp = Footing("import DDP", "the DDP is found", Status.HOLDS, subject.target)
    is_about_ddp = backend.name == "gloo" and subject not in KNOWN.values()
    yield from (found_ddp,) if is_about_ddp else (found, found_ddp)
    yield (declared := _declaration(backend))
    if declared.status is Status.BROKEN:
        return
    size = _world_size(backend, world_size)
    with Controller(backend, start_timeout_s=deadline_s, zygote=zygote) as controller:
        climber = _Climber(backend, controller, size, deadline_s)
        broken = False
        for rung, ranks, ddp in climber.rungs(subject, alone=is_about_ddp):
            if broken and rung in _STEPS:
                return  # a DDP on a broken backend shows nothing more
            footing = climber.try_rung(rung, ranks, ddp)
            if footing.status in (Status.ABSENT, Status.UNCLEAN):
                footing = climber.after_refusal(footing, ranks, ddp)
            if footing.status is Status.BROKEN and backend.name == "gloo" and rung not in (_ALONE, _TOGETHER, *_STEPS):
                detail = f"not the DDP's, but gloo's of torch {torch.__version__}: {footing.detail}"
                footing = replace(footing, status=Status.GLOOS, detail=detail)
            yield footing
            broken = broken or footing.status is Status.BROKEN
            if broken and (not keep_going or rung in (_ALONE, _TOGETHER)):
                return
        if broken:
            return
        for capability in sorted(SUBJECT_CAPABILITIES - subject.capabilities):
            yield from climber.try_undeclared(capability, subject)
        if subject.capabilities == SUBJECT_CAPABILITIES and subject not in KNOWN.values():
            for capability in sorted(SUBJECT_CAPABILITIES):
                yield from climber.try_claimed(capability, subject)


class _Climber:
    """Tries single rungs on the ranks of one controller."""

    def __init__(self, backend: Backend, controller: Controller, world_size: int, deadline_s: float) -> None:
        self._backend = backend
        self._declared = backend.capabilities - UNKNOWN_TO_TORCH
        self._controller = controller
        self._world_size = world_size
        self._deadline_s = deadline_s
        self._fresh = False  #: whether a refusal has left the ranks' group of no use

    def rungs(self, subject: Subject, *, alone: bool) -> Iterator[tuple[Rung, int, Subject]]:
        """Yield every rung with its number of ranks and its DDP: torch's own first, then `subject`, or it `alone`."""
        if alone:
            yield STEP, self._world_size, subject
            return
        torch_ddp = KNOWN["torch"]
        yield _ALONE, 1, torch_ddp
        for rung in (_TOGETHER, _NAMED, *COLLECTIVES):
            if rung.is_tried(self._world_size, self._declared):
                yield rung, self._world_size, torch_ddp
        for ddp in dict.fromkeys((torch_ddp, subject)):
            yield STEP_OF_KNOWN if ddp in KNOWN.values() else STEP, self._world_size, ddp

    def try_rung(self, rung: Rung, world_size: int, subject: Subject) -> Footing:
        started = time.perf_counter()
        scenario = rung.scenario(world_size, self._deadline_s, self._declared)
        observations, expected = loop.run(
            loop.together,
            partial(self._controller.observe, scenario, subject, self._fresh),
            partial(_expected, self._controller, scenario),
        )
        facts = _facts(expected, observations)
        found = find_breakage(scenario, observations, facts, advice=rung.hint, method=rung.method)
        duration_ms = (time.perf_counter() - started) * 1000
        declared = not rung.capability or rung.capability in self._declared
        name = f"{rung.name} of {subject.name}" if rung in _STEPS else rung.name
        status, detail = _judge(rung, found, declared)
        return Footing(name, rung.asks.format(ddp=subject.name), status, detail, found, duration_ms)

    def after_refusal(self, footing: Footing, world_size: int, subject: Subject) -> Footing:
        """Return `footing`, a rung that ranks have refused; broken if their group is of no use any more."""
        found = self.try_rung(ALL_REDUCE, world_size, subject).breakage
        if found is None:
            return footing
        self._fresh = True
        summary = f"after the ranks refused it, {found.summary}"
        advice = "What is refused must leave nothing begun: no group of calls, no lock, no number of a collective."
        return replace(
            footing, status=Status.BROKEN, detail=summary, breakage=replace(found, summary=summary, advice=advice)
        )

    def try_undeclared(self, capability: str, subject: Subject) -> Iterator[Footing]:
        """Yield the result of the first scenario that needs `capability`, which `subject` does not declare.

        A DDP may fail where it declares nothing; if it works, its author should declare the capability.
        """
        claiming = replace(subject, capabilities=subject.capabilities | {capability})
        for scenario in self._that_need(capability, claiming, 1):
            result = self._judged(scenario, claiming)
            yield Footing(
                capability, f"{subject.name} is capable of {capability}", *_undeclared(capability, result.verdict),
                duration_ms=result.duration_ms,
            )  # fmt: skip

    def try_claimed(self, capability: str, subject: Subject) -> Iterator[Footing]:
        """Yield that `subject`, whose author declares nothing, lacks `capability`, if its first scenario shows that.

        If it fails in another way, it has the capability, with a mistake, which `run` reports.
        """
        alone = replace(subject, capabilities=frozenset({capability}))  # else another one that it lacks would show
        is_swallowed = swallows(subject, capability)
        tried = self._that_need(capability, alone, _MOST_LOOKED_AT if is_swallowed else 1)
        if not tried:
            return
        started = time.perf_counter()
        why = _lacks(capability, tried[0], self._judged(tried[0], subject))
        if not why and is_swallowed and self._ignores(capability, subject, tried):
            why = f"it takes {capability} as it takes any argument, and does the same without it"
        if why:
            duration_ms = (time.perf_counter() - started) * 1000
            asks = f"{subject.name} is capable of {capability}"
            yield Footing(capability, asks, Status.LACKING, why, duration_ms=duration_ms)

    def _ignores(self, option: str, subject: Subject, scenarios: Iterable[Scenario]) -> bool:
        """Whether scenarios that a right DDP fails if it ignores `option` fail, and in the same way if it is left out.

        A scenario that passes nevertheless shows nothing: many train a model that does not need the option.
        """
        right, deaf = without_option(KNOWN["ddp_impl"], option), without_option(subject, option)
        telling = (one for one in scenarios if self._judged(one, right).verdict.is_failure)
        agree = False
        for one in islice(telling, _MOST_TELLING):
            given = _failure(self._judged(one, subject))
            agree = given is not None and given == _failure(self._judged(one, deaf))
            if not agree:
                break
        return agree

    def _that_need(self, capability: str, subject: Subject, most: int) -> list[Scenario]:
        """Return, of `most` requirements, the first scenario of two ranks that needs this and else what is declared."""
        declared = subject.capabilities | self._backend.capabilities
        found: dict[str, Scenario] = {}
        for scenario in load_scenarios():
            needs = needs_of(scenario)
            if capability in needs and scenario.world_size == 2 and needs <= declared:
                found.setdefault(scenario.leading_requirement, scenario)
            if len(found) == most:
                break
        return list(found.values())

    def _judged(self, scenario: Scenario, subject: Subject) -> ScenarioResult:
        patient = scenario.replace(deadline_s=min(scenario.deadline_s, self._deadline_s, _UNDECLARED_DEADLINE_S))
        return ScenarioRunner(subject, self._backend, self._controller, native=False).run(patient).subject


def _failure(result: ScenarioResult) -> tuple[object, ...] | None:
    """Return in which way a scenario failed; None if it did not."""
    told = sorted((one.checker, one.mistake) for one in result.deciding_findings)
    return (result.verdict, *told) if result.verdict.is_failure else None


def _lacks(capability: str, scenario: Scenario, result: ScenarioResult) -> str:
    """Return how the result shows that a DDP lacks `capability`; empty if it does not."""
    if result.verdict is Verdict.UNSUPPORTED:
        return result.summary
    found = lacking(result, scenario.to_json()) if result.verdict.is_failure else None
    if found is not None and capability in found.names:
        return f"it {found.why}"
    mistake, why = _SILENTLY.get(capability, ("", ""))
    return why if any(mistake and one.mistake == mistake for one in result.findings) else ""


def _undeclared(capability: str, verdict: Verdict) -> tuple[Status, str]:
    if verdict is Verdict.PASS:
        return Status.UNDECLARED, f"its first scenario passes: declare {capability!r} for the DDP to be judged by it"
    if verdict in (Verdict.HANG, Verdict.CRASH):
        return Status.UNCLEAN, f"{capability!r} is not declared; an error would be better than a {verdict.value}"
    return Status.ABSENT, f"{capability!r} is not declared, and does not work ({verdict.value})"


async def _expected(controller: Controller, scenario: Scenario) -> Mapping[int, Facts] | ReplicaError:
    try:
        return await controller.expect(scenario)
    except ReplicaError as error:
        return error


def _facts(
    expected: Mapping[int, Facts] | ReplicaError, observations: Mapping[int, Observation]
) -> Mapping[int, Facts]:
    """Return the expected facts; none where the backend gave neither the ranks nor the one for the truth a group.

    Raises:
        ReplicaError: the ranks returned, so that there is something to compare.

    """
    if not isinstance(expected, ReplicaError):
        return expected
    if all(one.fate.kind == "returned" for one in observations.values()):
        raise expected
    return {}


def _judge(rung: Rung, found: Breakage | None, declared: bool) -> tuple[Status, str]:
    if declared:
        return (Status.HOLDS, "") if found is None else (Status.BROKEN, found.summary)
    if found is None:
        return Status.UNDECLARED, f"works: add {rung.capability!r} to the capabilities to be judged by it"
    if found.refused:
        return Status.ABSENT, f"{rung.capability!r} is not declared, and refused with an error"
    return Status.UNCLEAN, f"{rung.capability!r} is not declared; a clean error would be better: {found.summary}"


def _declaration(backend: Backend) -> Footing:
    asks = "the description is complete, and the backend can be used here"
    if wrong := backend.misdeclared():
        return _broken("declaration", asks, wrong, "Correct or remove it in the Backend's capabilities.")
    if reason := backend.unavailable():
        return _broken("declaration", asks, f"the backend cannot be used here: {reason}", "Provide what it lacks.")
    limit = backend.max_world_size()
    detail = f"{backend.device_type}, {'any number of' if limit is None else f'at most {limit}'} ranks"
    return Footing("declaration", asks, Status.HOLDS, detail)


def _world_size(backend: Backend, asked: int | None) -> int:
    limit = backend.max_world_size()
    if asked is None:
        return DEFAULT_WORLD_SIZE if limit is None else min(limit, DEFAULT_WORLD_SIZE)
    if limit is not None and asked > limit:
        raise BackendError(f"backend {backend.name!r} serves at most {limit} rank(s) here, got world size {asked}")
    return asked


def _broken(rung: str, asks: str, summary: str, advice: str) -> Footing:
    return Footing(rung, asks, Status.BROKEN, summary, Breakage(summary, advice=advice))
