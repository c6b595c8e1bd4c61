"""Scenarios of chapter tensor_parallel: data parallelism over the rows of a mesh whose rows share the parameters."""

import math
from collections.abc import Iterator
from typing import Any

from conformance.chapters.grid import Axis, Grid
from conformance.chapters.variants import (
    LOCAL_BUFFERS,
    PLAIN,
    SKIPPING,
    STATIC,
    UNUSED,
    VIEW,
    Variant,
    arguments,
    capped,
    each,
)
from conformance.scenario import Scenario

_grid = Grid("tensor_parallel")

_SEARCHING, _STATIC = UNUSED.named(""), STATIC.named("")


def _mesh(*extents: int) -> Variant:
    """Return a mesh: rows, which are averaged over, times the ranks of a row, which share the parameters."""
    return arguments("x".join(map(str, extents)), mesh=list(extents)).at(math.prod(extents))


_SQUARE = _mesh(2, 2)
_OTHERS = (_mesh(1, 2), _mesh(2, 1), _mesh(1, 3), _mesh(3, 1), _mesh(1, 4), _mesh(4, 1))


def _models(*names: str) -> tuple[Variant, ...]:
    return each("model", names)


def _model(name: str) -> Variant:
    return arguments(model=name)


def scenarios() -> Iterator[Scenario]:
    """Yield all scenarios of the chapter."""
    yield from _layouts()
    yield from _surface()
    yield from _features()
    yield from _traffic()
    yield from _mistakes()
    yield from _checkpoints()


def _train(requirement: str, slug: str, *axes: Axis, mesh: Axis = _SQUARE, **given: Any) -> Iterator[Scenario]:
    asked = {"num_steps": 4, **given}
    yield from _grid(requirement, slug, "sharded_training", (), *axes, mesh, arguments=asked)


def _layouts() -> Iterator[Scenario]:
    for mesh in (_SQUARE, *_OTHERS):
        yield from _train("TP-01", "", _models("mlp"), Variant(also=("TP-18",)), mesh=mesh, num_steps=10)
        yield from _train("TP-05", "", _models("uneven"), mesh=mesh)
    yield from _train("TP-01", "", _models("rows", "columns"), Variant(also=("TP-05",)), num_steps=10)
    for mesh in (_SQUARE, _mesh(1, 2), _mesh(1, 3)):
        yield from _train("TP-06", "", _models("narrow"), mesh=mesh)
        yield from _train("TP-17", "", _models("sequence"), mesh=mesh)
    for mesh in (_SQUARE, _mesh(2, 1)):
        yield from _grid(
            "TP-30", "", "localized_training", (), _models("mlp"), (PLAIN, VIEW), mesh, arguments={"num_steps": 4}
        )
    yield from _train("TP-24", "", _models("mlp"), mesh=_mesh(1, 2, 2))
    yield from _train("TP-24", "", _models("uneven"), Variant(also=("TP-05",)), mesh=_mesh(2, 1, 2))


def _surface() -> Iterator[Scenario]:
    mlp, uneven, frozen, sequence = _models("mlp", "uneven", "frozen", "sequence")
    shown = Variant(also=("TP-03",))
    small = (_SQUARE, _mesh(1, 2))
    for model, meshes in (
        (mlp, small),
        (uneven, (_SQUARE, _mesh(1, 3))),
        (frozen | Variant(also=("TP-04",)), small),
        (sequence, small),
    ):
        yield from _grid("TP-02", "", "sharded_parameters", (), shown, model, meshes)
    yield from _grid("TP-02", "", "sharded_parameters", (), VIEW, _model("mlp"), _SQUARE)
    yield from _train("TP-04", "", frozen, mesh=(_SQUARE, _mesh(2, 1)), optimizer="momentum")


