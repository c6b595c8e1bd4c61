"""Scenarios of chapter scale: what holds for few, small and short holds for many, large and long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conformance.chapters.in_chapter import in_chapter
from conformance.scenario import Scenario

_scenario = in_chapter("scale")

#: Beside powers of two, where counters and masks overflow; the first is what a quick run takes.
COUNTS = (257, 63, 64, 65, 129, 600)
#: In float32: just below, at and above 64 KiB and 1 MiB.
EDGES = [[1, length + more] for length in (2**14, 2**18) for more in (-1, 0, 1)]
#: Dtypes in which gloo and NCCL reduce nothing.
SELDOM = ("int16", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")

_VIEW: dict[str, Any] = {"gradient_as_bucket_view": True}
_FIND: dict[str, Any] = {"find_unused_parameters": True}
_ALONE: dict[str, Any] = {"bucket_cap_mb": 0.000001}


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _counts()
    yield from _sizes()
    yield from _lengths()
    yield from _magnitudes()
    yield from _states()


def _training(
    requirement: str, slug: str, world_size: int, options: dict[str, Any], parameters: list[list[int]], *,
    steps: int = 3, **arguments: Any,
) -> Scenario:  # fmt: skip
    return _scenario(
        requirement, slug, "training_at_scale", world_size, options=options,
        arguments={"parameters": parameters, "steps": steps, **arguments},
    )  # fmt: skip


def _counts() -> Iterator[Scenario]:
    for count in COUNTS:
        for suffix, options in (("", {}), ("-view", _VIEW)):
            pairs = [[count, 2]]
            yield _training("SCALE-01", f"{count}{suffix}", 2, options, pairs)
            yield _training("SCALE-02", f"{count}{suffix}", 2, {**_FIND, **options}, pairs, idle=True)
            yield _training("SCALE-03", f"{count}{suffix}", 2, {**_ALONE, **options}, pairs)
    for requirement, slug, options, idle in (
        ("SCALE-01", "257", {}, False), ("SCALE-02", "257", _FIND, True), ("SCALE-03", "257", _ALONE, False),
        ("SCALE-03", "257-unused", {**_ALONE, **_FIND}, True),
        ("SCALE-03", "257-static", {**_ALONE, "static_graph": True}, False),
    ):  # fmt: skip
        yield _training(requirement, slug, 3, options, [[257, 2]], **({"idle": True} if idle else {}))


def _sizes() -> Iterator[Scenario]:
    for suffix, options in (("", {}), ("-view", _VIEW), ("-each-alone", _ALONE), ("-unused", _FIND)):
        yield _training("SCALE-04", f"edges{suffix}", 2, options, EDGES, steps=2)
    for suffix, options in (("", {}), ("-view", _VIEW)):
        yield _training("SCALE-04", f"one-of-27-mib{suffix}", 2, options, [[1, 7_000_000]], steps=2)
        yield _training("SCALE-04", f"several-of-36-mib{suffix}", 2, options, [[30, 314_159]], steps=3)


def _lengths() -> Iterator[Scenario]:
    pairs = [[2, 3], [1, 1]]
    for suffix, options in (
        ("", {}), ("-view", _VIEW), ("-unused", _FIND), ("-each-alone", _ALONE), ("-static", {"static_graph": True}),
    ):  # fmt: skip
        yield _training("SCALE-05", f"260-steps{suffix}", 2, options, pairs, steps=260)
    yield _training("SCALE-05", "1100-steps", 2, {}, pairs, steps=1100)
    yield _state("SCALE-05", "260-forwards", 2, buffers=[[3, 2]], steps=260)


def _magnitudes() -> Iterator[Scenario]:
    pairs = [[1, 1000], [3, 1], [2, 257], [1, 3000], [1, 1]]
    for dtype in ("float32", "float64", "float16", "bfloat16", "complex64", "complex128"):
        for suffix, options in (("", {}), ("-view", _VIEW), ("-each-alone", _ALONE), ("-unused", _FIND)):
            yield _training("SCALE-06", f"{dtype}{suffix}", 2, options, pairs, arbitrary=dtype)
        yield _training("SCALE-06", dtype, 4, {}, pairs, arbitrary=dtype)


def _state(requirement: str, slug: str, world_size: int, **arguments: Any) -> Scenario:
    return _scenario(requirement, slug, "state_at_scale", world_size, arguments=arguments)


def _states() -> Iterator[Scenario]:
    for slug, world_size, tensors in (
        ("many-and-large", 2, [[65, 5], [11, 2**18 + 1]]), ("17", 2, [[17, 5]]), ("300", 2, [[300, 5]]),
        ("65", 3, [[65, 5]]), ("edges", 2, [[11, 2**14 - 1], [11, 2**14 + 1], [11, 2**18], [11, 300_007]]),
    ):  # fmt: skip
        yield _state("SCALE-07", slug, world_size, buffers=tensors, steps=3)
        yield _state("SCALE-08", slug, world_size, parameters=tensors, buffers=tensors, steps=0)
    # More than 250 MiB, which is what torch's DDP sends at once. A rank is in one phase for seconds.
    chunks: dict[str, Any] = {"buffers": [[5, 14_000_000]], "dtypes": ["float32"]}
    for requirement, steps in (("SCALE-07", 2), ("SCALE-08", 0)):
        long = _state(requirement, "more-than-a-broadcast", 2, steps=steps, **chunks)
        yield long.replace(deadline_s=60.0)
    for world_size in (2, 3):
        seldom: dict[str, Any] = {"buffers": [[len(SELDOM), 1], [len(SELDOM), 33]], "dtypes": list(SELDOM)}
        yield _state("SCALE-09", "forward", world_size, steps=3, **seldom)
        yield _state("SCALE-09", "construction", world_size, parameters=seldom["buffers"], steps=0, **seldom)
