"""Mixed precision as part of a scenario, and models whose gradients are exact in every floating dtype."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision

from conformance.errors import ScenarioError
from conformance.models.catalogue import ModelFixture
from conformance.scenario import Scenario

#: The step between coarse gradients and how many steps the largest has: 4 ranks * 2 backwards * 10 * 3 <= 2**8.
_QUANTUM = 3 * 2.0**-9
_LIMIT = 10


@dataclass
class Precision(_MixedPrecision):
    """torch's configuration, and two settings that torch plans.

    With `cast_forward_inputs` inputs of the wrapper are cast to `param_dtype`. Modules of the types
    `full_precision_modules` compute in full precision.
    """

    cast_forward_inputs: bool = True
    full_precision_modules: tuple[type[nn.Module], ...] = field(default=())

    @property
    def communication_dtype(self) -> torch.dtype | None:
        """The dtype in which gradients travel; None for their own."""
        return self.reduce_dtype or self.param_dtype


def precision_of(options: Mapping[str, Any]) -> Precision:
    """Read option `mixed_precision` of a scenario: names of dtypes, and of classes of `torch.nn`.

    Raises `ScenarioError` for names that torch does not know.
    """
    written = dict(options["mixed_precision"])
    layers = tuple(getattr(nn, name) for name in written.pop("full_precision_modules", ()))
    casts_inputs = bool(written.pop("cast_forward_inputs", True))
    if unknown := sorted(set(written) - {"param_dtype", "reduce_dtype", "buffer_dtype"}):
        raise ScenarioError(f"mixed_precision has no {', '.join(unknown)}")
    dtypes = {name: None if text is None else getattr(torch, text) for name, text in written.items()}
    return Precision(**dtypes, cast_forward_inputs=casts_inputs, full_precision_modules=layers)


def precision_option(options: Mapping[str, Any]) -> dict[str, Precision]:
    """Return option `mixed_precision` by its name, as a DDP takes it, if there is one; raises as `precision_of`."""
    return {"mixed_precision": precision_of(options)} if "mixed_precision" in options else {}


def coarsen(gradient: Tensor | None) -> Tensor | None:
    """Return a dense `gradient` rounded to one of 21 values that every floating dtype can sum. A parameter hook."""
    if gradient is None:
        return None
    counts = gradient.float().div(_QUANTUM).round_().clamp_(-_LIMIT, _LIMIT)
    return counts.mul_(_QUANTUM).add_(0.0).to(gradient.dtype)


def build_coarse(fixture: ModelFixture, scenario: Scenario, device: torch.device | str = "cpu") -> nn.Module:
    """Return the fixture's model on `device`, equal on every rank, with coarse gradients."""
    module = dataclasses.replace(fixture, exact=False).build(scenario, device)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(coarsen)
    return module
