"""What a DDP's constructor may do to the module that it wraps, and what it may not."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conformance.checkers.checker import Evidence
from conformance.checkers.fate import does_not_interfere
from conformance.observation import Ending, Observation
from conformance.surroundings.interference import Interference
from conformance.tests.evidence_by_hand import SCENARIO


def users_module() -> Any:
    """Return a module with a hook, a parameter's hook and attributes of the user's own."""
    module: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module.rate = 0.5
    module.register_forward_hook(_forward_hook)
    module[0].weight.register_hook(_gradient_hook)
    module[0].weight.tag = "mine"
    return module


def _forward_hook(module: nn.Module, inputs: Any, output: Any) -> None:
    """Do nothing."""


def _gradient_hook(grad: Tensor) -> None:
    """Do nothing."""


def found_after(change: Callable[[Any], object]) -> tuple[str, ...]:
    interference = Interference()
    module = users_module()
    with interference.construction(module, {}):
        change(module)
    return interference.found


HOW_A_DDP_WORKS: dict[str, Callable[[Any], object]] = {
    "tensor hook": lambda module: module[0].weight.register_hook(_gradient_hook),
    "hook of several": lambda module: torch.autograd.graph.register_multi_grad_hook([*module.parameters()], print),
    "forward pre-hook": lambda module: module.register_forward_pre_hook(lambda module, inputs: None),
    "hook of state_dict": lambda module: module[0].register_state_dict_post_hook(lambda *arguments: None),
    "attribute of a parameter": lambda module: setattr(module[0].weight, "main_grad", None),
    "attribute of a part": lambda module: setattr(module[0], "_owner", None),
}


@pytest.mark.parametrize("name", HOW_A_DDP_WORKS)
def test_hooks_and_attributes_of_its_own_are_how_a_ddp_works(name: str) -> None:
    assert found_after(HOW_A_DDP_WORKS[name]) == ()


WHAT_A_USER_NOTICES: dict[str, Callable[[Any], object]] = {
    "1: training": lambda module: module[1].eval(),
    "0.weight: requires_grad": lambda module: module[0].weight.requires_grad_(False),
    "keys of state_dict": lambda module: module.register_buffer("more", torch.ones(1)),
    "more: training": lambda module: module.add_module("more", nn.Module()),
    "0: replaced methods": lambda module: setattr(module[0], "forward", module[0].forward),
    "the module: attribute rate: 0.5 before, 1.0 after": lambda module: setattr(module, "rate", 1.0),
    "the module: attribute rate: 0.5 before, taken away": lambda module: delattr(module, "rate"),
    "0.weight: attribute tag": lambda module: delattr(module[0].weight, "tag"),
    "the module: hook": lambda module: module._forward_hooks.clear(),
    "0.weight: tensor hook": lambda module: module[0].weight._backward_hooks.clear(),
}


@pytest.mark.parametrize("phrase", WHAT_A_USER_NOTICES)
def test_what_was_the_modules_own_must_stay(phrase: str) -> None:
    assert any(phrase in one for one in found_after(WHAT_A_USER_NOTICES[phrase]))


DRAWS: dict[str, Callable[[], object]] = {"Python's": random.random, "NumPy's": lambda: np.random.rand()}


@pytest.mark.parametrize("whose", DRAWS)
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_a_random_number_that_a_phase_draws_is_seen(phase: str, whose: str) -> None:
    interference = Interference()
    interference.entered(phase, 0, True)
    DRAWS[whose]()
    interference.entered("start", 0, True)
    assert len(interference.found) == 1
    assert interference.found[0].startswith(f"{phase} changed {whose} random state: ")


def test_a_module_may_draw_torchs_random_numbers() -> None:
    interference = Interference()
    interference.entered("forward", 0, True)
    torch.rand(1)
    interference.entered("start", 0, True)
    assert interference.found == ()


@pytest.mark.parametrize(
    ("phrases", "broken"),
    [
        (("the constructor changed 1: training: True before, False after",), ("COMPOSED-02",)),
        (("forward changed current device: 0 before, 1 after",), ("DEV-13",)),
        (("forward changed current device: 0 before, 1 after", "forward changed autocast"), ("DEV-13", "COMPOSED-02")),
    ],
)
def test_it_is_charged_to_the_requirements_that_speak_of_it(phrases: tuple[str, ...], broken: tuple[str, ...]) -> None:
    finding = does_not_interfere(Evidence(SCENARIO, {0: Observation(0, Ending("returned"), interference=phrases)}))
    assert finding is not None
    assert finding.requirements == broken
