"""The chapters join, static_graph and comm_hooks: complete, and each requirement is seen to fail.

A requirement is shown to be able to fail by a DDP that is wrong on purpose, or by torch's own where that deviates.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance.backends.backend import get_backend
from conformance.chapters.chapter import load_scenarios
from conformance.mutants import broken, hooks, joins, static_graphs, subtle
from conformance.observation import Raised
from conformance.oracles.expected import Anything, mismatch
from conformance.programs.program import get_program
from conformance.scenario import Scenario
from conformance.spec.catalogue import load_catalogue
from conformance.tests.test_mutants import failures
from conformance.verdict import Verdict
from conformance.workers.controller import Controller

CHAPTERS = ("join", "static_graph", "comm_hooks")

#: Requirement -> who breaks it. `torch` is torch's own DDP, where it deviates.
BREAKERS = {
    "JOIN-01": "JoinsByEffective", "JOIN-02": "JoinsByInitial", "JOIN-03": "EndsWithOwnModel",
    "JOIN-04": "JoinBuffersOfRank0", "JOIN-05": "EndsWithOwnModel", "JOIN-06": "AlwaysJoins", "JOIN-07": "NeverThrows",
    "JOIN-08": "AlwaysThrows", "JOIN-09": "JoinsByEffective", "JOIN-10": "NoDivision", "JOIN-11": "ReducesInsideNoSync",
    "JOIN-12": "torch", "JOIN-13": "torch", "JOIN-14": "torch", "JOIN-15": "JoinedRanksKeepFirstBuckets",
    "JOIN-16": "IgnoresHooks", "JOIN-17": "JoinsByEffective", "JOIN-18": "torch", "JOIN-19": "torch",
    "JOIN-20": "torch", "JOIN-21": "LocalAfterJoin", "JOIN-22": "torch", "JOIN-23": "SwallowsExceptions",
    "JOIN-24": "torch", "JOIN-25": "LogsNoJoin", "JOIN-26": "JoinsAnyGroup", "JOIN-27": "NoJoinable",
    "JOIN-28": "torch",
    "STATIC-01": "torch", "STATIC-02": "ZeroesUnusedGradients", "STATIC-03": "torch", "STATIC-04": "torch",
    "STATIC-05": "torch", "STATIC-06": "ReducesInsideNoSync", "STATIC-07": "IgnoresStaticGraph",
    "STATIC-08": "IgnoresStaticGraph", "STATIC-09": "ForgetsFirstIteration", "STATIC-10": "torch",
    "STATIC-11": "torch", "STATIC-12": "torch", "STATIC-13": "ReducesTwice", "STATIC-14": "OneBucket",
    "STATIC-15": "IgnoresStaticGraph", "STATIC-16": "IgnoresStaticGraph", "STATIC-17": "torch",
    "STATIC-18": "ForgetsFirstIteration", "STATIC-19": "torch", "STATIC-20": "torch", "STATIC-21": "torch",
    "STATIC-22": "ValidationSwitchesOff", "STATIC-23": "LastWrapperWins", "STATIC-24": "LocalAfterException",
    "STATIC-25": "torch",
    "HOOK-01": "DividesBeforeHook", "HOOK-02": "DropsHookResult", "HOOK-03": "NeverLast", "HOOK-04": "CallsHookTwice",
    "HOOK-05": "ClonesGradients", "HOOK-06": "OwnIndices", "HOOK-07": "CopiesState", "HOOK-08": "CopiesBuffer",
    "HOOK-09": "ZeroesUnusedGradients", "HOOK-10": "torch", "HOOK-11": "torch", "HOOK-12": "torch",
    "HOOK-13": "OnlyFirstStepsHooks", "HOOK-14": "CallsHookTwice", "HOOK-15": "DropsHookResult",
    "HOOK-16": "IgnoresHooks", "HOOK-17": "DoublesOnTheWire", "HOOK-18": "torch", "HOOK-19": "IgnoresHooks",
    "HOOK-20": "NeverLast", "HOOK-21": "NeverLast", "HOOK-22": "NeverLast", "HOOK-23": "NeverLast",
    "HOOK-24": "DropsHookResult", "HOOK-25": "IgnoresHooks", "HOOK-26": "SwallowsRefusals",
    "HOOK-27": "SwallowsRefusals", "HOOK-28": "torch", "HOOK-29": "torch", "HOOK-30": "SwallowsHookErrors",
    "HOOK-31": "torch", "HOOK-32": "NamesNoHook", "HOOK-33": "IgnoresHooks", "HOOK-34": "BufferHookOnCopies",
    "HOOK-35": "SyncsBuffersAlways", "HOOK-36": "SwallowsRefusals", "HOOK-37": "CallsHookTwice",
}  # fmt: skip

MUTANTS = (broken, subtle, joins, static_graphs, hooks)


def subject_of(name: str) -> str:
    """Return a breaker as `--ddp` takes it."""
    if name == "torch":
        return name
    (module,) = (
        module for module in MUTANTS if name in vars(module) and vars(module)[name].__module__ == module.__name__
    )
    return f"{module.__name__}:{name}"


def own_scenarios() -> list[Scenario]:
    return [scenario for scenario in load_scenarios() if scenario.chapter in CHAPTERS]


def scenarios_of(requirement: str) -> list[Scenario]:
    """Return a few scenarios of the smallest world that has more than one rank, spread over the requirement."""
    fitting = [each for each in own_scenarios() if requirement in each.requirements and each.world_size == 2]
    fitting = fitting or [each for each in own_scenarios() if requirement in each.requirements]
    return fitting[:: max(1, len(fitting) // 5)]


@pytest.fixture(scope="module")
def controller() -> Iterator[Controller]:
    with Controller(get_backend("gloo")) as controller:
        yield controller


def test_every_requirement_has_scenarios_and_a_breaker() -> None:
    own = {requirement.id for requirement in load_catalogue() if requirement.chapter in CHAPTERS}
    shown = {requirement for scenario in own_scenarios() for requirement in scenario.requirements}
    assert shown == own == set(BREAKERS)


def test_scenarios_travel_as_json_and_no_two_are_the_same() -> None:
    seen: dict[str, str] = {}
    for scenario in own_scenarios():
        assert Scenario.loads(scenario.dumps()) == scenario
        alike = scenario.replace(id="x", requirements=("X-01",), needs=(), deadline_s=1.0).dumps()
        assert alike not in seen, f"{scenario.id} is {seen.get(alike)}"
        seen[alike] = scenario.id


def one_of_each() -> list[Scenario]:
    """Return one scenario of each requirement and program."""
    found: dict[tuple[str, str], Scenario] = {}
    for scenario in sorted(own_scenarios(), key=lambda scenario: scenario.world_size):
        found.setdefault((scenario.id.split("/")[1], scenario.program), scenario)
    return list(found.values())


@pytest.mark.parametrize("scenario", one_of_each(), ids=lambda scenario: scenario.id)
def test_the_truth_can_be_computed_and_no_nonsense_satisfies_it(scenario: Scenario) -> None:
    expectation = get_program(scenario.program).expectation
    assert expectation is not None
    nonsense = Raised("SystemError", ("SystemError",), "nonsense")
    for rank, facts in expectation(scenario).items():
        demands = [value for value in facts.values() if not isinstance(value, Anything)]
        assert demands, f"nothing is required of rank {rank}"
        assert all(mismatch(value, nonsense) is not None for value in demands)


@pytest.mark.parametrize(("requirement", "breaker"), BREAKERS.items(), ids=lambda text: text)
def test_each_requirement_catches_who_breaks_it(controller: Controller, requirement: str, breaker: str) -> None:
    """Some scenario fails for the breaker, and passes for torch's own DDP if that is not it."""
    for scenario in scenarios_of(requirement):
        findings = failures(controller, subject_of(breaker), [scenario]).get(scenario.id, ())
        verdicts = {finding.verdict for finding in findings}
        assert Verdict.HARNESS_ERROR not in verdicts, findings
        caught = bool(verdicts & {Verdict.FAIL, Verdict.HANG, Verdict.CRASH})
        if caught and (breaker == "torch" or not failures(controller, "torch", [scenario])):
            return
    pytest.fail(f"no scenario of {requirement} tells {breaker} from a DDP that keeps it")
