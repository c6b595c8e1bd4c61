"""Scenarios of chapter finalization: `finalize_backward()`, `lazy_bucket_allocation`, and a search that is in vain."""

import random
from collections.abc import Iterator
from itertools import combinations, islice

from conformance.chapters.finalization.by_hand import MISTAKES, USES
from conformance.chapters.grid import Grid
from conformance.chapters.variants import (
    EACH_ALONE,
    PLAIN,
    STATIC,
    UNUSED,
    VIEW,
    Variant,
    arguments,
    capped,
    each,
    options,
)
from conformance.composed.choose import chosen_by
from conformance.composed.features import all_possible_pairs, ordered
from conformance.composed.grammar import Special, draw, with_newer_options
from conformance.composed.training import Training
from conformance.scenario import Scenario

_LAZY = options("lazy", lazy_bucket_allocation=True) | Variant(needs=("lazy_bucket_allocation",))
_by_hand = Grid("finalization", Variant(needs=("manual_finalization",)))
_lazily = Grid("finalization", _LAZY)
_grid = Grid("finalization")

#: What trainings of the grammar have while they are finalized by hand, with lazy buckets, two at a time.
_CROSSED = (
    "option static_graph=True", "option find_unused_parameters=True", "option gradient_as_bucket_view=True",
    "hook allreduce", "hook wider", "action join:rank_0_first", "action join:rank_0_last", "action no_sync:whole",
    "delayed blocks", "runs rank_0", "optimizer in_backward",
)  # fmt: skip
#: How often one is drawn that can be finalized so.
_DRAWN = 20
_OF_MISTAKES = {
    "finalized": "FINAL-03", "forgotten": "FINAL-04", "switched": "FINAL-06", "stepped": "FINAL-07",
    "clipped": "FINAL-07", "looked": "FINAL-07",
}  # fmt: skip
_OF_USES = {"evaluated": ("FINAL-05",), "by_turns": ("FINAL-06",), "plain": ("FINAL-02",)}
_NEEDS = {"in_backward": ("optimizer_in_backward",), "accumulated": ("no_sync",)}


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _finalized()
    for mistake in each("mistake", (one for named in MISTAKES.values() for one in named)):
        requirement = _OF_MISTAKES[mistake.slug.partition("-")[0]]
        needs = ("no_sync",) if "no-sync" in mistake.slug else ()
        ways = (PLAIN.at(1, 2), VIEW, UNUSED, STATIC) if "no-sync" not in mistake.slug else (PLAIN.at(1, 2), VIEW)
        yield from _by_hand(requirement, "", "finalized_wrongly", 2, mistake, ways, needs=needs)
    yield from _lazy()
    yield from _composed()
    for used, slug in ((True, "in-vain"), (False, "found")):
        yield from _grid("FINAL-12", slug, "vain_search", (1, 2), UNUSED.named(""), arguments(used=used))


def _finalized() -> Iterator[Scenario]:
    for use in USES:
        way = arguments(use=use) | Variant(needs=_NEEDS.get(use, ()), also=_OF_USES.get(use, ()))
        searching = UNUSED.named("") if use == "unused_by_rank" else PLAIN
        ways: tuple[Variant, ...] = (
            PLAIN.at(2, 3),
            VIEW,
            EACH_ALONE,
            VIEW | EACH_ALONE,
            VIEW | _LAZY,
            searching | _LAZY,
        )
        ways += () if use == "unused_by_rank" else (UNUSED, STATIC, STATIC | VIEW)
        first = "FINAL-08" if use in _NEEDS or use == "unused_by_rank" else "FINAL-01"
        yield from _by_hand(first, use.replace("_", "-"), "finalized_by_hand", 2, way, searching, ways)


def _lazy() -> Iterator[Scenario]:
    ways = (PLAIN, VIEW, EACH_ALONE, VIEW | EACH_ALONE, UNUSED, STATIC | VIEW)
    yield from _lazily("FINAL-11", "", "kept_gradients", (2, 3), ways, also=("FINAL-09",))
    large = (PLAIN, VIEW, UNUSED | VIEW, STATIC)
    yield from _lazily("FINAL-10", "", "bucket_memory", 2, large, capped("one-bucket", 100), recorded=False)


def _composed() -> Iterator[Scenario]:
    """Yield trainings of the grammar with both options, for every two features that may go with them and each other."""
    choose, possible = chosen_by(random.Random("finalization")), all_possible_pairs()
    for pair in combinations(_CROSSED, 2):
        special: Special = "numerics" if "optimizer in_backward" in pair else ""
        if ordered(*pair) in possible:
            drawn = (draw(choose, must=pair, special=special, few_refusals=True) for _ in range(_DRAWN))
            for scenario in islice((one for one in map(with_newer_options, drawn) if Training.of(one).finalizes), 1):
                found = ("FINAL-08", "FINAL-09")
                yield scenario.replace(id=f"finalization/FINAL-08/{scenario.id.split('/')[2]}", requirements=found)
