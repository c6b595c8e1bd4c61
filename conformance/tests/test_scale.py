"""What chapter scale is made from: values in which every bit counts, and ranks that leave parameters out."""

import pytest
import torch

from conformance.chapters.scale.trainings import shortened, users_of
from conformance.chapters.scale.values import PERIOD, UNIT, arbitrary, whole
from conformance.scenario import Scenario

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def test_values_depend_on_every_part_of_the_key() -> None:
    assert torch.equal(whole(50, 0, 1), whole(50, 0, 1))
    assert not torch.equal(whole(50, 0, 1), whole(50, 1, 0))
    assert torch.equal(arbitrary(50, torch.float32, 0, 1), arbitrary(50, torch.float32, 0, 1))
    assert not torch.equal(arbitrary(50, torch.float32, 0, 1), arbitrary(50, torch.float32, 1, 0))


def test_whole_numbers_average_exactly_over_up_to_four_ranks() -> None:
    values = whole(2 * PERIOD + 5, "x")
    assert len(values) == 2 * PERIOD + 5
    assert torch.equal(values[:PERIOD], values[PERIOD : 2 * PERIOD])
    assert not (values % UNIT).any()
    assert values.all()
    assert 4 * values.abs().max() < 2**24


@pytest.mark.parametrize("dtype", FLOATING)
def test_arbitrary_numbers_use_every_bit_and_stay_exact_in_halves_and_doubles(dtype: torch.dtype) -> None:
    values = arbitrary(5000, dtype, "x")
    assert values.dtype is dtype
    for factor in (0.25, 0.5, 2, 8):
        scaled = values * factor
        assert torch.equal(scaled / factor, values)
        assert (scaled.isfinite() & (scaled.abs() >= torch.finfo(dtype).tiny)).all()
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    bits = values.view(integer)
    assert torch.bitwise_and(bits, 1).double().mean() == pytest.approx(0.5, abs=0.05), "the last bit of the mantissa"
    assert 0 < (values < 0).sum() < len(values)
    assert values.abs().double().log2().std() > 2, "many magnitudes"


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.complex64])
def test_arbitrary_values_exist_in_every_dtype(dtype: torch.dtype) -> None:
    values = arbitrary(500, dtype, "x")
    assert (values.dtype, values.shape) == (dtype, (500,))
    numbers = torch.view_as_real(values) if values.is_complex() else values
    assert len(numbers.unique()) > (1 if dtype is torch.bool else 180)


def test_beside_every_power_of_two_parameters_are_left_out_in_turns() -> None:
    idle = Scenario("a/A-01/x", ("A-01",), "training_at_scale", world_size=3, arguments={"idle": True})
    for boundary in (8, 64, 256):
        numbers = [
            sorted(len(users_of(idle, index, step)) for index in (boundary - 1, boundary, boundary + 1))
            for step in range(3)
        ]
        assert numbers == [[0, 1, 3]] * 3
        assert {len(users_of(idle, boundary, step)) for step in range(3)} == {0, 1, 3}
    assert len(users_of(idle, 100, 0)) == 3
    assert len(users_of(idle.replace(arguments={}), 64, 0)) == 3


def test_a_long_list_of_what_is_wrong_says_how_long_it_is() -> None:
    assert shortened(["a"] * 8) == ["a"] * 8
    assert shortened(["a"] * 600)[8:] == ["... 600 in all"]
