"""Scenarios of chapter neighbours: wrappers beside wrappers, and beside what users communicate."""

from collections.abc import Iterator, Mapping
from typing import Any

from conformance.chapters.grid import Axis, Grid, Worlds
from conformance.chapters.neighbours.company import (
    BACKWARDS,
    GROUPS,
    LAYOUTS,
    LOCAL,
    ORDERS,
    SKIPPED,
    STAGGERED,
    UNUSED,
)
from conformance.chapters.neighbours.grid import Case, pairwise
from conformance.chapters.neighbours.kept_wrappers import KEPT
from conformance.chapters.neighbours.one_or_several import GROUPS as SHARING
from conformance.chapters.neighbours.order_of_layers import OF
from conformance.chapters.neighbours.order_of_layers import ORDERS as OWN_ORDERS
from conformance.chapters.neighbours.towers import DEPTH, PAIR_BYTES
from conformance.chapters.neighbours.unfrozen_parts import BACKWARDS as ENDS
from conformance.chapters.neighbours.unfrozen_parts import FIRST
from conformance.chapters.neighbours.user_collectives import IN_BACKWARD, OF_A_LAYER, PLACES
from conformance.chapters.neighbours.wrapped_parts import DIVISIONS
from conformance.chapters.variants import (
    ENDS_SOON,
    PLAIN,
    STATIC,
    VIEW,
    Variant,
    arguments,
    capped,
    dashed,
    each,
    options,
)
from conformance.chapters.variants import UNUSED as FIND
from conformance.composed.training import SIZES, Action, Beside, Block, Exchange, Training
from conformance.scenario import Scenario

_grid = Grid("neighbours", ENDS_SOON)

#: Every pair of layers is a bucket, or every two pairs are, or all are one.
_PAIR = capped("", PAIR_BYTES / 2**20)
_LAYER = capped("", 1 / 2**20)
_TWO_PAIRS = capped("two-pairs", 2 * PAIR_BYTES / 2**20)
_WHOLE = PLAIN.named("whole")
_BUCKETS = (_PAIR, _TWO_PAIRS, _WHOLE)
_PLAIN, _FIND, _STATIC = PLAIN.named("plain"), FIND.named("find"), STATIC
_WIDE = options("wide", mixed_precision={"param_dtype": "float64", "reduce_dtype": "float64"})
_SEARCHING = FIND.named("")
_FIND_UNUSED = "find_unused_parameters"
_KINDS = (_PLAIN, _FIND, VIEW | _SEARCHING, _STATIC, _STATIC | _FIND, _WIDE | _SEARCHING)
#: Layouts in which no wrapper feeds another.
_APART = each("layout", ("side_by_side", "separate", "shared"))
#: A rank, by turns, uses nothing of the first wrapper.
_IDLE = arguments("idle", unused="idle") | _PAIR | _SEARCHING
#: What wrappers in groups of their own leave unused, and the search that it needs.
_USED_OR_LATER = (arguments("none", unused="none"), arguments("later", unused="later") | _SEARCHING)


def _beside(requirement: str, slug: str, worlds: Worlds, *axes: Axis, **rest: Any) -> Iterator[Scenario]:
    """Yield scenarios of program `company`, which need what their options and arguments name."""
    for scenario in _grid(requirement, slug, "company", worlds, *axes, **rest):
        yield scenario.replace(needs=_needs(scenario.options, scenario.arguments))


