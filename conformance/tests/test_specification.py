"""The requirements and their scenarios: complete, covered, and each with a truth that can be computed and can fail."""

import ast
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from conformance.chapters.construction.subgroups import groups_of
from conformance.errors import present
from conformance.models.integers import UNIT, RankStep, integers, with_integer_weights
from conformance.mutants.catalogue import load_deviations, load_mutants
from conformance.observation import Raised
from conformance.programs.bucket_traffic import caps_of, filled_buckets
from conformance.programs.registry import Program, get_program, load_programs
from conformance.programs.truth import truth_of
from conformance.scenario import Scenario
from conformance.spec.catalogue import load_catalogue
from conformance.suite import load_scenarios
from conformance.truth.expected import Anything, mismatch

#: Options that say nothing when they are given like this. (Some values are lists, so this is no set.)
DEFAULTS = [[name, False] for name in ("find_unused_parameters", "gradient_as_bucket_view", "batched_grad_copy")]
#: Every requirement of these has somebody who breaks it; `test_mutants` shows that it notices.
FEATURES = ("join", "static_graph", "comm_hooks")
#: Their truths take long, and have tests of their own.
LONG = ("training", "composed")


def one_of_each() -> Iterator[Any]:
    """Yield a scenario of each requirement and program; all but the first one of each program run at night."""
    found: dict[tuple[str, str], Scenario] = {}
    for scenario in sorted(load_scenarios(), key=lambda scenario: scenario.world_size):
        if scenario.world_size >= 2 and scenario.chapter not in LONG:
            found.setdefault((scenario.id.split("/")[1], scenario.program), scenario)
    programs = set[str]()
    for scenario in found.values():
        marks = [pytest.mark.nightly] if scenario.program in programs else []
        programs.add(scenario.program)
        yield pytest.param(scenario, id=scenario.id, marks=marks)


def test_scenarios_run_at_every_world_size() -> None:
    assert {scenario.world_size for scenario in load_scenarios()} >= {1, 2, 3, 4, 6, 8, 12}


def test_every_requirement_of_a_feature_has_who_breaks_it() -> None:
    own = {requirement.id for requirement in load_catalogue() if requirement.chapter in FEATURES}
    assert own <= {kill.requirement for breaker in (*load_mutants(), load_deviations()) for kill in breaker.kills}


def test_scenarios_travel_as_json() -> None:
    for scenario in load_scenarios():
        assert Scenario.loads(scenario.dumps()) == scenario


def test_no_two_scenarios_of_ddps_run_the_same() -> None:
    def what_runs(scenario: Scenario) -> str:
        options = {name: value for name, value in scenario.options.items() if [name, value] not in DEFAULTS}
        alike = scenario.replace(id="x", requirements=("X-01",), needs=(), deadline_s=1.0, options=options)
        return alike.dumps()

    ids: dict[str, list[str]] = {}
    for scenario in load_scenarios():
        if not get_program(scenario.program).without_ddp:
            ids.setdefault(what_runs(scenario), []).append(scenario.id)
    assert [same for same in ids.values() if len(same) > 1] == []


@pytest.mark.parametrize("scenario", one_of_each())
def test_the_truth_is_computed_and_requires_something_of_every_rank(scenario: Scenario) -> None:
    expectation = get_program(scenario.program).expectation
    assert expectation is not None
    facts = expectation(scenario)
    assert sorted(facts) == list(range(scenario.world_size))
    for rank in facts:
        demands = {name: value for name, value in facts[rank].items() if not isinstance(value, Anything)}
        assert demands, f"nothing is required of rank {rank}"
        nothing = Raised("SystemError", ("SystemError",), "nonsense")
        refused = [name for name, value in demands.items() if mismatch(value, nothing) is not None]
        assert refused == list(demands), "a fact that any value satisfies"


def test_integers_depend_on_every_part_of_the_key_and_are_never_zero() -> None:
    first = integers(50, key=("input", 0, 1), largest=4)
    assert torch.equal(first, integers(50, key=("input", 0, 1), largest=4))
    assert not torch.equal(first, integers(50, key=("input", 1, 0), largest=4))
    assert not (first == 0).any()
    assert first.abs().max() == 4


def test_gradients_of_integer_modules_divide_exactly() -> None:
    module = with_integer_weights(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)))
    turn = RankStep(rank=1, step=2)
    turn.backward(turn.loss(turn.forward(module, turn.inputs(5, 4))))
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert parameter.grad.any()
        assert not (parameter.grad % UNIT).any()


@pytest.mark.parametrize(
    ("sizes", "caps", "buckets"),
    [
        ([4, 4, 4], [100], [12]),
        ([4, 4, 4], [8], [8, 4]),
        ([4, 4, 4], [9], [12]),
        ([4, 4, 4], [0], [4, 4, 4]),
        ([40, 4, 4], [8], [40, 8]),
        ([4, 4, 4, 4, 4], [4, 8], [4, 8, 8]),
        ([4, 4, 4, 4], [1, 100], [4, 12]),
        ([], [8], []),
    ],
)
def test_a_bucket_is_closed_once_it_reaches_its_cap(sizes: list[int], caps: list[int], buckets: list[int]) -> None:
    assert filled_buckets(sizes, caps) == buckets


def test_caps_follow_the_options() -> None:
    mib = 1024 * 1024
    assert caps_of({}) == [mib, 25 * mib]
    assert caps_of({"bucket_cap_mb": 25}) == [25 * mib]
    assert caps_of({"bucket_cap_mb": 0}) == [0]
    assert caps_of({"bucket_cap_mb_list": [1, 0.5]}) == [mib, mib // 2]


def test_groups_share_out_all_ranks() -> None:
    assert groups_of(4) == [[0, 1], [2, 3]]
    assert groups_of(3) == [[0], [1, 2]]


def _states_what_must_be(body: Callable[..., None]) -> bool:
    """Return whether a program, or a function of its module that it uses, calls something with `must=`."""
    module = ast.parse(inspect.getsource(present(inspect.getmodule(body))))
    functions = {node.name: node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)}
    left, seen = [body.__name__], set[str]()
    while left:
        name = left.pop()
        if name in seen or name not in functions:
            continue
        seen.add(name)
        for node in ast.walk(functions[name]):
            if isinstance(node, ast.keyword) and node.arg == "must":
                return True
            left += [node.id] if isinstance(node, ast.Name) else [node.attr] if isinstance(node, ast.Attribute) else []
    return False


def _states_for_nobody(programs: Iterable[Program]) -> list[str]:
    return [
        each.name
        for each in programs
        if "truth_of" not in (inspect.getsource(each.expectation) if each.expectation else "")
        and each.expectation is not truth_of
        and _states_what_must_be(each.body)
    ]


def test_what_a_program_states_is_judged() -> None:
    programs = load_programs()
    assert not _states_for_nobody(programs.values()), "these need `expects(truth_of)`: what must be is read there alone"
    without = dataclasses.replace(programs["debugged_mistake"], expectation=None)
    stating = dataclasses.replace(programs["copied_wrapper"], expectation=None)
    assert _states_for_nobody([without, stating]) == [stating.name]
