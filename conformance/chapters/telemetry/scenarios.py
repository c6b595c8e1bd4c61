"""Scenarios of chapter telemetry: a wrapper's logging data, and torch.distributed's debug levels."""

from collections.abc import Iterator
from typing import Any

from conformance.chapters.grid import Axis, Grid, Worlds
from conformance.chapters.variants import (
    ENDS_SOON,
    LOCAL_BUFFERS,
    PLAIN,
    SCALARS_ALONE,
    STATIC,
    UNUSED,
    VIEW,
    Variant,
    arguments,
    capped,
)
from conformance.scenario import Scenario

_logging = Grid("telemetry", Variant(needs=("logging_data",)))
_grid = Grid("telemetry")


def _data(requirement: str, slug: str, worlds: Worlds, aspect: str, *axes: Axis, **rest: Any) -> Iterator[Scenario]:
    asked = arguments(aspect=aspect)
    yield from _logging(requirement, slug, "logging_data", worlds, ENDS_SOON, *axes, asked, **rest)


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _facts()
    yield from _times()
    yield from _levels()
    hooked = arguments("hooked", hooked=True) | Variant(needs=("comm_hook",))
    wide = arguments("wide", wide=True)
    ways = (PLAIN.at(1, 2, 3), VIEW, UNUSED, UNUSED | VIEW, hooked, wide, wide | VIEW)
    yield from _grid("TELE-21", "", "profiled_step", 2, ways)


def _facts() -> Iterator[Scenario]:
    for world_size in (1, 2, 3):
        yield from _data("TELE-01", "named", world_size, "constructed")
        yield from _data("TELE-02", "form", world_size, "form")
    small, large = capped("small", 0.5), capped("cap", 50)
    everything = (VIEW | UNUSED | capped("", 2)).named("all")
    ways = (PLAIN.named("default"), VIEW, UNUSED, STATIC, small, LOCAL_BUFFERS.named("no-buffers"), large, everything)
    yield from _data("TELE-03", "", 2, "options", ways)
    some = capped("some", 0.00003)
    static = (STATIC | SCALARS_ALONE).named("static")
    caps = (PLAIN.named("one"), SCALARS_ALONE, some, VIEW, static, VIEW | SCALARS_ALONE)
    yield from _data("TELE-04", "", (2, 3), "buckets", caps)
    uses = (
        arguments("constant", uses=["a b"] * 3),
        arguments("all", uses=["a b c d"] * 3),
        arguments("changing", uses=["a b c d", "a", "b c"]),
        arguments("once", uses=["a", "a", "a b", "a"]),
    )
    searching = UNUSED.named("")
    for world_size in (2, 3):
        yield from _data("TELE-12", "named-hook", world_size, "hook", needs=("comm_hook",))
        yield from _data("TELE-13", "uneven", world_size, "join", needs=("join",))
        yield from _data("TELE-14", "unfinished", world_size, "error")
        yield from _data("TELE-15", "environment", world_size, "environment")
        searched = (searching, searching | VIEW) if world_size == 2 else searching
        yield from _data("TELE-10", "", world_size, "unused", uses, searched, also=("TELE-11",))


def _times() -> Iterator[Scenario]:
    work = (
        arguments("forward", forward=5, backward=0),
        arguments("backward", forward=0, backward=5),
        arguments("both", forward=2, backward=2),
        arguments("idle", forward=0, backward=0),
    )
    ways = (PLAIN.at(1, 2), SCALARS_ALONE | Variant(arguments={"apart": True}))
    yield from _logging("TELE-05", "", "logged_times", 2, work, ways, also=("TELE-07",))
    pause = arguments("pause", forward=1, backward=1, pause_ms=50)
    yield from _logging("TELE-06", "", "logged_times", (1, 2), pause, (PLAIN, SCALARS_ALONE))
    rates = [arguments(f"rate-{rate}", rate=rate) for rate in (0, 1, 3, 7)]
    yield from _logging("TELE-08", "", "sampled_times", 2, rates, also=("TELE-07",))
    yield from _logging("TELE-09", "refused", "refused_sample_rate", 2)


def _levels() -> Iterator[Scenario]:
    info, detail, off = (arguments(level.lower(), level=level) for level in ("INFO", "DETAIL", "OFF"))
    by_environment = arguments("by-environment", by_environment=True)
    spare = UNUSED | Variant(arguments={"spare_by_rank": True}, needs=("find_unused_parameters",))
    for level in (info, detail):
        ways = (PLAIN, VIEW, STATIC, SCALARS_ALONE, PLAIN.at(1, 3), by_environment, spare)
        yield from _grid("TELE-16", "", "debug_level", 2, level, ways)
        yield from _grid("TELE-17", "", "debugged_mistake", 2, level, (PLAIN.at(2, 3), by_environment), ENDS_SOON)
    yield from _grid("TELE-18", "", "debugged_milestones", (1, 2), (off, info, detail))
    yield from _grid("TELE-19", "", "debugged_times", (1, 2), (off, detail))
    yield from _grid("TELE-20", "", "logged_milestones", 2)