def _needs(given: Mapping[str, Any], asked: Mapping[str, Any]) -> tuple[str, ...]:
    needs = {name for name, value in {**given, **(asked.get("others") or {})}.items() if value is True}
    needs |= {"no_sync"} if asked.get("local", "none") != "none" else set()
    needs |= {"comm_hook"} if asked.get("hook", "none") != "none" else set()
    needs |= {"optimizer_in_backward"} if asked.get("optimizer") == "in_backward" else set()
    needs |= {"mixed_precision"} if "mixed_precision" in given else set()
    return tuple(sorted(needs))


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _everything_used()
    yield from _unused_beside_wrappers()
    yield from _joined_later()
    yield from _unused_beside_collectives()
    groups = each("groups", ("parts", "overlapping"))
    layouts = each("layout", ("side_by_side", "separate", "chained", "three"))
    used, later = _USED_OR_LATER
    unused = (used, arguments("one-rank", unused="one_rank") | _SEARCHING, later)
    yield from _beside("NEIGH-08", "", (3, 4), _PAIR, groups, layouts, unused)
    yield from _local()
    yield from _features()
    yield from _begun_apart()
    yield from _local_of_another()
    yield from _views_returned()
    yield from _waiting()
    yield from _wrapped_parts()
    yield from _kept_wrappers()
    yield from _unfrozen_parts()
    yield from _orders_of_layers()
    yield from _one_or_several()
    yield from _crossed()


def _everything_used() -> Iterator[Scenario]:
    """Nothing unused: every DDP must be right beside every neighbour."""
    layouts = each("layout", LAYOUTS[1:])
    yield from _beside("NEIGH-01", "", (2, 3), _PAIR, layouts, (_PLAIN, _FIND, _STATIC))
    yield from _beside("NEIGH-01", "", 2, _PAIR, _APART, arguments("sealed", seals=0), (_PLAIN, _STATIC))
    as_a_bucket, otherwise = arguments(as_a_bucket=True).at(2), arguments(as_a_bucket=False).at(3)
    kinds = (_PLAIN | otherwise, _FIND | as_a_bucket, _STATIC | otherwise)
    yield from _beside("NEIGH-02", "", (), _PAIR, arguments(layout="alone"), each("collective", PLACES), kinds)


def _unused_beside_wrappers() -> Iterator[Scenario]:
    hides = (arguments(hides=False), arguments("hidden", hides=True))
    for layout in each("layout", LAYOUTS[1:]):
        requirement = "NEIGH-04" if layout.slug == "shared" else "NEIGH-03"
        for unused in each("unused", UNUSED[1:]):
            for bucket in (_PAIR, _TWO_PAIRS.at(3), _WHOLE):
                yield from _beside(requirement, "", 2, _SEARCHING, layout, unused, hides, bucket)
        yield from _beside(requirement, "", 2, layout, _IDLE)
    different = (
        arguments("plain-and-find", others=dict(FIND.options)),
        _SEARCHING | arguments("find-and-static", others={**STATIC.options, **FIND.options}),
        _SEARCHING | arguments("find-and-view", others={**FIND.options, **VIEW.options}),
    )
    layouts = each("layout", ("side_by_side", "chained", "shared"))
    for groups in each("groups", ("one", "own")):
        yield from _beside("NEIGH-05", "", 2, _PAIR, different, layouts, groups)
        searching, first = [way for way in different if way.options], arguments("first-tower", unused="first_tower")
        yield from _beside("NEIGH-05", "", 2, _PAIR, searching, layouts, groups, first)


def _joined_later() -> Iterator[Scenario]:
    """Yield wrappers made when another one has trained: beside it, or of a layer that the other one has, too."""
    joined, backwards = arguments(joins=2, num_steps=5), each("backward", ("once", "reversed"))
    for layout in ("side_by_side", "separate", "shared"):
        slug, worlds = f"{dashed(layout)}-joined", (2, 3) if layout == "shared" else (2,)
        requirement = "NEIGH-04" if layout == "shared" else "NEIGH-01"
        for kind in (_PLAIN, _FIND, _STATIC):
            unused = each("unused", ("none", "crosswise") if kind is _FIND else ("none",))
            given = arguments(layout=layout)
            yield from _beside(requirement, slug, worlds, given, joined, kind, unused, backwards)


