"""Scenarios of chapter telemetry: a wrapper's logging data, and torch.distributed's debug levels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conformance.chapters.in_chapter import in_chapter
from conformance.scenario import Scenario

_of_chapter = in_chapter("telemetry")

_VIEW: dict[str, Any] = {"gradient_as_bucket_view": True}
_FIND: dict[str, Any] = {"find_unused_parameters": True}
_STATIC: dict[str, Any] = {"static_graph": True}
_EACH_ALONE: dict[str, Any] = {"bucket_cap_mb": 0.000001}
_NEEDS = ("logging_data",)


def _data(
    requirement: str, slug: str, world_size: int, aspect: str, *, options: dict[str, Any] | None = None,
    needs: tuple[str, ...] = (), **arguments: Any,
) -> Scenario:  # fmt: skip
    return _of_chapter(
        requirement, slug, "logging_data", world_size, options=options or {}, needs=(*_NEEDS, *needs),
        arguments={"aspect": aspect, **arguments}, deadline_s=8.0,
    )  # fmt: skip


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _facts()
    yield from _times()
    yield from _levels()


def _facts() -> Iterator[Scenario]:
    for world_size in (1, 2, 3):
        yield _data("TELE-01", "named", world_size, "constructed")
        yield _data("TELE-02", "form", world_size, "form")
    for slug, options in (
        ("default", {}), ("view", _VIEW), ("unused", _FIND), ("static", _STATIC), ("small", {"bucket_cap_mb": 0.5}),
        ("no-buffers", {"forward_sync_buffers": False}), ("cap", {"bucket_cap_mb": 50}),
        ("all", {**_VIEW, **_FIND, "bucket_cap_mb": 2}),
    ):  # fmt: skip
        yield _data("TELE-03", slug, 2, "options", options=options)
    for slug, options in (
        ("one", {}), ("each-alone", _EACH_ALONE), ("some", {"bucket_cap_mb": 0.00003}), ("view", _VIEW),
        ("static", {**_STATIC, **_EACH_ALONE}), ("view-each-alone", {**_VIEW, **_EACH_ALONE}),
    ):  # fmt: skip
        for world_size in (2, 3):
            yield _data("TELE-04", slug, world_size, "buckets", options=options)
    for world_size in (2, 3):
        yield _data("TELE-12", "named-hook", world_size, "hook", needs=("comm_hook",))
        yield _data("TELE-13", "uneven", world_size, "join", needs=("join",))
        yield _data("TELE-14", "unfinished", world_size, "error")
        yield _data("TELE-15", "environment", world_size, "environment")
        for slug, uses in (
            ("constant", ["a b"] * 3), ("all", ["a b c d"] * 3), ("changing", ["a b c d", "a", "b c"]),
            ("once", ["a", "a", "a b", "a"]),
        ):  # fmt: skip
            for suffix, options in (("", _FIND), ("-view", {**_FIND, **_VIEW})):
                if world_size == 2 or not suffix:
                    unused = _data("TELE-10", f"{slug}{suffix}", world_size, "unused", options=options, uses=uses)
                    yield unused.replace(requirements=("TELE-10", "TELE-11"))


def _times() -> Iterator[Scenario]:
    for slug, work in (
        ("forward", {"forward": 5, "backward": 0}), ("backward", {"forward": 0, "backward": 5}),
        ("both", {"forward": 2, "backward": 2}), ("idle", {"forward": 0, "backward": 0}),
    ):  # fmt: skip
        for suffix, options in (("", {}), ("-each-alone", _EACH_ALONE)):
            for world_size in (1, 2) if not options else (2,):
                measured = _of_chapter(
                    "TELE-05", f"{slug}{suffix}", "logged_times", world_size, options=options, arguments=work,
                    needs=_NEEDS,
                )  # fmt: skip
                yield measured.replace(requirements=("TELE-05", "TELE-07"))
    for suffix, options in (("", {}), ("-each-alone", _EACH_ALONE)):
        for world_size in (1, 2):
            yield _of_chapter(
                "TELE-06", f"pause{suffix}", "logged_times", world_size, options=options,
                arguments={"forward": 1, "backward": 1, "pause_ms": 50}, needs=_NEEDS,
            )  # fmt: skip
    for rate in (0, 1, 3, 7):
        yield _of_chapter("TELE-08", f"rate-{rate}", "sampled_times", 2, arguments={"rate": rate}, needs=_NEEDS)
    yield _of_chapter("TELE-09", "refused", "refused_sample_rate", 2, needs=_NEEDS)


def _levels() -> Iterator[Scenario]:
    for level in ("INFO", "DETAIL"):
        for slug, options in (("", {}), ("-view", _VIEW), ("-static", _STATIC), ("-each-alone", _EACH_ALONE)):
            yield _of_chapter(
                "TELE-16", f"{level.lower()}{slug}", "debug_level", 2, options=options, arguments={"level": level}
            )
        yield _of_chapter("TELE-16", level.lower(), "debug_level", 1, arguments={"level": level})
        yield _of_chapter("TELE-16", level.lower(), "debug_level", 3, arguments={"level": level})
        yield _of_chapter(
            "TELE-16", f"{level.lower()}-by-environment", "debug_level", 2,
            arguments={"level": level, "by_environment": True},
        )  # fmt: skip
        yield _of_chapter(
            "TELE-16", f"{level.lower()}-unused", "debug_level", 2, options=_FIND,
            arguments={"level": level, "spare_by_rank": True}, needs=("find_unused_parameters",),
        )  # fmt: skip
        for world_size in (1, 2):
            yield _of_chapter(
                "TELE-16", f"{level.lower()}-own-group", "debug_level", world_size, min_collectives=0,
                arguments={"level": level, "own_group": True},
            )  # fmt: skip
        for world_size in (2, 3):
            yield _of_chapter(
                "TELE-17", f"{level.lower()}", "debugged_mistake", world_size, arguments={"level": level},
                deadline_s=8.0,
            )  # fmt: skip
        yield _of_chapter(
            "TELE-17", f"{level.lower()}-by-environment", "debugged_mistake", 2,
            arguments={"level": level, "by_environment": True}, deadline_s=8.0,
        )  # fmt: skip
    for level in ("OFF", "INFO", "DETAIL"):
        for world_size in (1, 2):
            yield _of_chapter(
                "TELE-18", level.lower(), "debugged_milestones", world_size, arguments={"level": level}
            )  # fmt: skip