def _features() -> Iterator[Scenario]:
    yield from _train("TP-07", "", each("optimizer", ("momentum", "adam")), _models("mlp", "uneven"))
    clips = [arguments(f"clip{clip:g}", clip=clip) for clip in (0.05, 1000.0)]
    for model in _models("rows", "sequence"):  # torch adds no norms of DTensors to those of plain parameters
        yield from _train("TP-08", "", clips, model)
    yield from _train("TP-09", "accumulate", _models("mlp", "sequence"), accumulate=2)
    yield from _train("TP-09", "accumulate", VIEW, _model("uneven"), accumulate=2)
    yield from _train("TP-10", "", each("zero_grad", ("zeros", "keep")), _models("uneven", "sequence"))
    initial = arguments("initial", divide_by_initial_world_size=True)
    effective = arguments("effective", divide_by_initial_world_size=False)
    for first, last in ((2, 4), (4, 1)):
        inputs = arguments(f"{first}-{last}", num_inputs=[first, last])
        yield from _train("TP-11", "", _models("mlp", "sequence"), (initial, effective), inputs)
    yield from _grid("TP-12", "", "sharded_hook", (), _models("mlp", "uneven", "sequence"), _SQUARE)
    yield from _train("TP-13", "", each("hook", ("fp16", "all_reduce")), _model("uneven"))
    yield from _train("TP-14", "", VIEW, _models("mlp", "uneven", "sequence", "frozen"))
    yield from _unused()
    yield from _train("TP-19", "weights-by-row", _model("uneven"), variants=True)
    yield from _train("TP-19", "weights-by-row", _model("mlp"), mesh=_mesh(3, 1), variants=True)
    yield from _train("TP-20", "", _models("buffer"))
    yield from _train("TP-20", "", _model("buffer"), LOCAL_BUFFERS.named("no-broadcast"))


def _unused() -> Iterator[Scenario]:
    sequence = arguments("sequence", model="sequence") | Variant(also=("TP-17",))
    by_row = [["ab", "bc"], ["a", "b"], ["c", "abc"], ["a", "a"]]
    ways = (PLAIN, VIEW, SKIPPING.named("skip"))
    yield from _train("TP-15", "", _models("heads"), _SEARCHING, ways, uses=by_row)
    partial = [["ab", "a"], ["b", "a"], ["a", "a"], ["ab", "ab"]]
    yield from _train("TP-15", "", sequence, _SEARCHING, uses=partial)
    yield from _train("TP-16", "", _models("heads"), _STATIC, uses=[["ab", "bc"]])
    yield from _train("TP-16", "", _models("mlp", "uneven"), _STATIC)
    yield from _train("TP-16", "", sequence, _STATIC, uses=[["a", "ab"]])


def _traffic() -> Iterator[Scenario]:
    measured = Variant(also=("TP-23",))
    yield from _grid("TP-21", "", "sharded_traffic", (), _models("mlp", "uneven", "frozen", "rows"), _SQUARE, measured)
    # Six weights of 16 elements, 8 on each rank, of 8 bytes each: caps of 64, 128 and 192 bytes.
    for per_bucket in (1, 2, 3):
        cap = capped(f"{per_bucket}-per-bucket", per_bucket * 64 / 2**20)
        asked = {"model": "stack", "buckets": [8 * per_bucket] * (6 // per_bucket)}
        shown = ("TP-21", "TP-22", "TP-23")
        yield from _grid("TP-22", "", "sharded_traffic", (), cap, _SQUARE, arguments=asked, requirements=shown)


def _mistakes() -> Iterator[Scenario]:
    stack = _model("stack")
    for requirement, mistake in (
        ("TP-25", "whole_mesh"),
        ("TP-26", "default_group"),
        ("TP-26", "tensor_parallel_mesh"),
        ("TP-26", "crossed_groups"),
        ("TP-27", "other_placements"),
        ("TP-27", "not_spread"),
    ):
        made = each("mistake", [mistake])
        yield from _grid(requirement, "", "sharded_mistake", (), made, stack, _SQUARE, deadline_s=10.0)
    deep = arguments("three-dimensions", mistake="whole_mesh")
    yield from _grid("TP-25", "", "sharded_mistake", (), deep, stack, _mesh(1, 2, 2))


def _checkpoints() -> Iterator[Scenario]:
    trained = (
        arguments("uneven-momentum", model="uneven", optimizer="momentum"),
        arguments("mlp-adam", model="mlp", optimizer="adam"),
    )
    for mesh, load_mesh in (((2, 2), (4, 1)), ((2, 2), (1, 4)), ((2, 2), (2, 2)), ((4, 1), (2, 2)), ((1, 2), (2, 1))):
        loaded = arguments(f"to-{'x'.join(map(str, load_mesh))}-from", load_mesh=list(load_mesh))
        shown = ("TP-28", "TP-29")
        yield from _grid("TP-29", "", "sharded_checkpoint", (), loaded, trained, _mesh(*mesh), requirements=shown)
