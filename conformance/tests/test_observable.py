"""What a training can observe besides values: each mode that may change is seen to change."""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import BaseTorchFunctionMode

from conformance.surroundings.hygiene import surroundings, violations
from conformance.surroundings.observable import modes, of_process

CHANGES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad mode": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "default device": lambda: torch.device("meta"),
    "function modes": BaseTorchFunctionMode,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", CHANGES)
def test_a_mode_that_changes_is_seen(name: str) -> None:
    before, around = modes(), surroundings()
    with CHANGES[name]():
        after, changes = modes(), violations(around, surroundings())
    assert before[name] != after[name]
    assert any(change.startswith(f"{name} changed") for change in changes), changes
    assert modes() == before


DRAWS: dict[str, Callable[[], object]] = {
    "torch's random state": lambda: torch.rand(1),
    "Python's random state": random.random,
    "NumPy's random state": lambda: np.random.rand(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_random_number_that_is_drawn_is_seen(name: str) -> None:
    before = of_process()
    assert of_process() == before
    DRAWS[name]()
    assert {key for key, value in of_process().items() if value != before[key]} == {name}


def test_numbers_of_another_generator_of_numpys_are_seen() -> None:
    usual = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(np.random.PCG64(1))  # type: ignore[attr-defined]
    try:
        before = of_process()
        np.random.rand()
        assert of_process() != before
    finally:
        np.random.set_bit_generator(usual)  # type: ignore[attr-defined]