def _unused_beside_collectives() -> Iterator[Scenario]:
    for place in PLACES:
        requirement = "NEIGH-06" if place in IN_BACKWARD else "NEIGH-07"
        beside = arguments(dashed(place), layout="alone", collective=place)
        for unused in UNUSED[1:]:
            for layer in (0, 1, 2) if place in IN_BACKWARD else (1,):
                if _skips_the_hooks(unused, place, layer):
                    continue
                at = arguments(f"layer{layer}", layer=layer, as_a_bucket=layer != 1, hides=layer == 2)
                buckets = (_PAIR, _TWO_PAIRS) if layer == 1 else _TWO_PAIRS
                yield from _beside(
                    requirement, "", 2 + layer % 2, _SEARCHING, beside, each("unused", [unused]), at, buckets
                )
        if place in IN_BACKWARD and place not in OF_A_LAYER:
            yield from _beside(requirement, "", (2, 3), beside, _IDLE)
    # What the user has hooked is the module's output on the ranks that use no layer behind it.
    for when in ("rank_0", "not_rank_0", "rank_0_later"):
        for size in SIZES:
            training = Training((Block(), Block(when=when)), exchange=Exchange("tensor_hook", size, 0)).to_json()
            slug = f"hooked-output-{dashed(when)}-{size}"
            yield from _grid("NEIGH-06", slug, "composed", (2, 3), _SEARCHING, arguments=training)


def _local_of_another() -> Iterator[Scenario]:
    """Local backwards of two wrappers with a layer in common, between a synchronised forward and its backward.

    In the local forward some ranks use nothing of the first wrapper: they learn from the second alone that it is local.
    """
    for idle in ("by_turns", "rank_0"):
        for how in ("whole", "exception", "nested"):
            actions = (Action("forward", "plain"), Action("no_sync", how), Action("backward", "together"))
            training = Training((Block(),), actions=actions, idle=idle, beside=Beside(shares=True)).to_json()
            slug = f"local-of-another-{dashed(idle)}-{how}"
            yield from _grid("NEIGH-13", slug, "composed", (2, 3), _SEARCHING, arguments=training, needs=("no_sync",))
    for how in ("grad", "stand_ins"):
        actions = (Action("forward", "plain"), Action("transform", how), Action("backward", "together"))
        blocks = (Block(when="rank_0_later"), Block())
        training = Training(blocks, actions=(Action("no_sync", "nested"), *actions), nested="ignored").to_json()
        slug = f"transformed-before-backward-{dashed(how)}"
        needs = ("ignored_parameters", "no_sync")
        yield from _grid("NEIGH-13", slug, "composed", (2, 3), _SEARCHING, arguments=training, needs=needs)


def _views_returned() -> Iterator[Scenario]:
    """Yield forwards that return views, which the backward reaches by another node than the marked one."""
    local = (Action("no_sync", "whole"), Action("forward", "plain"), Action("backward", "together"))
    for when in ("rank_0_later", "not_rank_0"):
        beside = Training((Block("complex", when=when),), actions=local, beside=Beside())
        within = Training((Block("complex", when=when), Block()), actions=local, nested="ignored")
        for kind, training in (("beside", beside), ("nested", within)):
            needs = ("no_sync", *(("ignored_parameters",) if training.nested else ()))
            slug = f"views-{kind}-{dashed(when)}"
            yield from _grid(
                "NEIGH-13", slug, "composed", (2, 3), _SEARCHING, arguments=training.to_json(), needs=needs
            )


def _waiting() -> Iterator[Scenario]:
    """Backwards of one wrapper while another waits for its own: on all ranks, or a local one on one rank alone."""
    waits = (arguments(waits="all"), arguments("dropped", waits="all", dropped=True))
    alone = arguments("dropped-by-one", waits="first", dropped=True)
    local = arguments("local", beside="local", runs="all")
    by_one = arguments("local-of-one", beside="local", runs="first")
    synchronised = arguments("synchronised", beside="synchronised", runs="all")
    others = (PLAIN, arguments("find", others=dict(FIND.options)), arguments("static", others=dict(STATIC.options)))
    kinds = (_PLAIN, _FIND, _STATIC)
    for beside in (local, by_one, synchronised):
        yield from _grid("NEIGH-15", "", "waiting_beside", (2, 3), kinds, beside, (*waits, alone), others)
    within = arguments("checkpointed", checkpointed=["beside"], waits="all")
    yield from _grid("NEIGH-15", "", "waiting_beside", (2, 3), (_FIND, _STATIC), local, within, others[1])
    both = arguments("static", others=dict(STATIC.options)) | arguments(waits="all", runs="all", beside="", joint=True)
    for name, which in (("one", ["beside"]), ("both", ["own", "beside"])):
        at = arguments(f"{name}-checkpointed", checkpointed=which)
        yield from _grid("NEIGH-04", "", "waiting_beside", (2, 3), _STATIC, both, at)


