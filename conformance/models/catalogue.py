"""Model fixtures: small models with deterministic weights, data and losses, whose gradients average exactly.

A fixture is the same on every rank and in the controller: `build` gives the same weights for the same seed, and `loss`
the same value for the same weights, rank, step and micro-batch. Neither touches global random state.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from conformance.errors import ScenarioError, certain, hint
from conformance.models.batches import Batch, mixed_seed
from conformance.models.exact import make_exact
from conformance.scenario import Scenario

#: The modules of this package that define `FIXTURES`, one family of models each.
FAMILIES = ("dense", "convolution", "language", "embeddings", "routing", "structured")

#: For models whose every operation exists in each of these on a CPU.
ALL_REAL = ("float32", "float64", "float16", "bfloat16")


@dataclass(frozen=True)
class ModelFixture:
    """One model with its data and loss.

    `architecture` builds the module, `batch_loss` runs its forward once on a micro-batch and returns a scalar. A
    scenario may ask for each of `dtypes`; where there is only one, the architecture has chosen it. With `has_unused`
    some parameter gets no gradient on some rank, which needs `find_unused_parameters`.
    """

    name: str
    architecture: Callable[[], nn.Module]
    batch_loss: Callable[[Any, Batch], Tensor]
    dtypes: tuple[str, ...] = ("float32", "float64")
    uses_buffers: bool = False
    has_unused: bool = False
    sparse: bool = False
    exact: bool = True

    def build(self, scenario: Scenario, device: torch.device | str = "cpu") -> nn.Module:
        """Return a new module on `device` in training mode, equal on every rank; `ScenarioError` for another dtype."""
        if scenario.dtype not in self.dtypes:
            supported = ", ".join(self.dtypes)
            raise ScenarioError(f"{scenario.id}: model {self.name} has dtypes {supported}; got {scenario.dtype}")
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(mixed_seed("weights", scenario.seed, self.name))
            module = self.architecture()
        if len(self.dtypes) > 1:
            module = module.to(getattr(torch, scenario.dtype))
        module = moved(module, torch.device(device))  # before hooks: on some devices a module gets new parameters
        return make_exact(module) if self.exact else module

    def loss(
        self, model: nn.Module, scenario: Scenario, *, rank: int, step: int, micro: int, device: torch.device | str
    ) -> Tensor:
        """Run `model` (wrapped or not) once on this rank's micro-batch and return the scalar loss."""
        dtype = getattr(torch, scenario.dtype)
        return self.batch_loss(model, Batch(scenario.seed, rank, step, micro, dtype, torch.device(device)))


def moved(module: nn.Module, device: torch.device) -> nn.Module:
    """Return `module` on `device`, with the same parameters tied, which torch unties for a private device."""
    if device.type == "cpu":
        return module
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return module.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def load_fixtures() -> Mapping[str, ModelFixture]:
    """Import every family and return the fixtures by name."""
    fixtures: dict[str, ModelFixture] = {}
    for family in FAMILIES:
        for fixture in importlib.import_module(f"{__package__}.{family}").FIXTURES:
            certain(fixture.name not in fixtures, f"two models are called {fixture.name}")
            fixtures[fixture.name] = fixture
    return fixtures


def get_fixture(name: str) -> ModelFixture:
    """Return the model fixture called `name`; raises `ScenarioError` with near misses."""
    fixtures = load_fixtures()
    if name not in fixtures:
        raise ScenarioError(f"unknown model {name!r}{hint(name, fixtures)}")
    return fixtures[name]
