"""The arithmetic that bitwise comparison rests on."""

import itertools

import pytest
import torch
from torch import Tensor

from conformance.models.exact import QUANTA, exact_mean, make_exact, quantise

REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def rounded_gradients(dtype: torch.dtype, world_size: int, num_backwards: int = 1, scale: float = 0.05) -> list[Tensor]:
    """Return one gradient per rank, the sum of `num_backwards` rounded ones, over many magnitudes."""
    generator = torch.Generator().manual_seed(world_size)
    gradients = []
    for _ in range(world_size):
        total = torch.zeros(257, dtype=dtype)
        for _ in range(num_backwards):
            drawn = torch.randn(257, generator=generator, dtype=torch.float64) * scale
            drawn *= 10.0 ** torch.randint(-4, 2, (257,), generator=generator)
            gradient = quantise(drawn.to(dtype))
            assert gradient is not None
            total += gradient
        gradients.append(total)
    return gradients


def means(gradients: list[Tensor]) -> list[Tensor]:
    """Return the mean in every order, divided first or last, by division or by the reciprocal."""
    world_size = len(gradients)
    results = []
    for order in itertools.permutations(gradients):
        results.append(sum(order[1:], order[0]) / world_size)
        results.append(sum(order[1:], order[0]) * (1.0 / world_size))
        results.append(sum((gradient / world_size for gradient in order[1:]), order[0] / world_size))
        results.append(sum((gradient * (1.0 / world_size) for gradient in order[1:]), order[0] * (1.0 / world_size)))
    return results


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_backwards", [1, 4])
def test_mean_is_the_same_in_every_order(dtype: torch.dtype, world_size: int, num_backwards: int) -> None:
    gradients = rounded_gradients(dtype, world_size, num_backwards)
    expected = exact_mean(gradients)
    for mean in means(gradients):
        assert same_bits(mean, expected)


@pytest.mark.parametrize("dtype", REAL)
def test_unrounded_gradients_depend_on_the_order(dtype: torch.dtype) -> None:
    # Otherwise the test above would show nothing.
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(257, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)]
    results = means(gradients)
    assert not all(same_bits(mean, results[0]) for mean in results)
    with pytest.raises(AssertionError):
        exact_mean(gradients)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gradients_kept_over_averages_stay_exact(dtype: torch.dtype, world_size: int) -> None:
    kept = torch.zeros(257, dtype=dtype)
    for _ in range(3):
        gradients = [kept + local for local in rounded_gradients(dtype, world_size)]
        kept = exact_mean(gradients)
        assert all(same_bits(mean, kept) for mean in means(gradients))


@pytest.mark.parametrize("dtype", REAL)
def test_bound_of_the_table_holds_with_the_largest_gradients(dtype: torch.dtype) -> None:
    quantum = QUANTA[dtype]
    bound = 2**quantum.precision // (4 * quantum.limit * quantum.factor)
    assert bound >= 4
    largest = torch.full((1,), quantum.limit * quantum.size, dtype=dtype)
    # One odd count on one rank keeps the sum's last bit in use.
    other = torch.full((1,), (quantum.limit - 1) * quantum.size, dtype=dtype)
    exact_mean([largest * bound, largest * bound, largest * bound, largest * (bound - 1) + other])


def test_limits_are_checked_per_element() -> None:
    unit = QUANTA[torch.float32].size
    small = torch.tensor([1.0, 2.0**20]) * unit
    exact_mean([small, small])
    with pytest.raises(AssertionError, match="more than 24 bits"):
        exact_mean([torch.tensor([2.0**24 * unit]), torch.tensor([unit])])


def test_missing_factor_three_is_found_for_three_ranks_only() -> None:
    gradient = torch.tensor([2.0**-10])
    exact_mean([gradient] * 4)
    with pytest.raises(AssertionError, match="no multiple of 3"):
        exact_mean([gradient] * 3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30, 1e-9])
def test_what_is_not_exact_is_refused(bad: float) -> None:
    with pytest.raises(AssertionError):
        exact_mean([torch.tensor([bad]), torch.zeros(1)])


@pytest.mark.parametrize("dtype", REAL)
def test_zero_is_positive(dtype: torch.dtype) -> None:
    rounded = quantise(torch.tensor([-1e-12, -0.0, 1e-12], dtype=dtype))
    assert rounded is not None
    assert not rounded.any()
    assert not rounded.signbit().any()


@pytest.mark.parametrize("dtype", REAL)
def test_rounded_gradients_stay_in_range(dtype: torch.dtype) -> None:
    rounded = quantise(torch.linspace(-1000, 1000, 4001, dtype=dtype))
    assert rounded is not None
    assert rounded.abs().max() <= QUANTA[dtype].limit * QUANTA[dtype].size


def test_rounding_moves_a_gradient_by_half_a_quantum_at_most() -> None:
    gradient = torch.linspace(-0.4, 0.4, 1001)
    rounded = quantise(gradient)
    assert rounded is not None
    assert (rounded - gradient).abs().max() <= QUANTA[torch.float32].size * 0.5001


def test_complex_gradients_are_rounded_in_both_parts() -> None:
    gradient = torch.complex(torch.tensor([0.1, 0.2]), torch.tensor([-0.3, 0.05])).conj()
    rounded = quantise(gradient)
    assert rounded is not None
    parts = quantise(torch.view_as_real(gradient.resolve_conj()))
    assert parts is not None
    assert torch.equal(torch.view_as_real(rounded), parts)
    exact_mean([rounded, rounded, rounded])


def test_sparse_gradients_are_coalesced_and_rounded() -> None:
    indices = torch.tensor([[3, 1, 3]])
    values = torch.tensor([[0.1, 0.2], [0.011, 0.012], [0.03, 0.04]])
    sparse = torch.sparse_coo_tensor(indices, values, (5, 2), check_invariants=True)
    rounded = quantise(sparse)
    assert rounded is not None
    assert rounded.is_sparse
    assert rounded.is_coalesced()
    dense = quantise(sparse.to_dense())
    assert dense is not None
    assert torch.equal(rounded.to_dense(), dense)


def test_strides_survive() -> None:
    gradient = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    rounded = quantise(gradient)
    assert rounded is not None
    assert rounded.stride() == gradient.stride()
    assert exact_mean([rounded, rounded]).stride() == gradient.stride()


def test_make_exact_rounds_before_accumulation_and_passes_undefined_gradients() -> None:
    layer = make_exact(torch.nn.Linear(3, 2))
    weight = layer.get_parameter("weight")
    seen: list[Tensor] = []

    def see(parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen.append(parameter.grad.clone())

    weight.register_post_accumulate_grad_hook(see)
    for _ in range(2):
        layer(torch.full((4, 3), 0.1)).square().sum().backward()
    assert len(seen) == 2
    assert torch.equal(seen[0] * 2, seen[1])
    exact_mean([seen[0], seen[1], seen[0]])
    assert quantise(None) is None
