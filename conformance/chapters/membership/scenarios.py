"""Scenarios of chapter membership: ranks leave and join, and a wrapper continues after a failure."""

from collections.abc import Iterator
from typing import Any

from conformance.chapters.grid import Axis, Grid
from conformance.chapters.membership.failing_peers import WAYS_ON
from conformance.chapters.variants import (
    ENDS_SOON,
    PLAIN,
    SCALARS_ALONE,
    SKIPPING,
    STATIC,
    UNUSED,
    VIEW,
    Variant,
    arguments,
    each,
    fields,
)
from conformance.scenario import Scenario

_updated = Grid("membership", ENDS_SOON | Variant(needs=("update_process_group",)))
_grid = Grid("membership")


_VARIANTS = (PLAIN, VIEW, SCALARS_ALONE, UNUSED, STATIC)
_HOOK = Variant("hook", arguments={"hook": True}, needs=("comm_hook",))
_BUFFER = arguments(buffer=True)

#: Members, and what each of them does.
Phase = tuple[list[int], list[str]]
_STEPS = ["step", "step", "step"]


def _course(
    requirement: str, slug: str, world_size: int, phases: list[Phase], *axes: Axis, **rest: Any
) -> Iterator[Scenario]:
    blown = any("bomb" in step for _, steps in phases for step in steps)
    program = "membership_after_exception" if blown else "membership"
    in_turn = arguments(phases=[[members, steps] for members, steps in phases])
    yield from _updated(requirement, slug, program, world_size, *axes, in_turn, **rest)


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _shrink_and_grow()
    yield from _last_forwards()
    yield from _accidents()
    for world_size in (2, 3):
        all_ranks, fewer = list(range(world_size)), list(range(world_size - 1))
        kept: list[Phase] = [(all_ranks, ["step", "step", "local"]), (fewer, _STEPS)]
        yield from _course("MEMBER-06", "kept", world_size, kept, (PLAIN, VIEW, SCALARS_ALONE))
        before: list[Phase] = [(all_ranks, ["step", "step:-", "local:b"]), (fewer, ["step:-", "step:-"])]
        yield from _course("MEMBER-06", "used-only-before", world_size, before, UNUSED.named(""))
    yield from _hooks()
    yield from _peers()


def _shrink_and_grow() -> Iterator[Scenario]:
    for world_size in (2, 3, 4):
        all_ranks, fewer = list(range(world_size)), list(range(world_size - 1))
        shrinking: list[Phase] = [(all_ranks, _STEPS), (fewer, _STEPS)]
        first_leaves: list[Phase] = [(all_ranks, _STEPS), (all_ranks[1:], _STEPS)]
        returning: list[Phase] = [(all_ranks, _STEPS), (fewer, _STEPS), (all_ranks, _STEPS)]
        for way in _VARIANTS if world_size < 4 else (PLAIN,):
            also = ("MEMBER-03",) if way is PLAIN else ("MEMBER-03", "MEMBER-07")
            yield from _course("MEMBER-01", "last-leaves", world_size, shrinking, way, also=also)
            soon: list[Phase] = [(all_ranks, _STEPS), (fewer, _STEPS[:2]), (all_ranks, _STEPS)]
            yield from _course("MEMBER-02", "last-returns", world_size, soon, way, also=also)
            yield from _course("MEMBER-02", "newcomer", world_size, [(fewer, _STEPS), (all_ranks, _STEPS)], way)
        yield from _course("MEMBER-01", "first-leaves", world_size, first_leaves)
        yield from _course("MEMBER-01", "at-once", world_size, [(fewer, _STEPS)])
        yield from _course("MEMBER-03", "same-group", world_size, [(all_ranks, _STEPS), (all_ranks, _STEPS)])
        yield from _course("MEMBER-05", "first-leaves", world_size, first_leaves, _BUFFER)
        short = [(members, _STEPS[:2]) for members in (all_ranks, fewer, all_ranks)]
        yield from _course("MEMBER-05", "last-returns", world_size, short, _BUFFER)
        yield from _course("MEMBER-07", "", world_size, returning, _HOOK)
        outsiders = arguments("outsider", outsiders=True)
        yield from _course("MEMBER-08", "", world_size, returning, outsiders, (PLAIN, SCALARS_ALONE))
    growing: list[Phase] = [([1], _STEPS[:2]), ([0, 1], _STEPS[:2]), ([0, 1, 2], _STEPS)]
    yield from _course("MEMBER-02", "one-by-one", 3, growing, SCALARS_ALONE.named(""))


def _last_forwards() -> Iterator[Scenario]:
    """Ranks train alone and meet when their last forwards were of different kinds, or one has run none yet."""
    ends = {"local": ["step", "local"], "evaluate": ["step", "evaluate"], "step": ["step"], "none": []}
    for kinds in (("local", "step"), ("step", "local"), ("evaluate", "none"), ("none", "local"), tuple(ends)):
        alone = [([rank], ends[kind]) for rank, kind in enumerate(kinds) if kind != "none"]
        together = (list(range(len(kinds))), _STEPS[:2])
        yield from _course("MEMBER-02", f"after-{'-'.join(kinds)}", len(kinds), [*alone, together], _BUFFER)


