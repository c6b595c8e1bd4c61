"""Scenarios of chapter copies: pickles, deep copies and checkpoints of a wrapper, and its bare module."""

from collections.abc import Iterator
from typing import Any

from conformance.chapters.grid import Axis, Grid, Worlds
from conformance.chapters.variants import (
    EACH_ALONE,
    ENDS_SOON,
    LOCAL_BUFFERS,
    PLAIN,
    SCALARS_ALONE,
    STATIC,
    UNUSED,
    VIEW,
    Variant,
    arguments,
    each,
    options,
)
from conformance.scenario import Scenario

_pickling = Grid("copies", Variant(needs=("pickling",)))
_grid = Grid("copies")

_WAYS = each("way", ("pickle", "deepcopy", "save"))
_MIXED = options("", mixed_precision={"param_dtype": "bfloat16", "reduce_dtype": "float64"})
_HOOKS = each("hook", ("gradients", "buffers", "buffers-before", "half"))


def _copied(
    requirement: str, slug: str, worlds: Worlds, *axes: Axis, moment: str = "trained", **rest: Any
) -> Iterator[Scenario]:
    at = arguments(moment=moment)
    yield from _pickling(requirement, slug, "copied_wrapper", worlds, ENDS_SOON, *axes, at, **rest)


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _wrappers()
    yield from _twisted()
    yield from _modules()


def _wrappers() -> Iterator[Scenario]:
    both = (VIEW | UNUSED | SCALARS_ALONE).named("all")
    ignored = (arguments("ignored", ignored=["b.weight", "b.bias"]), arguments("ignored-buffer", ignored=["seen"]))
    for way in _WAYS:
        for moment in ("constructed", "trained"):
            at = PLAIN.named(moment)
            yield from _copied("COPY-01", "", (1, 2, 3), way, at, moment=moment, also=("COPY-02", "COPY-04"))
        yield from _copied("COPY-01", "", 2, way, arguments("twice", twice=True))
        ways = (VIEW, UNUSED, STATIC, SCALARS_ALONE, LOCAL_BUFFERS, both, *ignored)
        yield from _copied("COPY-03", "", 2, way, ways)
        yield from _copied("COPY-03", "mixed", 2, way, _MIXED, needs=("mixed_precision",))
        yield from _copied("COPY-02", "", 2, way, PLAIN.named("gradients"), (PLAIN, VIEW), moment="gradients")
    yield from _copied("COPY-02", "deepcopy-gradients", 3, SCALARS_ALONE, arguments(way="deepcopy"), moment="gradients")
    yield from _pickling("COPY-02", "failing", "failing_copies", (2, 3), EACH_ALONE, (PLAIN, UNUSED), ENDS_SOON)


def _twisted() -> Iterator[Scenario]:
    for way in _WAYS:
        for world_size in (2, 3):
            yield from _copied("COPY-07", "", world_size, way, moment="no_sync", needs=("no_sync",))
            yield from _pickling("COPY-05", "", "copied_in_group", world_size, way)
        yield from _copied("COPY-06", "", (2, 3), way, _HOOKS, needs=("comm_hook",))
        yield from _copied("COPY-06", "at-once", 2, way, _HOOKS, moment="constructed", needs=("comm_hook",))
        yield from _copied("COPY-08", "", 2, way, (PLAIN, VIEW, SCALARS_ALONE), moment="forward")
        yield from _copied("COPY-09", "", 2, way, moment="join", needs=("join",))


def _modules() -> Iterator[Scenario]:
    copy, freed = each("case", ("copy", "freed"))
    for way, worlds in ((PLAIN, (2, 3)), (VIEW, (2,)), (UNUSED, (2,)), (STATIC, (2,))):
        for world_size in worlds:
            yield from _grid("COPY-10", "", "copied_module", world_size, copy, way, ENDS_SOON)
            yield from _grid("COPY-11", "", "copied_module", world_size, freed, way, ENDS_SOON)
    to = each("to", ("wrapper", "torch", "from_torch", "bare"))
    yield from _grid("COPY-12", "", "carried_state", 2, to, (PLAIN.at(2, 3), VIEW), ENDS_SOON)
    ways = each("way", ("same", "to_torch", "from_torch", "to_bare", "from_bare"))
    yield from _grid("COPY-13", "", "distributed_checkpoint", (1, 2), ways, ENDS_SOON)
    yield from _grid("COPY-14", "recognised", "recognised_wrapper", 1)
