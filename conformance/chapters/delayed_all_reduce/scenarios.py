"""Scenarios of chapter delayed_all_reduce: the DDP reduces some gradients only after a chosen one is ready."""

from collections.abc import Iterator
from typing import Any

from conformance.chapters.grid import Axis, Grid, Worlds
from conformance.chapters.variants import (
    ENDS_SOON,
    PLAIN,
    SCALARS_ALONE,
    STATIC,
    UNUSED,
    VIEW,
    Variant,
    arguments,
    each,
)
from conformance.scenario import Scenario

_grid = Grid("delayed_all_reduce", Variant(needs=("delay_all_reduce",)))

_VARIANTS = (PLAIN, VIEW, SCALARS_ALONE)
#: The usual case: the last layer's gradients, which arrive first, wait until the first layer's has arrived.
_LAST = arguments(delayed=["last.weight", "last.bias"])


def _delayed(slug: str, *names: str) -> Variant:
    return arguments(slug, delayed=list(names))


def _train(requirement: str, slug: str, worlds: Worlds, *axes: Axis, **given: Any) -> Iterator[Scenario]:
    asked = {"trigger": "first.weight", **given}
    yield from _grid(requirement, slug, "delayed_all_reduce", worlds, ENDS_SOON, *axes, arguments=asked)


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _gradients()
    yield from _dtypes()
    yield from _uses()
    refused = ("trigger_alone", "names_alone", "stranger", "wrong_name", "strange_trigger", "frozen_trigger")
    yield from _grid("DELAY-07", "", "delayed_all_reduce_refusal", 2, each("case", refused), min_collectives=0)


def _gradients() -> Iterator[Scenario]:
    also = Variant(also=("DELAY-02",))
    yield from _train("DELAY-01", "last", (2, 3), (PLAIN.at(1, 2, 3, 4), VIEW, SCALARS_ALONE), _LAST, also)
    for delayed in (
        _delayed("weight", "last.weight"),
        _delayed("root", "offset"),
        _delayed("three", "offset", "last.weight", "middle.bias"),
    ):
        for world_size in (2, 3):
            yield from _train("DELAY-03", "", world_size, delayed)
            yield from _train("DELAY-02", "", world_size, delayed, SCALARS_ALONE)
    for way in _VARIANTS:
        yield from _train("DELAY-04", "one-local", (2, 3), way, _LAST, local=1)
        yield from _train("DELAY-06", "all", 2, way)
        yield from _train("DELAY-06", "all-by-last", 3, way, trigger="last.bias")
    middle = _LAST | arguments("middle", trigger="middle.weight", following="first.weight")
    same_layer = _delayed("same-layer", "spare.weight") | arguments(trigger="last.weight", following="middle.weight")
    for way in (*_VARIANTS, UNUSED, STATIC):
        for world_size in (2, 3) if way is PLAIN else (2,):
            yield from _train("DELAY-12", "", world_size, (middle, same_layer), way)
    yield from _train("DELAY-04", "two-local", 2, _LAST, local=2)
    yield from _train("DELAY-04", "all-local", 2, local=1)
    yield from _train("DELAY-08", "last", (2, 3, 4), _LAST, different_weights=True)
    yield from _train("DELAY-08", "all", 2, different_weights=True)
    yield from _train("DELAY-11", "", 2, each("zero_grad", ("zeros", "keep")), _VARIANTS, _LAST)
    ways = (STATIC, STATIC | SCALARS_ALONE, UNUSED, UNUSED | VIEW, VIEW | SCALARS_ALONE)
    yield from _train("DELAY-11", "", (2, 3), ways, _LAST)


def _dtypes() -> Iterator[Scenario]:
    for dtype in each("dtype", ("float64", "float16", "bfloat16", "complex64")):
        yield from _train("DELAY-05", "", (2, 3), dtype, _LAST)
        yield from _train("DELAY-05", "all", 2, dtype)
    mixed = (
        _delayed("float64", "last.weight"),
        _delayed("float32", "first.bias"),
        _delayed("both", "first.bias", "last.weight"),
    )
    yield from _train("DELAY-05", "mixed", (2, 3), mixed, module="two_dtypes")


def _uses() -> Iterator[Scenario]:
    first = _delayed("", "first.weight", "first.bias")
    after = (arguments("after-bias", trigger="last.bias"), arguments("after-offset", trigger="offset"))
    tied = arguments("tied", module="tied", delayed=["first.weight"], trigger="last.weight")
    for way in _VARIANTS:
        yield from _train("DELAY-09", "", 2, first, after, way)
        yield from _train("DELAY-09", "", 2, tied, way)
    searching = UNUSED.named("")
    spare = _delayed("", "spare.weight")
    nobody = arguments("nobody", spare_on=[])
    for world_size in (2, 3):
        first_rank, last_rank = arguments("first-rank", spare_on=[0]), arguments("last-rank", spare_on=[world_size - 1])
        for way in (searching, searching | VIEW):
            yield from _train("DELAY-10", "", world_size, spare, (first_rank, nobody, last_rank), way)
    yield from _train("DELAY-10", "", 2, spare, nobody, STATIC)
    yield from _train("DELAY-10", "frozen", (2, 3), _LAST, frozen=["last.bias"])
