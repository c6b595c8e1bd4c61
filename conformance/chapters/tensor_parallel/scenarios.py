"""Scenarios of chapter tensor_parallel: data parallelism over the rows of a mesh whose rows share the parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from conformance.chapters.in_chapter import in_chapter
from conformance.scenario import Scenario

_of_chapter = in_chapter("tensor_parallel")

_VIEW: dict[str, Any] = {"gradient_as_bucket_view": True}
_FIND: dict[str, Any] = {"find_unused_parameters": True}
_STATIC: dict[str, Any] = {"static_graph": True}

#: Extents of meshes: rows, which are averaged over, times the ranks of a row, which share the parameters.
_SQUARE = (2, 2)
_OTHERS = ((1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (4, 1))
_FEW_STEPS = 4


def scenarios() -> Iterator[Scenario]:
    """Yield all scenarios of the chapter."""
    yield from _layouts()
    yield from _surface()
    yield from _features()
    yield from _traffic()
    yield from _mistakes()
    yield from _checkpoints()


def _scenario(
    requirement: str, slug: str, program: str, mesh: Sequence[int], *, options: dict[str, Any] | None = None,
    **arguments: Any,
) -> Scenario:  # fmt: skip
    layout = "x".join(map(str, mesh))
    return _of_chapter(requirement, f"{slug}-{layout}", program, math.prod(mesh), options=options or {},
                       arguments={"mesh": list(mesh), **arguments})  # fmt: skip


def _training(requirement: str, slug: str, mesh: Sequence[int] = _SQUARE, **rest: Any) -> Scenario:
    return _scenario(requirement, slug, "sharded_training", mesh, **{"num_steps": _FEW_STEPS, **rest})


def _layouts() -> Iterator[Scenario]:
    for mesh in (_SQUARE, *_OTHERS):
        scenario = _training("TP-01", "mlp", mesh, model="mlp", num_steps=10)
        yield scenario.replace(requirements=("TP-01", "TP-18"))
        yield _training("TP-05", "uneven", mesh, model="uneven")
    for model in ("rows", "columns"):
        scenario = _training("TP-01", model, model=model, num_steps=10)
        yield scenario.replace(requirements=("TP-01", "TP-05"))
    for mesh in (_SQUARE, (1, 2), (1, 3)):
        yield _training("TP-06", "narrow", mesh, model="narrow")
        yield _training("TP-17", "sequence", mesh, model="sequence")
    yield _training("TP-24", "mlp", (1, 2, 2), model="mlp")
    yield _training("TP-24", "uneven", (2, 1, 2), model="uneven").replace(requirements=("TP-24", "TP-05"))


def _surface() -> Iterator[Scenario]:
    for model in ("mlp", "uneven", "frozen", "sequence"):
        for mesh in (_SQUARE, (1, 2)) if model != "uneven" else (_SQUARE, (1, 3)):
            scenario = _scenario("TP-02", model, "sharded_parameters", mesh, model=model)
            frozen = ("TP-04",) if model == "frozen" else ()
            yield scenario.replace(requirements=("TP-02", "TP-03", *frozen))
    yield _scenario("TP-02", "view", "sharded_parameters", _SQUARE, model="mlp", options=_VIEW)
    for mesh in (_SQUARE, (2, 1)):
        yield _training("TP-04", "frozen", mesh, model="frozen", optimizer="momentum")


def _features() -> Iterator[Scenario]:
    for optimizer in ("momentum", "adam"):
        for model in ("mlp", "uneven"):
            yield _training("TP-07", f"{optimizer}-{model}", model=model, optimizer=optimizer)
    for model in ("rows", "sequence"):  # torch adds no norms of DTensors to those of plain parameters
        for clip in (0.05, 1000.0):
            yield _training("TP-08", f"clip{clip:g}-{model}", model=model, clip=clip)
    for model in ("mlp", "sequence"):
        yield _training("TP-09", f"accumulate-{model}", model=model, accumulate=2)
    yield _training("TP-09", "accumulate-view", model="uneven", accumulate=2, options=_VIEW)
    for zero_grad in ("zeros", "keep"):
        yield _training("TP-10", f"{zero_grad}-uneven", model="uneven", zero_grad=zero_grad)
        yield _training("TP-10", f"{zero_grad}-sequence", model="sequence", zero_grad=zero_grad)
    for num_inputs in ([2, 4], [4, 1]):
        for model in ("mlp", "sequence"):
            for initial in (True, False):
                divisor = "initial" if initial else "effective"
                yield _training("TP-11", f"{model}-{divisor}-{'-'.join(map(str, num_inputs))}", model=model,
                                num_inputs=num_inputs, divide_by_initial_world_size=initial)  # fmt: skip
    for model in ("mlp", "uneven", "sequence"):
        yield _scenario("TP-12", model, "sharded_hook", _SQUARE, model=model)
    for hook in ("fp16", "all_reduce"):
        yield _training("TP-13", f"{hook.replace('_', '-')}", model="uneven", hook=hook)
    for model in ("mlp", "uneven", "sequence", "frozen"):
        yield _training("TP-14", f"view-{model}", model=model, options=_VIEW)
    yield from _unused()
    yield _training("TP-19", "weights-by-row", model="uneven", variants=True)
    yield _training("TP-19", "weights-by-row", (3, 1), model="mlp", variants=True)
    yield _training("TP-20", "buffer", model="buffer")
    yield _training("TP-20", "no-broadcast", model="buffer", options={"forward_sync_buffers": False})


def _unused() -> Iterator[Scenario]:
    by_row = [["ab", "bc"], ["a", "b"], ["c", "abc"], ["a", "a"]]
    for suffix, options in (("", _FIND), ("-view", {**_FIND, **_VIEW}),
                            ("-skip", {**_FIND, "skip_all_reduce_unused_params": True})):  # fmt: skip
        yield _training("TP-15", f"heads{suffix}", model="heads", uses=by_row, options=options)
    partial = [["ab", "a"], ["b", "a"], ["a", "a"], ["ab", "ab"]]
    scenario = _training("TP-15", "sequence", model="sequence", uses=partial, options=_FIND)
    yield scenario.replace(requirements=("TP-15", "TP-17"))
    yield _training("TP-16", "heads", model="heads", uses=[["ab", "bc"]], options=_STATIC)
    for model in ("mlp", "uneven"):
        yield _training("TP-16", model, model=model, options=_STATIC)
    scenario = _training("TP-16", "sequence", model="sequence", uses=[["a", "ab"]], options=_STATIC)
    yield scenario.replace(requirements=("TP-16", "TP-17"))


def _traffic() -> Iterator[Scenario]:
    for model in ("mlp", "uneven", "frozen", "rows"):
        scenario = _scenario("TP-21", model, "sharded_traffic", _SQUARE, model=model)
        yield scenario.replace(requirements=("TP-21", "TP-23"))
    # Six weights of 16 elements, 8 on each rank, of 8 bytes each: caps of 64, 128 and 192 bytes.
    for per_bucket in (1, 2, 3):
        options = {"bucket_cap_mb": per_bucket * 64 / 2**20}
        scenario = _scenario("TP-22", f"{per_bucket}-per-bucket", "sharded_traffic", _SQUARE, model="stack",
                             options=options, buckets=[8 * per_bucket] * (6 // per_bucket))  # fmt: skip
        yield scenario.replace(requirements=("TP-21", "TP-22", "TP-23"))


def _mistakes() -> Iterator[Scenario]:
    mistakes = (
        ("TP-25", "whole_mesh"), ("TP-26", "default_group"), ("TP-26", "tensor_parallel_mesh"),
        ("TP-26", "crossed_groups"), ("TP-27", "other_placements"), ("TP-27", "not_spread"),
    )  # fmt: skip
    for requirement, mistake in mistakes:
        scenario = _scenario(requirement, mistake.replace("_", "-"), "sharded_mistake", _SQUARE, model="stack",
                             mistake=mistake)  # fmt: skip
        yield scenario.replace(deadline_s=10.0)
    yield _scenario("TP-25", "three-dimensions", "sharded_mistake", (1, 2, 2), model="stack", mistake="whole_mesh")


def _checkpoints() -> Iterator[Scenario]:
    for mesh, load_mesh in (((2, 2), (4, 1)), ((2, 2), (1, 4)), ((2, 2), (2, 2)), ((4, 1), (2, 2)), ((1, 2), (2, 1))):
        slug = "to-" + "x".join(map(str, load_mesh)) + "-from"
        for model, optimizer in (("uneven", "momentum"), ("mlp", "adam")):
            scenario = _scenario("TP-29", f"{slug}-{model}-{optimizer}", "sharded_checkpoint", mesh, model=model,
                                 optimizer=optimizer, load_mesh=list(load_mesh))  # fmt: skip
            yield scenario.replace(requirements=("TP-28", "TP-29"))