def _wrapped_parts() -> Iterator[Scenario]:
    """Yield wrappers within wrapped modules: one of the two, or both, keep gradients in their buckets."""
    view = dict(VIEW.options)
    for division, divided in DIVISIONS.items():
        asked = arguments(dashed(division), division=division)
        needed = Variant(needs=("ignored_parameters",) if divided.ignores else ())
        for way in (_PLAIN, _FIND, _STATIC):
            within, local = arguments(within={**view, **way.options}), arguments(within=dict(way.options))
            views = (VIEW.named("both") | within, within.named("within"), VIEW.named("around") | local)
            yield from _grid("NEIGH-16", "", "wrapped_parts", (2, 3), asked, needed, way, views)


def _skips_the_hooks(unused: str, place: str, layer: int) -> bool:
    """Whether some ranks skip the layer in whose hooks all are to communicate: no training can mean that."""
    return unused == "skipped" and place in OF_A_LAYER and layer == SKIPPED


def _local() -> Iterator[Scenario]:
    layouts = each("layout", LAYOUTS[1:])
    yield from _beside("NEIGH-09", "", 2, _PAIR, layouts, each("local", LOCAL[1:]), _USED_OR_LATER)
    in_turn = arguments("first-in-turn", local="first", in_turn=True, shares=f"branches.{DEPTH - 1}")
    seals = arguments(""), arguments("sealed", seals=1)
    yield from _beside("NEIGH-09", "", 2, _PAIR, _APART, in_turn, seals, _USED_OR_LATER)
    first_searches = arguments("first-searches", others={_FIND_UNUSED: False}, unused="first_tower") | _SEARCHING
    together = each("layout", ("side_by_side", "shared"))
    orders = arguments(""), arguments("by-rank", order="by_rank", num_steps=6)
    yield from _beside("NEIGH-09", "", 2, _PAIR, together, each("local", LOCAL[1:]), first_searches, orders)


def _features() -> Iterator[Scenario]:
    layouts, unused = each("layout", ("alone", "side_by_side", "chained")), each("unused", ("none", "later"))
    always = _PAIR | _SEARCHING
    hooks, summed = each("hook", ("ready", "talking")), arguments(collective="summed")
    yield from _beside("NEIGH-10", "", 2, always, hooks, layouts, unused, summed)
    optimizers, after = each("optimizer", ("ordinary", "zero", "in_backward")), arguments(collective="after_backward")
    yield from _beside("NEIGH-11", "", 2, always, optimizers, layouts, unused, after)


def _begun_apart() -> Iterator[Scenario]:
    """Backwards that reach the wrappers in another order on each rank, that one rank probes, or that run twice."""
    backwards = each("backward", BACKWARDS)
    always = _PAIR | _SEARCHING
    for order in each("order", ORDERS):
        layouts = each("layout", ("side_by_side", "shared") if order.slug != "alike" else ("side_by_side", "three"))
        unused = each("unused", ("later", "crosswise"))
        yield from _beside("NEIGH-13", "", (2, 3), always, order, backwards, layouts, unused)
        unlike = arguments("unlike", unlike=True)
        yield from _beside("NEIGH-13", "", 2, always, unlike, order, backwards, layouts, unused)
        local, either = each("local", ("first", "all")), arguments("either", backward="either", num_steps=6)
        yield from _beside("NEIGH-13", "", (2, 3), always, unlike, order, either, local, unused)
    staggered = arguments(collective=STAGGERED, unused="none")
    layouts = each("layout", ("alone", "side_by_side", "separate"))
    yield from _beside("NEIGH-14", "", (2, 3), _PAIR, staggered, layouts, (_PLAIN, _FIND, _STATIC))
    last_one_searches = arguments("plain-and-find", others=dict(FIND.options), unused="last_tower")
    beside = arguments(layout="side_by_side")
    yield from _beside("NEIGH-13", "", (2, 3), _PAIR, last_one_searches, beside, each("order", ORDERS), backwards)