def _accidents() -> Iterator[Scenario]:
    for world_size in (2, 3):
        all_ranks, fewer = list(range(world_size)), list(range(world_size - 1))
        again: Phase = (all_ranks, _STEPS)
        bombed: Phase = (all_ranks, ["step", "step", "bomb"])
        for way in _VARIANTS:
            # With other options there is one bucket, never full by then.
            late = way | arguments(late=True) if way is SCALARS_ALONE else way
            if world_size == 2 or way is PLAIN:
                yield from _course("MEMBER-04", "first-step", world_size, [(all_ranks, ["bomb"]), again], late)
                yield from _course("MEMBER-04", "later", world_size, [bombed, again], late)
            yield from _course("MEMBER-04", "shrink", world_size, [bombed, (fewer, _STEPS)], late)
            if world_size == 2:
                yield from _course("MEMBER-09", "forgotten", 2, [(all_ranks, ["step", "step", "forward"]), again], way)
        once: Phase = (all_ranks, ["step", "bomb"])
        yield from _course("MEMBER-04", "", world_size, [once, again], _HOOK)
        yield from _course("MEMBER-04", "local", world_size, [once, (all_ranks, ["local", "step", "step"])])
        yield from _course("MEMBER-04", "twice", world_size, [once, (all_ranks, ["bomb"]), again])
        yield from _course("MEMBER-09", "forgotten-at-first", world_size, [(all_ranks, ["forward"]), again])


def _hooks() -> Iterator[Scenario]:
    for way in _VARIANTS:
        uses = arguments(uses=["b", "b", "b"] if way is STATIC else ["b", "-", "b"])
        for world_size in (2, 3) if way is PLAIN else (2,):
            moments = (arguments("later", first=True), arguments("at-once", first=False))
            yield from _updated("MEMBER-10", "", "removed_hooks", world_size, moments, way, uses)
    for world_size in (2, 3):
        ways = (PLAIN, VIEW, SCALARS_ALONE) if world_size == 2 else PLAIN
        accidents = each("accident", ("incomplete", "bomb"))
        shown = ("MEMBER-11", "MEMBER-12")
        yield from _updated("MEMBER-12", "", "finalized_reducer", world_size, accidents, ways, requirements=shown)
    yield from _grid("MEMBER-13", "no-group", "foreign_group", 2, needs=("update_process_group",))


def _peers() -> Iterator[Scenario]:
    waiting = fields(deadline_s=15.0)
    hook = Variant("comm-hook", arguments={"place": "comm_hook"}, needs=("comm_hook",))
    for place in (*each("place", ("construction", "forward", "backward")), hook):
        for world_size, ways in ((2, (PLAIN, UNUSED)), (3, (PLAIN,))):
            yield from _grid("MEMBER-14", "", "failing_peer", world_size, place, ways, waiting)
    clocks = arguments("clock-behind", place="backward", hours=-1), arguments("clock-ahead", place="backward", hours=1)
    beside = arguments("beside", place="middle", beside=True)
    yield from _grid("MEMBER-14", "", "failing_peer", 2, (*clocks, beside), waiting)
    late = arguments("input", place="input"), arguments("joined", place="input", joined=True) | Variant(needs=("join",))
    yield from _grid("MEMBER-14", "", "failing_peer", (2, 3), late, waiting)
    silent = (arguments("skipped", place="skipped"), arguments("no-store", place="backward", no_store=True))
    for way in _VARIANTS:
        yield from _grid("MEMBER-15", "", "failing_peer", 2, silent, way, waiting)
    pending = Variant("pending", arguments={"place": "pending_hook"}, needs=("comm_hook",))
    yield from _grid("MEMBER-19", "", "failing_peer", 2, pending, (PLAIN, VIEW, UNUSED), waiting)
    branches = each("place", ["branches"])
    yield from _grid("MEMBER-16", "", "failing_peer", (2, 3), branches, (PLAIN, VIEW, SCALARS_ALONE), waiting)
    nobody, some = each("behind", ("none", "some"))
    # With that option ranks agree before the first bucket leaves: who has a gradient waits for the others in backward.
    skipping = SKIPPING | UNUSED.named("") | Variant(needs=("skip_all_reduce_unused_params",))
    yield from _grid("MEMBER-18", "", "prompt_exception", (2, 3), nobody, (*_VARIANTS, skipping), ENDS_SOON)
    yield from _grid("MEMBER-18", "", "prompt_exception", (2, 3), some, _VARIANTS, ENDS_SOON)
    for way_on in WAYS_ON:
        needs = ("no_sync",) if way_on == "no_sync" else ("join",) if "join" in way_on else ()
        yield from _grid("MEMBER-17", "", "ways_on", (2, 3), each("way", [way_on]), waiting, needs=needs)
