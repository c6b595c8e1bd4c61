"""Every model fixture keeps what its docstring promises."""

import pytest
import torch
from torch import Tensor, nn

from conformance.errors import ScenarioError
from conformance.models.catalogue import ModelFixture, get_fixture, load_fixtures
from conformance.models.exact import QUANTA
from conformance.models.routing import active_experts
from conformance.scenario import Scenario

#: Each model with one dtype on every push, and with all at night.
EACH = [
    pytest.param(one, dtype, id=f"{one.name}-{dtype}", marks=() if place == 0 else pytest.mark.nightly)
    for one in load_fixtures().values()
    for place, dtype in enumerate(one.dtypes)
]
each_model = pytest.mark.parametrize(("fixture", "dtype"), EACH)


def scenario(fixture: ModelFixture, dtype: str, seed: int = 0) -> Scenario:
    return Scenario("models/MODEL/x", ("MODEL",), "train", model=fixture.name, dtype=dtype, seed=seed)


def gradients(fixture: ModelFixture, run: Scenario, rank: int = 0, step: int = 0, micro: int = 0) -> dict[str, Tensor]:
    """Return the dense gradients, real and imaginary parts apart, of those parameters that get one."""
    module = fixture.build(run)
    fixture.loss(module, run, rank=rank, step=step, micro=micro, device="cpu").backward()
    found = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            dense = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            found[name] = torch.view_as_real(dense) if dense.is_complex() else dense
    return found


def test_unknown_model_is_named_with_near_misses() -> None:
    with pytest.raises(ScenarioError, match="did you mean gpt"):
        get_fixture("gtp")
    with pytest.raises(ScenarioError, match=r"known: .*mlp"):
        get_fixture("perceptron of Rosenblatt")


def test_unsupported_dtype_is_refused() -> None:
    with pytest.raises(ScenarioError, match="model complex has dtypes complex64; got float32"):
        get_fixture("complex").build(scenario(get_fixture("complex"), "float32"))


@each_model
def test_build_is_deterministic_and_leaves_global_randomness_alone(fixture: ModelFixture, dtype: str) -> None:
    before = torch.get_rng_state()
    one = fixture.build(scenario(fixture, dtype)).state_dict()
    torch.manual_seed(99)
    other = fixture.build(scenario(fixture, dtype)).state_dict()
    reseeded = fixture.build(scenario(fixture, dtype, seed=1)).state_dict()
    torch.set_rng_state(before)
    fixture.build(scenario(fixture, dtype))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(not torch.equal(one[name], reseeded[name]) for name in one)


@each_model
def test_loss_differs_by_rank_step_and_micro_batch(fixture: ModelFixture, dtype: str) -> None:
    run = scenario(fixture, dtype)
    before = torch.get_rng_state()

    def loss(rank: int, step: int, micro: int) -> float:
        value = fixture.loss(fixture.build(run), run, rank=rank, step=step, micro=micro, device="cpu")
        assert value.ndim == 0
        assert not value.is_complex()
        return value.item()

    places = [(0, 0, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0), (0, 1, 0), (0, 0, 1)]
    losses = [loss(*place) for place in places]
    assert loss(*places[0]) == losses[0]
    # bfloat16 has few values near 1: two of six losses may meet.
    assert len(set(losses)) >= (5 if dtype == "bfloat16" else 6)
    assert torch.equal(torch.get_rng_state(), before)


@each_model
def test_gradients_are_neither_zero_nor_clamped_and_differ_by_rank(fixture: ModelFixture, dtype: str) -> None:
    run = scenario(fixture, dtype)
    mine, theirs = gradients(fixture, run), gradients(fixture, run, rank=2)
    again = gradients(fixture, run)
    assert mine
    for name, gradient in mine.items():
        assert torch.equal(gradient, again[name]), f"{name} is not deterministic"
        rows = gradient[gradient.reshape(len(gradient), -1).any(1)] if _is_table(name) else gradient
        quantum = QUANTA[gradient.dtype]
        clamped = (rows.abs() >= quantum.limit * quantum.size).double().mean().item()
        if not quantum.folds:
            assert clamped <= 0.5, f"{clamped:.0%} of {name} is clamped"
        if rows.numel() >= 8:
            nonzero = rows.count_nonzero().item() / rows.numel()
            assert nonzero >= 0.6, f"only {nonzero:.0%} of {name} is not zero"
        if name in theirs and gradient.numel() >= 4:
            assert not torch.equal(gradient, theirs[name]), f"{name} has the same gradient on two ranks"


def _is_table(name: str) -> bool:
    """Whether only some rows of the parameter are used by a batch, as in an embedding."""
    return name.split(".")[0] in ("users", "items", "characters", "positions", "embedding", "router")


@each_model
def test_metadata_is_true(fixture: ModelFixture, dtype: str) -> None:
    run = scenario(fixture, dtype)
    module = fixture.build(run)
    assert fixture.uses_buffers == bool(list(module.buffers()))
    layouts = set()
    unused = set()
    for rank in range(2):
        module.zero_grad()
        fixture.loss(module, run, rank=rank, step=0, micro=0, device="cpu").backward()
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                layouts.add(parameter.grad.layout)
            elif parameter.requires_grad:
                unused.add(name)
    assert fixture.has_unused == bool(unused)
    assert fixture.sparse == (torch.sparse_coo in layouts)


def dtypes_of(name: str) -> set[torch.dtype]:
    fixture = get_fixture(name)
    return {parameter.dtype for parameter in fixture.build(scenario(fixture, fixture.dtypes[0])).parameters()}


def build(name: str) -> nn.Module:
    fixture = get_fixture(name)
    return fixture.build(scenario(fixture, fixture.dtypes[0]))


def test_peculiarities() -> None:
    assert dtypes_of("mixed_dtypes") == {torch.float32, torch.float64}
    assert dtypes_of("complex") == {torch.complex64}
    lstm = build("lstm")
    assert lstm.get_parameter("decoder.weight") is lstm.get_parameter("embedding.weight")
    frozen = {name for name, parameter in build("frozen").named_parameters() if not parameter.requires_grad}
    assert frozen == {"2.weight", "2.bias", "4.bias"}
    assert len({parameter.numel() for parameter in build("many_small_layers").parameters()}) >= 12
    conv = build("channels_last_cnn").get_parameter("mix.weight")
    assert conv.is_contiguous(memory_format=torch.channels_last)
    assert not conv.is_contiguous()


def test_experts_change_from_step_to_step_and_differ_by_rank() -> None:
    for step in range(4):
        used = [set(active_experts(rank, step, 0)) for rank in range(4)]
        assert len(set.union(*used)) == 8  # no two ranks share an expert, two experts rest everywhere
        assert used[0] != set(active_experts(0, step + 1, 0))
        assert used[0] != set(active_experts(0, step, 1))
