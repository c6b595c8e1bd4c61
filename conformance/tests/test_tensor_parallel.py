"""Chapter tensor_parallel: its truth, its fixtures, and how much it covers."""

import os

import pytest
import torch

from conformance.backends.backend import get_backend
from conformance.chapters.tensor_parallel.oracle import ShardedPlan, UnshardedRows
from conformance.errors import ScenarioError
from conformance.models.sharded import get_sharded_model
from conformance.scenario import Scenario
from conformance.spec.catalogue import load_catalogue
from conformance.subjects.subject import get_subject
from conformance.suite import load_scenarios
from conformance.workers.controller import Controller
from conformance.workers.zygote_process import ZygoteProcess


def own_scenarios() -> list[Scenario]:
    return [scenario for scenario in load_scenarios() if scenario.chapter == "tensor_parallel"]


def test_every_requirement_has_a_scenario_on_two_rows_of_two() -> None:
    square = [one for one in own_scenarios() if tuple(one.arguments["mesh"]) == (2, 2)]
    uncovered = {one.id for one in load_catalogue().uncovered(square) if one.chapter == "tensor_parallel"}
    assert uncovered == {"TP-24"}, "three dimensions are no square"
    assert {one.id.split("/")[1] for one in own_scenarios()} >= uncovered
    assert {one.world_size for one in own_scenarios()} == {2, 3, 4}


def test_groups_of_a_mesh_end_with_the_scenario(zygote: ZygoteProcess) -> None:
    """Each has threads that poll: on ranks that keep them, every later scenario is slower."""
    sharded, plain = (
        next(one for one in load_scenarios() if one.id == name)
        for name in ("tensor_parallel/TP-01/mlp-2x2-world4", "gradients/GRAD-01/mlp-world4")
    )
    with Controller(get_backend("gloo"), zygote=zygote) as controller:

        def num_threads() -> int:
            # A rank lets go of a scenario after it has answered; it is done with that when it answers the next one.
            for scenario in (sharded, plain):
                observations = controller.run(scenario, get_subject("ddp_impl"))
                assert {one.fate.kind for one in observations.values()} == {"returned"}
            ((pool,),) = controller._idle.values()
            return sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pool._pids)

        assert num_threads() == num_threads()


@pytest.mark.parametrize("model", ["mlp", "uneven", "narrow", "frozen", "rows", "columns", "heads", "buffer"])
def test_gradients_of_exact_models_are_whole_multiples_of_27(model: str) -> None:
    rows = UnshardedRows(ShardedPlan((1, 1), model, num_steps=1), {})
    rows.step(0)
    nonzero = 0
    for parameter in rows.modules[0].parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            counts = parameter.grad * 2.0**19 / 27
            assert torch.equal(counts, counts.round())
            nonzero += int(counts.count_nonzero())
    assert nonzero > 0


def test_an_unknown_model_is_named_with_those_there_are() -> None:
    with pytest.raises(ScenarioError, match="unknown sharded model 'nothing'; known: buffer, columns"):
        get_sharded_model("nothing")
