"""The truth itself, held against arithmetic done by hand."""

from __future__ import annotations

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


def test_local_backwards_stay_local() -> None:
    run = scenario("mlp", 2, schedule=(Step(local_backwards=1),))
    facts = truth_of(run)
    state = dict(get_fixture("mlp").build(run).named_parameters())
    for rank in range(2):
        for name, gradient in local_gradients(run, state, rank, 0, 1).items():
            assert torch.equal(facts[rank][f"step0/local0/grad/{name}"], gradient)
    assert not torch.equal(facts[0]["step0/local0/grad/0.weight"], facts[1]["step0/local0/grad/0.weight"])
    assert torch.equal(facts[0]["step0/grad/0.weight"], facts[1]["step0/grad/0.weight"])


def test_step_without_synchronisation_lets_ranks_diverge() -> None:
    facts = truth_of(scenario("mlp", 2, schedule=(Step(local_backwards=1, synchronised=False),)))
    assert "step0/loss" not in facts[0]
    assert not torch.equal(facts[0]["final/parameter/0.weight"], facts[1]["final/parameter/0.weight"])


def test_locally_unused_counts_as_zero_and_globally_unused_keeps_its_gradient() -> None:
    run = scenario("rank_branch", 4, schedule=(Step(),))
    facts = truth_of(run)
    state = dict(get_fixture(run.model).build(run).named_parameters())
    local = [local_gradients(run, state, rank, 0, 1) for rank in range(4)]
    assert "branches.0.weight" not in local[1]
    mean = (local[0]["branches.0.weight"].double() + local[2]["branches.0.weight"].double()) / 4
    assert torch.equal(facts[1]["step0/grad/branches.0.weight"].double(), mean)
    assert truth_of(scenario("rank_branch", 1))[0]["step1/grad/branches.1.0.weight"] is None


def test_use_under_no_sync_counts_for_the_next_average() -> None:
    # With micro-batch 0 rank 0 uses experts 0 and 1; with micro-batch 1, which synchronises, it uses 5 and 6.
    facts = truth_of(scenario("moe", 2, schedule=(Step(local_backwards=1),)))
    for expert in (0, 1, 2, 3, 5, 6, 7, 8):
        assert facts[1][f"step0/grad/experts.{expert}.weight"] is not None
        assert torch.equal(
            facts[0][f"step0/grad/experts.{expert}.weight"], facts[1][f"step0/grad/experts.{expert}.weight"]
        )
    for expert in (4, 9):
        assert facts[0][f"step0/grad/experts.{expert}.weight"] is None


def test_kept_gradients_of_globally_unused_parameters_are_untouched() -> None:
    facts = truth_of(scenario("moe", 1, schedule=(Step(), Step(zero_grad="keep"))))[0]
    # Step 0 uses experts 0 and 1, step 1 uses 3 and 4.
    assert torch.equal(facts["step1/grad/experts.0.weight"], facts["step0/grad/experts.0.weight"])
    assert facts["step0/grad/experts.3.weight"] is None
    zeroed = truth_of(scenario("moe", 1, schedule=(Step(), Step(zero_grad="zeros"))))[0]
    assert not zeroed["step1/grad/experts.0.weight"].any()


def running_means(run: Scenario, step: str) -> list[Tensor]:
    facts = truth_of(run)
    return [facts[rank][f"{step}/buffer/1.running_mean"] for rank in range(run.world_size)]


def batch_means(run: Scenario, rank: int, step: int, micro: int = 0) -> Tensor:
    """Return the running mean after a first forward from fresh weights: 0.1 of the batch's mean."""
    with single_threaded():  # as the truth computes: with more threads sums may be taken in another order
        module = get_fixture(run.model).build(run)
        get_fixture(run.model).loss(module, run, rank=rank, step=step, micro=micro, device="cpu")
    return module.get_buffer("1.running_mean")


