"""`truth_of`: what the ranks of a scenario must observe is what its program observes on plain ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from conformance.models.catalogue import get_fixture
from conformance.observation import Facts
from conformance.oracles.device import replica_device
from conformance.oracles.replicas import single_threaded
from conformance.own_mistake import instance, present
from conformance.programs.rank_context import RankContext, Unsupported, Wrap
from conformance.programs.registry import get_program
from conformance.scenario import Scenario
from conformance.truth.plain_ddp import Backwards, PlainDDP
from conformance.truth.plain_group import PlainGroup
from conformance.truth.plain_ranks import on_plain_ranks


def truth_of(scenario: Scenario) -> Mapping[int, Facts]:
    """Return for each rank the facts that the scenario's program observes when its DDP is a `PlainDDP`.

    All ranks are threads of this process. Where the program does not apply, no fact is expected. Raises what the
    program raises; `DesertedError` where its ranks wait for each other; `InexactError` where a mean is not exact.
    """
    with single_threaded():
        return on_plain_ranks(scenario.world_size, lambda rank, group: _observed(scenario, rank, group))


def _observed(scenario: Scenario, rank: int, group: PlainGroup) -> Facts:
    wrap = _wrapping_in(group)
    context = RankContext(
        scenario, rank=rank, device=replica_device(), process_group=group, fixture=get_fixture(scenario.model),
        wrap=wrap, wrap_named=lambda _: wrap,
    )  # fmt: skip
    try:
        get_program(scenario.program).body(context)
    except Unsupported:
        return {}
    return context.facts


def _wrapping_in(default: PlainGroup) -> Wrap:
    """Return what builds one rank's wrappers."""
    backwards = Backwards()

    def wrap(module: nn.Module, **options: Any) -> nn.Module:
        asked: Any = options.pop("process_group", None)
        if (mesh := options.pop("device_mesh", None)) is not None:
            asked = mesh.get_group(mesh_dim=0)
        place = instance(default if asked in (None, dist.group.WORLD) else asked, PlainGroup)
        return PlainDDP(module, present(place), backwards, **options)

    return wrap
