"""Scenarios of chapter membership: ranks leave and join, and a wrapper continues after a failure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conformance.chapters.in_chapter import in_chapter
from conformance.chapters.membership.failing_peers import WAYS_ON
from conformance.scenario import Scenario

_of_chapter = in_chapter("membership")

_VIEW: dict[str, Any] = {"gradient_as_bucket_view": True}
_FIND: dict[str, Any] = {"find_unused_parameters": True}
_STATIC: dict[str, Any] = {"static_graph": True}
_EACH_ALONE: dict[str, Any] = {"bucket_cap_mb": 0.000001}
_VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("", {}), ("-view", _VIEW), ("-each-alone", _EACH_ALONE), ("-unused", _FIND), ("-static", _STATIC),
)  # fmt: skip
_NEEDS = ("update_process_group",)

_STEPS = ["step", "step", "step"]


def _scenario(
    requirement: str, slug: str, world_size: int, *phases: tuple[list[int], list[str]],
    options: dict[str, Any] | None = None, **arguments: Any,
) -> Scenario:  # fmt: skip
    """Return a course of the given phases, each its members and its steps."""
    blown = any("bomb" in step for _, steps in phases for step in steps)
    needs = (*_NEEDS, *(("comm_hook",) if arguments.get("hook") else ()))
    return _of_chapter(
        requirement, slug, "membership_after_exception" if blown else "membership", world_size,
        options=options or {}, needs=needs, deadline_s=8.0,
        arguments={"phases": [[members, steps] for members, steps in phases], **arguments},
    )  # fmt: skip


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _shrink_and_grow()
    yield from _last_forwards()
    yield from _accidents()
    yield from _accumulation()
    yield from _hooks()
    yield from _peers()


def _shrink_and_grow() -> Iterator[Scenario]:
    for world_size in (2, 3, 4):
        everybody, fewer = list(range(world_size)), list(range(world_size - 1))
        for suffix, options in _VARIANTS:
            if world_size == 4 and options:
                continue
            shrunk = _scenario(
                "MEMBER-01", f"last-leaves{suffix}", world_size, (everybody, _STEPS), (fewer, _STEPS), options=options
            )
            yield shrunk.replace(requirements=("MEMBER-01", "MEMBER-03", *(("MEMBER-07",) if options else ())))
            returned = _scenario(
                "MEMBER-02", f"last-returns{suffix}", world_size,
                (everybody, _STEPS), (fewer, _STEPS[:2]), (everybody, _STEPS), options=options,
            )  # fmt: skip
            yield returned.replace(requirements=("MEMBER-02", "MEMBER-03", *(("MEMBER-07",) if options else ())))
            yield _scenario(
                "MEMBER-02", f"newcomer{suffix}", world_size, (fewer, _STEPS), (everybody, _STEPS), options=options
            )
        yield _scenario("MEMBER-01", "first-leaves", world_size, (everybody, _STEPS), (everybody[1:], _STEPS))
        yield _scenario("MEMBER-01", "at-once", world_size, (fewer, _STEPS))
        yield _scenario("MEMBER-03", "same-group", world_size, (everybody, _STEPS), (everybody, _STEPS))
        yield _scenario(
            "MEMBER-05", "first-leaves", world_size, (everybody, _STEPS), (everybody[1:], _STEPS), buffer=True
        )
        yield _scenario(
            "MEMBER-05", "last-returns", world_size, (everybody, _STEPS[:2]), (fewer, _STEPS[:2]),
            (everybody, _STEPS[:2]), buffer=True,
        )  # fmt: skip
        yield _scenario(
            "MEMBER-07", "hook", world_size, (everybody, _STEPS), (fewer, _STEPS), (everybody, _STEPS), hook=True
        )
        for suffix, options in (("", {}), ("-each-alone", _EACH_ALONE)):
            yield _scenario(
                "MEMBER-08", f"outsider{suffix}", world_size, (everybody, _STEPS), (fewer, _STEPS),
                (everybody, _STEPS), options=options, outsiders=True,
            )  # fmt: skip
    yield _scenario(
        "MEMBER-02", "one-by-one", 3, ([1], _STEPS[:2]), ([0, 1], _STEPS[:2]), ([0, 1, 2], _STEPS),
        options=_EACH_ALONE,
    )  # fmt: skip


def _last_forwards() -> Iterator[Scenario]:
    """Ranks train alone and meet when their last forwards were of different kinds, or one has run none yet."""
    ends: dict[str, list[str]] = {
        "local": ["step", "local"], "evaluate": ["step", "evaluate"], "step": ["step"], "none": [],
    }  # fmt: skip
    for kinds in (("local", "step"), ("step", "local"), ("evaluate", "none"), ("none", "local"), tuple(ends)):
        alone = [([rank], ends[kind]) for rank, kind in enumerate(kinds) if kind != "none"]
        everybody = list(range(len(kinds)))
        yield _scenario(
            "MEMBER-02", f"after-{'-'.join(kinds)}", len(kinds), *alone, (everybody, _STEPS[:2]), buffer=True
        )


def _accidents() -> Iterator[Scenario]:
    for world_size in (2, 3):
        everybody, fewer = list(range(world_size)), list(range(world_size - 1))
        for suffix, options in _VARIANTS:
            late = {"late": True} if options == _EACH_ALONE else {}  # the others have one bucket, never full by then
            for slug, before in (("first-step", ["bomb"]), ("later", ["step", "step", "bomb"])):
                if world_size == 2 or not options:
                    yield _scenario(
                        "MEMBER-04", f"{slug}{suffix}", world_size, (everybody, before), (everybody, _STEPS),
                        options=options, **late,
                    )  # fmt: skip
            yield _scenario(
                "MEMBER-04", f"shrink{suffix}", world_size, (everybody, ["step", "step", "bomb"]), (fewer, _STEPS),
                options=options, **late,
            )  # fmt: skip
            if world_size == 2:
                yield _scenario(
                    "MEMBER-09", f"forgotten{suffix}", 2, (everybody, ["step", "step", "forward"]),
                    (everybody, _STEPS), options=options,
                )  # fmt: skip
        yield _scenario("MEMBER-04", "hook", world_size, (everybody, ["step", "bomb"]), (everybody, _STEPS), hook=True)
        yield _scenario(
            "MEMBER-04", "twice", world_size, (everybody, ["step", "bomb"]), (everybody, ["bomb"]), (everybody, _STEPS)
        )
        yield _scenario("MEMBER-09", "forgotten-at-first", world_size, (everybody, ["forward"]), (everybody, _STEPS))


def _accumulation() -> Iterator[Scenario]:
    for world_size in (2, 3):
        everybody, fewer = list(range(world_size)), list(range(world_size - 1))
        for suffix, options in (("", {}), ("-view", _VIEW), ("-each-alone", _EACH_ALONE)):
            yield _scenario(
                "MEMBER-06", f"kept{suffix}", world_size, (everybody, ["step", "step", "local"]), (fewer, _STEPS),
                options=options,
            )  # fmt: skip
        yield _scenario(
            "MEMBER-06", "used-only-before", world_size, (everybody, ["step", "step:-", "local:b"]),
            (fewer, ["step:-", "step:-"]), options=_FIND,
        )  # fmt: skip


def _hooks() -> Iterator[Scenario]:
    for suffix, options in _VARIANTS:
        for world_size in (2, 3):
            if world_size == 2 or not options:
                uses = ["b", "b", "b"] if options == _STATIC else ["b", "-", "b"]
                for slug, first in (("later", True), ("at-once", False)):
                    yield _of_chapter(
                        "MEMBER-10", f"{slug}{suffix}", "removed_hooks", world_size, options=options,
                        arguments={"uses": uses, "first": first}, deadline_s=8.0, needs=_NEEDS,
                    )  # fmt: skip
    for world_size in (2, 3):
        for accident in ("incomplete", "bomb"):
            for suffix, options in _VARIANTS[:3]:
                if world_size == 2 or not options:
                    asked = _of_chapter(
                        "MEMBER-12", f"{accident}{suffix}", "finalized_reducer", world_size, options=options,
                        arguments={"accident": accident}, deadline_s=8.0, needs=_NEEDS,
                    )  # fmt: skip
                    yield asked.replace(requirements=("MEMBER-11", "MEMBER-12"))
    yield _of_chapter("MEMBER-13", "no-group", "foreign_group", 2, needs=_NEEDS)


def _peers() -> Iterator[Scenario]:
    for place in ("construction", "forward", "backward", "comm_hook"):
        for world_size in (2, 3):
            for suffix, options in (("", {}), ("-unused", _FIND)):
                if world_size == 2 or not options:
                    yield _failing("MEMBER-14", f"{place}{suffix}", world_size, place, options)
    for suffix, options in _VARIANTS:
        yield _failing("MEMBER-15", f"skipped{suffix}", 2, "skipped", options)
        yield _failing("MEMBER-15", f"no-store{suffix}", 2, "backward", options, no_store=True)
    for suffix, options in (("", {}), ("-view", _VIEW), ("-each-alone", _EACH_ALONE)):
        for world_size in (2, 3):
            yield _failing("MEMBER-16", f"branches{suffix}", world_size, "branches", options)
    skipping = ("-skipping", {**_FIND, "skip_all_reduce_unused_params": True})
    # With that option ranks agree before the first bucket leaves: who has a gradient waits for the others in backward.
    for behind, variants in (("none", (*_VARIANTS, skipping)), ("some", _VARIANTS)):
        for suffix, options in variants:
            for world_size in (2, 3):
                needs = ("skip_all_reduce_unused_params",) if suffix == "-skipping" else ()
                yield _of_chapter(
                    "MEMBER-18", f"{behind}{suffix}", "prompt_exception", world_size, options=options,
                    arguments={"behind": behind}, deadline_s=8.0, needs=needs,
                )  # fmt: skip
    for way in WAYS_ON:
        for world_size in (2, 3):
            yield _of_chapter(
                "MEMBER-17", way.replace("_", "-"), "ways_on", world_size, arguments={"way": way}, deadline_s=15.0,
                needs=("no_sync",) if way == "no_sync" else ("join",) if "join" in way else (),
            )  # fmt: skip


def _failing(
    requirement: str, slug: str, world_size: int, place: str, options: dict[str, Any], **arguments: Any
) -> Scenario:
    needs = ("comm_hook",) if place == "comm_hook" else ()
    return _of_chapter(
        requirement, slug.replace("_", "-"), "failing_peer", world_size, options=options, needs=needs,
        arguments={"place": place, **arguments}, deadline_s=15.0,
    )  # fmt: skip