def test_buffers_are_local_after_a_forward_and_rank_0s_before_the_next() -> None:
    run = scenario("batchnorm_mlp", 3, schedule=(Step(optimizer=False), Step(optimizer=False)))
    root = batch_means(run, 0, 0)
    for rank, mean in enumerate(running_means(run, "step0")):
        assert torch.equal(mean, batch_means(run, rank, 0))
    for rank, mean in enumerate(running_means(run, "step1")):
        assert torch.allclose(mean, 0.9 * root + batch_means(run, rank, 1), atol=1e-6)


@pytest.mark.parametrize("option", ["broadcast_buffers", "forward_sync_buffers"])
def test_buffers_stay_local_when_switched_off(option: str) -> None:
    run = scenario("batchnorm_mlp", 3, schedule=(Step(optimizer=False), Step(optimizer=False)), options={option: False})
    for rank, mean in enumerate(running_means(run, "step1")):
        assert torch.allclose(mean, 0.9 * batch_means(run, rank, 0) + batch_means(run, rank, 1), atol=1e-6)


def test_newer_option_of_buffers_wins() -> None:
    both = {"broadcast_buffers": False, "forward_sync_buffers": True}
    schedule = (Step(optimizer=False), Step(optimizer=False))
    run = scenario("batchnorm_mlp", 2, schedule=schedule)
    synchronised = running_means(run, "step1")
    assert torch.equal(running_means(run.replace(options=both), "step1")[1], synchronised[1])


def test_only_a_forward_that_follows_a_synchronised_one_gets_rank_0s_buffers() -> None:
    run = scenario("batchnorm_mlp", 2, schedule=(Step(local_backwards=1, optimizer=False),))
    # Both forwards of the step: the second follows one under no_sync, so rank 1 goes on from its own buffers.
    first, second = batch_means(run, 1, 0, 0), batch_means(run, 1, 0, 1)
    assert torch.allclose(running_means(run, "step0")[1], 0.9 * first + second, atol=1e-6)


def test_use_counts_for_one_average_only() -> None:
    facts = truth_of(scenario("moe", 2))
    # Step 0 uses experts 0 to 3 on the two ranks, step 1 uses 3 to 6.
    assert facts[0]["step0/grad/experts.0.weight"] is not None
    assert facts[0]["step1/grad/experts.0.weight"] is None
    assert facts[1]["step1/grad/experts.3.weight"] is not None


def test_ignored_buffers_stay_local() -> None:
    run = scenario("batchnorm_mlp", 2, schedule=(Step(optimizer=False), Step(optimizer=False)))
    ignored = run.replace(arguments={"ignored": ["1.running_mean"]})
    assert torch.equal(running_means(run, "step1")[0], running_means(ignored, "step1")[0])
    expected = 0.9 * batch_means(run, 1, 0) + batch_means(run, 1, 1)
    assert torch.allclose(running_means(ignored, "step1")[1], expected, atol=1e-6)


def test_ignored_parameters_stay_local() -> None:
    facts = truth_of(scenario("mlp", 2, arguments={"ignored": ["0.weight"]}))
    assert not torch.equal(facts[0]["final/parameter/0.weight"], facts[1]["final/parameter/0.weight"])
    assert torch.equal(facts[0]["step0/grad/0.bias"], facts[1]["step0/grad/0.bias"])


def test_sparse_gradients_stay_sparse_with_the_rows_of_all_ranks() -> None:
    run = scenario("sparse_embedding", 2, schedule=(Step(),))
    gradient = truth_of(run)[0]["step0/grad/users.weight"]
    state = dict(get_fixture(run.model).build(run).named_parameters())
    local = [local_gradients(run, state, rank, 0, 1)["users.weight"].coalesce() for rank in range(2)]
    assert gradient.is_sparse
    rows = {int(row) for one in local for row in one.indices()[0]}
    assert {int(row) for row in gradient.coalesce().indices()[0]} == rows
    mean = (local[0].to_dense().double() + local[1].to_dense().double()) / 2
    assert torch.equal(gradient.to_dense().double(), mean)


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
    """Return a digest of every fact of every rank."""
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
