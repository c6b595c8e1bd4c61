"""Scenarios of chapter delayed_all_reduce: the DDP reduces some gradients only after a chosen one is ready."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conformance.chapters.in_chapter import in_chapter
from conformance.scenario import Scenario

_of_chapter = in_chapter("delayed_all_reduce")

_VIEW: dict[str, Any] = {"gradient_as_bucket_view": True}
_FIND: dict[str, Any] = {"find_unused_parameters": True}
_STATIC: dict[str, Any] = {"static_graph": True}
_EACH_ALONE: dict[str, Any] = {"bucket_cap_mb": 0.000001}
_VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (("", {}), ("-view", _VIEW), ("-each-alone", _EACH_ALONE))
_NEEDS = ("delay_all_reduce",)

#: The usual case: the last layer's gradients, which come first, wait until the first layer's is there.
_LAST = ["last.weight", "last.bias"]


def _scenario(
    requirement: str, slug: str, world_size: int, *, options: dict[str, Any] | None = None,
    trigger: str = "first.weight", **arguments: Any,
) -> Scenario:  # fmt: skip
    return _of_chapter(
        requirement, slug, "delayed_all_reduce", world_size, options=options or {}, needs=_NEEDS,
        arguments={"trigger": trigger, **arguments}, deadline_s=8.0,
    )  # fmt: skip


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _gradients()
    yield from _dtypes()
    yield from _uses()
    yield from _refusals()


def _gradients() -> Iterator[Scenario]:
    for suffix, options in _VARIANTS:
        for world_size in (1, 2, 3, 4) if not options else (2, 3):
            last = _scenario("DELAY-01", f"last{suffix}", world_size, options=options, delayed=_LAST)
            yield last.replace(requirements=("DELAY-01", "DELAY-02"))
    for slug, delayed in (
        ("weight", ["last.weight"]), ("root", ["offset"]), ("three", ["offset", "last.weight", "middle.bias"]),
    ):  # fmt: skip
        for world_size in (2, 3):
            yield _scenario("DELAY-03", slug, world_size, delayed=delayed)
            yield _scenario("DELAY-02", f"{slug}-each-alone", world_size, delayed=delayed, options=_EACH_ALONE)
    for suffix, options in _VARIANTS:
        for world_size in (2, 3):
            yield _scenario("DELAY-04", f"one-local{suffix}", world_size, delayed=_LAST, options=options, local=1)
        yield _scenario("DELAY-06", f"all{suffix}", 2, options=options)
        yield _scenario("DELAY-06", f"all-by-last{suffix}", 3, options=options, trigger="last.bias")
    for suffix, options in (*_VARIANTS, ("-unused", _FIND), ("-static", _STATIC)):
        for world_size in (2, 3) if not options else (2,):
            yield _scenario(
                "DELAY-12", f"middle{suffix}", world_size, delayed=_LAST, trigger="middle.weight",
                following="first.weight", options=options,
            )  # fmt: skip
            yield _scenario(
                "DELAY-12", f"same-layer{suffix}", world_size, delayed=["spare.weight"], trigger="last.weight",
                following="middle.weight", options=options,
            )  # fmt: skip
    yield _scenario("DELAY-04", "two-local", 2, delayed=_LAST, local=2)
    yield _scenario("DELAY-04", "all-local", 2, local=1)
    for world_size in (2, 3, 4):
        yield _scenario("DELAY-08", "last", world_size, delayed=_LAST, different_weights=True)
    yield _scenario("DELAY-08", "all", 2, different_weights=True)
    for zero_grad in ("zeros", "keep"):
        for suffix, options in _VARIANTS:
            yield _scenario("DELAY-11", f"{zero_grad}{suffix}", 2, delayed=_LAST, options=options, zero_grad=zero_grad)
    for slug, options in (
        ("static", _STATIC), ("static-each-alone", {**_STATIC, **_EACH_ALONE}), ("unused", _FIND),
        ("unused-view", {**_FIND, **_VIEW}), ("view-each-alone", {**_VIEW, **_EACH_ALONE}),
    ):  # fmt: skip
        for world_size in (2, 3):
            yield _scenario("DELAY-11", slug, world_size, delayed=_LAST, options=options)


def _dtypes() -> Iterator[Scenario]:
    for dtype in ("float64", "float16", "bfloat16", "complex64"):
        for world_size in (2, 3):
            yield _scenario("DELAY-05", dtype, world_size, delayed=_LAST, dtype=dtype)
        yield _scenario("DELAY-05", f"all-{dtype}", 2, dtype=dtype)
    for slug, delayed in (
        ("float64", ["last.weight"]), ("float32", ["first.bias"]), ("both", ["first.bias", "last.weight"]),
    ):  # fmt: skip
        for world_size in (2, 3):
            yield _scenario("DELAY-05", f"mixed-{slug}", world_size, delayed=delayed, module="two_dtypes")


def _uses() -> Iterator[Scenario]:
    for suffix, options in _VARIANTS:
        for slug, trigger in (("bias", "last.bias"), ("offset", "offset")):
            delayed = ["first.weight", "first.bias"]
            yield _scenario("DELAY-09", f"after-{slug}{suffix}", 2, delayed=delayed, trigger=trigger, options=options)
        yield _scenario(
            "DELAY-09", f"tied{suffix}", 2, module="tied", delayed=["first.weight"], trigger="last.weight",
            options=options,
        )  # fmt: skip
    for world_size in (2, 3):
        for suffix, options in (("", _FIND), ("-view", {**_FIND, **_VIEW})):
            for slug, users in (("first-rank", [0]), ("nobody", []), ("last-rank", [world_size - 1])):
                yield _scenario(
                    "DELAY-10", f"{slug}{suffix}", world_size, delayed=["spare.weight"], spare_on=users,
                    options=options,
                )  # fmt: skip
    yield _scenario("DELAY-10", "nobody-static", 2, delayed=["spare.weight"], spare_on=[], options=_STATIC)
    for world_size in (2, 3):
        yield _scenario("DELAY-10", "frozen", world_size, delayed=_LAST, frozen=["last.bias"])


def _refusals() -> Iterator[Scenario]:
    for case in ("trigger_alone", "names_alone", "stranger", "wrong_name", "strange_trigger", "frozen_trigger"):
        yield _of_chapter(
            "DELAY-07", case.replace("_", "-"), "delayed_all_reduce_refusal", 2, needs=_NEEDS,
            arguments={"case": case}, min_collectives=0,
        )  # fmt: skip