def _kept_wrappers() -> Iterator[Scenario]:
    """Wrappers that one rank keeps and others drop."""
    kept = each("kept", KEPT)
    for way in (_SEARCHING, _PLAIN):
        for scenario in _grid("NEIGH-17", "", "kept_wrappers", (2, 3), kept, way):
            yield scenario.replace(needs=_needs(scenario.options, {}))


def _unfrozen_parts() -> Iterator[Scenario]:
    """Parts that are frozen when one wrapper is built, and are another one's."""
    first, backwards = each("first", FIRST), each("backward", ENDS)
    for way in (_PLAIN, _FIND, _STATIC, VIEW):
        for scenario in _grid("NEIGH-18", "", "unfrozen_parts", (2, 3), way, first, backwards):
            yield scenario.replace(needs=_needs(scenario.options, {}))


def _orders_of_layers() -> Iterator[Scenario]:
    """Layers and wrappers in an order that is perhaps the rank's own, with collectives between them."""
    for scenario in (*_orders_noticed(), *_orders_with_sums()):
        yield scenario.replace(needs=_needs(scenario.options, scenario.arguments))


def _orders_noticed() -> Iterator[Scenario]:
    of, orders = each("of", OF[:2]), each("order", OWN_ORDERS[:2])
    talks = {"of": OF[0], "order": OWN_ORDERS[0]}  # two of three ranks do
    talking = (
        arguments("talking", **talks, talks_from=0),
        arguments("talking-later", **talks, talks_from=1),
        arguments("talking-more", **talks, talks_from=0, beside=True),
    )
    # Backwards in their own orders would wait for each other.
    changed = arguments("backwards", of=OF[2], order=OWN_ORDERS[0])
    hooks = (arguments(""), arguments("hooked", hook="ready"))
    late, ways_of_hooks = arguments("late", of=OF[1], late=True), (arguments(""), arguments("written", hook="written"))
    for way in (_PLAIN, _FIND, VIEW):
        yield from _grid("NEIGH-19", "", "order_of_layers", (2, 3), of, orders, hooks, way, _LAYER)
        yield from _grid("NEIGH-19", "", "order_of_layers", (2, 3), changed, way)
        yield from _grid("NEIGH-19", "", "order_of_layers", (2, 3), late, orders, ways_of_hooks, way, _LAYER)
        yield from _grid("NEIGH-19", "", "order_of_layers", (2, 3), talking, way, _LAYER)
    later = arguments("wrappers-own-later", of=OF[1], order=OWN_ORDERS[2])
    yield from _grid("NEIGH-19", "", "order_of_layers", (2, 3), later, hooks, _FIND, _LAYER)


def _orders_with_sums() -> Iterator[Scenario]:
    """Yield orders of the ranks' own with collectives in between, as long as a bucket or longer."""
    always = arguments(of=OF[0], order=OWN_ORDERS[1])
    sizes = arguments("as-long", num_rows=3), arguments("longer", num_rows=5)
    ways = (_FIND, VIEW | _FIND, _STATIC, _STATIC | _FIND)
    yield from _grid("NEIGH-20", "", "order_of_layers", (2, 3), always, sizes, ways, _LAYER)


