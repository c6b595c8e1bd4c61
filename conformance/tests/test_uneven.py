"""The truth about uneven inputs: who takes part in a step, what sums are divided by, and what the end is like."""

from __future__ import annotations

import gc
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from conformance.chapters.join.oracle import UnevenPlan, UnevenReplicas, simulate_uneven
from conformance.chapters.join.scenarios import UNEVEN
from conformance.errors import ScenarioError
from conformance.recorder.recorder import Recorder
from conformance.scenario import Scenario


def uneven(*num_inputs: int, **arguments: object) -> Scenario:
    return Scenario(
        id="join/JOIN-01/x", requirements=("JOIN-01",), program="uneven_training", world_size=len(num_inputs),
        arguments={"num_inputs": list(num_inputs), **arguments},
    )  # fmt: skip


def replicas(num_ranks: int) -> list[nn.Module]:
    modules: list[nn.Module] = [nn.Linear(2, 1, bias=False) for _ in range(num_ranks)]
    for module in modules:
        nn.init.ones_(module.get_parameter("weight"))
    return modules


def backward(module: nn.Module, gradient: float) -> None:
    (module.get_parameter("weight") * gradient).sum().backward()


def test_a_plan_tells_who_has_data_and_who_joins_last() -> None:
    plan = UnevenPlan.of(uneven(0, 3, 2, 3, sync_every=2))
    assert [plan.active(index) for index in range(3)] == [[1, 2, 3], [1, 2, 3], [1, 3]]
    assert plan.last_joiners() == [1, 3]
    assert [plan.is_synchronised(index) for index in range(4)] == [False, True, False, True]
    assert plan.step_number(2, 1) == 7


def test_a_plan_for_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(ScenarioError, match="num_inputs of 2 ranks for 3"):
        UnevenPlan.of(uneven(1, 2).replace(world_size=3))


@pytest.mark.parametrize(("by_initial", "expected"), [(True, 12 * 2**-19 * 9), (False, 12 * 2**-19 * 13.5)])
def test_sums_are_over_active_ranks_and_the_divisor_is_what_was_asked_for(by_initial: bool, expected: float) -> None:
    modules = replicas(3)
    unit = 12 * 2.0**-19
    world = UnevenReplicas(modules, divide_by_initial_world_size=by_initial)
    backward(modules[0], 9 * unit)
    backward(modules[2], 18 * unit)
    world.average_gradients([0, 2])
    for rank in (0, 2):
        grad = modules[rank].get_parameter("weight").grad
        assert grad is not None
        assert grad.tolist() == [[pytest.approx(expected, abs=0)] * 2]
    assert modules[1].get_parameter("weight").grad is None


def test_what_only_joined_ranks_used_is_left_alone() -> None:
    modules = replicas(2)
    world = UnevenReplicas(modules)
    backward(modules[0], 12 * 2.0**-19)
    world.average_gradients([1])
    assert modules[1].get_parameter("weight").grad is None


def test_copying_the_model_forgets_local_gradients() -> None:
    modules = replicas(2)
    world = UnevenReplicas(modules)
    nn.init.zeros_(modules[1].get_parameter("weight"))
    backward(modules[0], 1.0)
    world.copy_model(1)
    assert modules[0].get_parameter("weight").tolist() == [[0.0, 0.0]]
    assert modules[0].get_parameter("weight").grad is None


@pytest.mark.parametrize("num_inputs", [inputs for group in UNEVEN.values() for inputs in group], ids=str)
def test_all_ranks_end_with_the_same_model(num_inputs: tuple[int, ...]) -> None:
    facts = simulate_uneven(uneven(*num_inputs))
    names = [name for name in facts[0] if name.startswith("final/parameter")]
    assert names
    for name in names:
        assert all(torch.equal(facts[0][name], facts[rank][name]) for rank in facts)
    assert [sum(name.endswith("/loss") for name in facts[rank]) for rank in facts] == list(num_inputs)


def test_a_recorded_work_outlives_the_last_reference_to_it() -> None:
    """C++ code that was handed a work by Python, as torch's reducer is by a join context, keeps its C++ part only."""
    gloo = dist.ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=10))
    group = Recorder().wrap(gloo, "alone")
    work = group.allreduce([torch.ones(1)], dist.AllreduceOptions())
    alive = weakref.ref(work)
    del work
    gc.collect()
    assert alive() is not None
