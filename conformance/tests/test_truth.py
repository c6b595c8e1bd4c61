"""The truth itself, held against arithmetic done by hand."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.errors import OwnMistake
from conformance.models.catalogue import get_fixture
from conformance.models.optimizers import LEARNING_RATE, MOMENTUM
from conformance.programs.rank_context import RankContext
from conformance.programs.truth import truth_of
from conformance.scenario import Scenario, Step
from conformance.truth.device import single_threaded


def scenario(model: str = "mlp", world_size: int = 2, **changes: Any) -> Scenario:
    changes.setdefault("schedule", (Step(), Step()))
    return Scenario("truth/TRUTH/x", ("TRUTH",), "train", model=model, world_size=world_size, **changes)


def local_gradients(run: Scenario, state: Mapping[str, Tensor], rank: int, step: int, micros: int) -> dict[str, Tensor]:
    """Return one rank's accumulated gradients from the given parameters, with nothing but the fixture."""
    fixture = get_fixture(run.model)
    module = fixture.build(run)
    module.load_state_dict(state, strict=False)
    for micro in range(micros):
        fixture.loss(module, run, rank=rank, step=step, micro=micro, device="cpu").backward()
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gradients_are_means_and_sgd_follows_them(world_size: int) -> None:
    run = scenario("many_small_layers", world_size, schedule=(Step(), Step(local_backwards=2)))
    facts = truth_of(run)
    state: dict[str, Tensor] = dict(get_fixture(run.model).build(run).named_parameters())
    momentum = {name: torch.zeros_like(parameter) for name, parameter in state.items()}
    for step, micros in ((0, 1), (1, 3)):
        local = [local_gradients(run, state, rank, step, micros) for rank in range(world_size)]
        for name, parameter in state.items():
            mean = torch.stack([gradients[name].double() for gradients in local]).sum(0) / world_size
            for rank in range(world_size):
                assert torch.equal(facts[rank][f"step{step}/grad/{name}"].double(), mean)
            momentum[name] = momentum[name] * MOMENTUM + mean.float()
            state[name] = parameter.detach() - LEARNING_RATE * momentum[name]
            assert torch.equal(facts[0][f"step{step}/parameter/{name}"], state[name])


def test_inexact_gradients_are_an_error_of_the_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.models.catalogue.make_exact", lambda module: module)
    with pytest.raises(AssertionError, match="multiple of"):
        truth_of(scenario("mlp", 3, seed=12345))


def test_a_mistake_of_the_program_is_an_error_of_the_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(ctx: RankContext) -> None:
        with ctx.catching("raised"):
            ctx.no_such_attribute  # type: ignore[attr-defined]  # noqa: B018

    monkeypatch.setattr("conformance.programs.truth.get_program", lambda _: SimpleNamespace(body=mistaken))
    with pytest.raises(OwnMistake, match="program train itself raises AttributeError"):
        truth_of(scenario())


def digest(run: Scenario) -> str:
    total = hashlib.sha256()
    for facts in truth_of(run).values():
        for name, value in facts.items():
            dense = value.to_dense() if isinstance(value, Tensor) else value
            content = dense.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if dense is not None else b""
            total.update(name.encode() + content)
    return total.hexdigest()


PORTABLE = ("many_small_layers", "cnn", "gpt", "lstm")


def test_truth_computes_with_one_thread_and_restores_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with single_threaded():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with pytest.raises(ZeroDivisionError), single_threaded():
            raise ZeroDivisionError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.nightly
def test_same_bits_with_other_threads_and_in_another_process() -> None:
    # Ranks compute with one thread in processes of their own; the controller may have been left with more.
    names = "PORTABLE, digest, scenario"
    code = f"from conformance.tests.test_truth import {names}; print(*map(digest, map(scenario, PORTABLE)))"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    before, random_state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(2)

    try:
        here = [digest(scenario(name)) for name in PORTABLE]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert done.stdout.split() == here
    assert torch.equal(torch.get_rng_state(), random_state)
