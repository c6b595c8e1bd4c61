"""Recipes, the truth of whole trainings, and the chapter made of them."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.nn import functional

from conformance.chapters.training.scenarios import scenarios
from conformance.errors import ScenarioError
from conformance.models.catalogue import load_fixtures
from conformance.models.recipe import RESTARTS, Learner, Recipe, loss_ratio
from conformance.models.tasks import get_task
from conformance.observation import Facts
from conformance.programs.registry import get_program
from conformance.programs.truth import truth_of
from conformance.scenario import Scenario
from conformance.truth.expected import Satisfies, mismatch

SHORT = {"task": "digits", "epochs": 2, "max_steps": 4, "batch_size": 8}


def training(model: str = "cnn", world_size: int = 2, **arguments: Any) -> Scenario:
    options = arguments.pop("options", {})
    arguments = {**SHORT, **arguments}
    return Scenario(
        "t/T/x", ("T",), "training", model=model, world_size=world_size, arguments=arguments, options=options
    )


def final(facts: Mapping[int, Facts], rank: int = 0) -> torch.Tensor:
    return torch.cat([value.flatten() for name, value in facts[rank].items() if name.startswith("final/parameter")])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_rank_is_a_plain_training_loop(accumulate: int) -> None:
    run = training(world_size=1, epochs=1, accumulate=accumulate)
    facts = truth_of(run)[0]
    module = load_fixtures()["cnn"].build(run)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    dataset = get_task("digits").training
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))
    losses = []
    for start in range(0, 4 * accumulate * 8, 8):
        images, labels = dataset[order[start : start + 8]]
        loss = functional.cross_entropy(module(images), labels) / accumulate
        loss.backward()
        losses.append(loss.detach())
        if len(losses) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(facts["epoch0/loss"], torch.stack(losses))
    for name, parameter in module.named_parameters():
        assert torch.equal(facts[f"final/parameter/{name}"], parameter)


def test_every_choice_of_a_recipe_changes_the_training() -> None:
    changes: dict[str, dict[str, Any]] = {
        "base": {}, "nesterov": {"optimizer": "nesterov"}, "adam": {"optimizer": "adam"},
        "adamw": {"optimizer": "adamw"},
        "step": {"schedule": "step", "max_steps": 12}, "long": {"max_steps": 12}, "cosine": {"schedule": "cosine"},
        "warmup": {"schedule": "warmup"}, "clipped": {"clip_norm": 0.25}, "accumulated": {"accumulate": 2},
        "batch": {"batch_size": 9}, "local buffers": {"options": {"broadcast_buffers": False}},
    }  # fmt: skip
    trained = {name: truth_of(training(**change)) for name, change in changes.items()}
    weights = {name: final(facts) for name, facts in trained.items()}
    names = list(weights)
    same = {
        (one, other)
        for place, one in enumerate(names)
        for other in names[place + 1 :]
        if torch.equal(weights[one], weights[other])
    }
    # Buffers change what is evaluated, not what is learnt: batch normalisation trains on the batch's own statistics.
    assert same == {("base", "local buffers")}
    base, local = trained["base"], trained["local buffers"]
    assert base[1]["epoch0/score"] == base[0]["epoch0/score"]
    assert not torch.equal(local[1]["final/buffer/norm1.running_mean"], base[1]["final/buffer/norm1.running_mean"])


def test_evaluation_and_restarts_change_nothing_in_the_truth() -> None:
    base = truth_of(training())
    assert torch.equal(final(base), final(truth_of(training(evaluate=False))))
    restarted = truth_of(training(restart="rank_0", restart_after=3))
    assert torch.equal(final(base), final(restarted))
    assert restarted[1]["checkpoint/keys"][0] == "module.conv1.weight"


def test_demands_are_expected_facts() -> None:
    facts = truth_of(training(minimum_accuracy=0.9, maximum_loss_ratio=0.5))[1]
    assert isinstance(facts["accuracy"], Satisfies)
    assert mismatch(facts["accuracy"], 0.9) is None
    assert mismatch(facts["accuracy"], 0.89) is not None
    assert mismatch(facts["loss_ratio"], 0.51) is not None


def test_shards_cover_the_data_and_are_reshuffled() -> None:
    recipe = Recipe("digits", batch_size=100)
    module = load_fixtures()["cnn"].build(training())
    learners = [Learner(recipe, module, rank=rank, world_size=4, seed=0, device="cpu") for rank in range(4)]

    def images(epoch: int, rank: int) -> torch.Tensor:
        return torch.cat([inputs for step in learners[rank].steps(epoch) for inputs, _ in step])

    shards = [images(0, rank) for rank in range(4)]
    assert [len(shard) for shard in shards] == [360] * 4  # 1438 and two that are seen twice
    seen = torch.cat(shards).flatten(1).unique(dim=0)
    assert len(seen) == len(get_task("digits").training.tensors[0].flatten(1).unique(dim=0))
    assert not torch.equal(shards[0], images(1, 0))
    assert torch.equal(shards[0], images(0, 0))


def test_training_and_test_data_are_disjoint() -> None:
    digits, text = get_task("digits"), get_task("text")
    images = [set(map(str, part.tensors[0].flatten(1).tolist())) for part in (digits.training, digits.test)]
    assert not images[0] & images[1]
    assert (len(digits.training), len(digits.test)) == (1438, 359)
    assert (len(text.training), len(text.test)) == (1367, 341)  # 1708 excerpts of 32 characters


def test_loss_ratio_compares_quarters() -> None:
    assert loss_ratio([torch.tensor(value) for value in (4.0, 4.0, 9.0, 9.0, 9.0, 9.0, 1.0, 2.0)]) == 0.375
    assert loss_ratio([torch.tensor(3.0)]) == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "digit"}, "unknown task 'digit'; did you mean digits?"),
        ({"optimizer": "lion"}, "optimizer must be one of sgd, nesterov, adam, adamw; got 'lion'"),
        ({"schedule": "wave"}, "schedule must be one of"),
        ({"restart": "rank_1"}, "restart must be one of every_rank, rank_0; got 'rank_1'"),
        ({"epochs": 0}, "epochs must be >= 1, got 0"),
        ({"epoch": 3}, "t/T/x: no argument(s) of a training: epoch"),
    ],
)
def test_wrong_recipes_say_what_is_wrong(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=re.escape(message)):
        Recipe.of(training(**arguments))


def test_a_recipe_needs_a_task() -> None:
    with pytest.raises(ScenarioError, match="task"):
        Recipe.of(Scenario("t/T/x", ("T",), "training"))


def test_the_chapter_covers_every_model() -> None:
    chapter = list(scenarios())
    assert {scenario.model for scenario in chapter} == set(load_fixtures())
    assert {scenario.world_size for scenario in chapter} == {1, 2, 3, 4}
    for scenario in chapter:
        if scenario.program == "training":
            recipe = Recipe.of(scenario)
            assert recipe.restart in RESTARTS
            if recipe.restart:
                assert 0 < recipe.restart_after < recipe.epochs * recipe.max_steps, "the restart would not happen"
        assert get_program(scenario.program).expectation is not None