def _one_or_several() -> Iterator[Scenario]:
    """Yield backwards that rank 0 runs in one and others one by one, and copies that each rank makes in its order."""
    same, own, rings = (arguments(groups, groups=groups) for groups in SHARING)
    at_once, soon, later = (arguments(f"from-{step}", joins_from=step) for step in (0, 1, 2))
    for way in (_PLAIN, VIEW, _STATIC, _LAYER.named("layer")):
        yield from _grid("NEIGH-21", "", "one_or_several", (2, 3), same, (soon, later), way)
        yield from _grid("NEIGH-21", "", "one_or_several", (2, 3), own, (at_once, later), way)
        yield from _grid("NEIGH-21", "", "one_or_several", 3, rings, (at_once, later), way)
    first_searches = arguments("first-searches", searches=0)
    yield from _grid("NEIGH-21", "", "one_or_several", (2, 3), own, later, first_searches, needs=(_FIND_UNUSED,))
    for way in (_PLAIN, _FIND, VIEW, _STATIC, _LAYER.named("layer")):
        copied = arguments("", copied=True, joins_from=0) | same.named("")
        yield from _grid("NEIGH-22", "", "one_or_several", (2, 3), copied, way)


_AXES: Mapping[str, tuple[Any, ...]] = {
    "layout": LAYOUTS,
    "kind": ("find", *(kind.slug for kind in _KINDS if kind is not _FIND)),
    "collective": ("none", *PLACES),
    "unused": UNUSED,
    "groups": GROUPS,
    "local": LOCAL,
    "bucket": tuple(bucket.slug for bucket in _BUCKETS),
    "layer": (1, 0, 2),
    "as_a_bucket": (False, True),
    "own_group": (False, True),
    "hides": (False, True),
    "checkpoints": (False, True),
    "hook": ("none", "ready", "talking"),
    "optimizer": ("none", "ordinary", "zero", "in_backward"),
    "world_size": (2, 3, 4),
}


def _is_meant(case: Case) -> bool:
    """Whether a DDP must train this: what its documentation rules out is no scenario."""
    searches = case["kind"] != "plain"
    is_static = case["kind"].startswith("static")
    return (
        (case["unused"] == "none" or searches)
        and not (is_static and (case["unused"] not in ("none", "nobody", "one_rank", "crosswise")))
        and not _skips_the_hooks(case["unused"], case["collective"], case["layer"])
        and not (case["unused"] == "skipped" and (is_static or case["layout"] in ("chained", "nested", "three")))
        and not (is_static and (case["local"] != "none" or case["layout"] == "separate"))
        and not (case["groups"] in ("parts", "overlapping") and case["layout"] in ("alone", "nested", "shared"))
        and not (case["groups"] in ("parts", "overlapping") and case["world_size"] == 2)
        and not (case["groups"] in ("parts", "overlapping") and case["optimizer"] == "zero")
        and not (case["kind"] == "view" and case["layout"] in ("nested", "shared"))
        and not (case["optimizer"] != "none" and case["local"] != "none")
        and not (case["optimizer"] == "in_backward" and (case["layout"] in ("nested", "shared", "separate")))
        and not (case["optimizer"] == "in_backward" and case["hook"] != "none")
        and not (case["layer"] == 2 and case["layout"] in ("chained", "nested", "three"))
        and not (case["local"] in ("first", "last") and case["layout"] in ("alone", "nested", "shared"))
        and not (case["kind"] == "wide" and (case["hook"] != "none" or case["checkpoints"]))
        # A rank of none of the groups has a bare module there, which casts nothing.
        and not (case["kind"] == "wide" and case["groups"] == "overlapping")
    )


def _crossed() -> Iterator[Scenario]:
    """Every value of every axis beside every value of every other."""
    kinds = {kind.slug: kind.named("") for kind in _KINDS}
    buckets = {bucket.slug: bucket.named("") for bucket in _BUCKETS}
    for number, case in enumerate(pairwise(_AXES, _is_meant)):
        given = {name: value for name, value in case.items() if name not in ("kind", "bucket", "world_size")}
        slug = dashed(f"{number:03}-{case['layout']}-{case['collective']}-{case['unused']}")
        way = buckets[case["bucket"]] | kinds[case["kind"]]
        yield from _beside("NEIGH-12", slug, case["world_size"], way, arguments=given)
