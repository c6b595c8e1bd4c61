"""Scenarios of chapter tensor_parallel: data parallelism over one dimension of a mesh, tensor parallelism over another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from conformance.chapters._scenario import in_chapter
from conformance.scenario import Scenario

_of_chapter = in_chapter("tensor_parallel")


def scenarios() -> Iterator[Scenario]:
    """Yield all scenarios of the chapter."""
    for model in ("mlp", "uneven", "narrow", "rows", "columns", "sequence"):
        yield _training("TP-01", model, [2, 2], model)


def _training(requirement: str, slug: str, mesh: Sequence[int], model: str, **rest: Any) -> Scenario:
    options = rest.pop("options", {})
    world_size = 1
    for extent in mesh:
        world_size *= extent
    layout = "x".join(map(str, mesh))
    return _of_chapter(requirement, f"{slug}-{layout}", "sharded_training", world_size, options=options,
                       arguments={"mesh": list(mesh), "model": model, **rest})  # fmt: skip
