"""Scenarios of chapter neighbours: wrappers beside wrappers, and beside what users communicate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from conformance.chapters.in_chapter import in_chapter
from conformance.chapters.neighbours.company import GROUPS, LAYOUTS, LOCAL, UNUSED
from conformance.chapters.neighbours.grid import Case, pairwise
from conformance.chapters.neighbours.towers import PAIR_BYTES
from conformance.chapters.neighbours.user_collectives import IN_BACKWARD, PLACES
from conformance.scenario import Scenario

_of_chapter = in_chapter("neighbours")

_FIND: dict[str, Any] = {"find_unused_parameters": True}
#: Every pair of layers is a bucket, or every two pairs are, or all are one.
_BUCKETS: Mapping[str, dict[str, Any]] = {
    "": {"bucket_cap_mb": PAIR_BYTES / 2**20}, "-two-pairs": {"bucket_cap_mb": 2 * PAIR_BYTES / 2**20}, "-whole": {},
}  # fmt: skip
_OPTIONS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "find": _FIND,
    "view": {**_FIND, "gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static-find": {"static_graph": True, **_FIND},
    "wide": {**_FIND, "mixed_precision": {"param_dtype": "float64", "reduce_dtype": "float64"}},
}
_DEADLINE_S = 8.0


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _everything_used()
    yield from _unused_beside_wrappers()
    yield from _unused_beside_collectives()
    yield from _sub_groups()
    yield from _local()
    yield from _features()
    yield from _crossed()


def _scenario(
    requirement: str, slug: str, world_size: int, options: Mapping[str, Any], also: tuple[str, ...] = (),
    **arguments: Any,
) -> Scenario:  # fmt: skip
    needs = {name for name, value in {**options, **(arguments.get("others") or {})}.items() if value is True}
    needs |= {"no_sync"} if arguments.get("local", "none") != "none" else set()
    needs |= {"comm_hook"} if arguments.get("hook", "none") != "none" else set()
    needs |= {"optimizer_in_backward"} if arguments.get("optimizer") == "in_backward" else set()
    needs |= {"mixed_precision"} if "mixed_precision" in options else set()
    made = _of_chapter(
        requirement, slug, "company", world_size, options=dict(options), arguments=arguments, deadline_s=_DEADLINE_S,
        needs=tuple(sorted(needs)),
    )  # fmt: skip
    return made.replace(requirements=(requirement, *also))


def _everything_used() -> Iterator[Scenario]:
    """Nothing unused: every DDP must be right beside every neighbour."""
    for layout in LAYOUTS[1:]:
        for kind in ("plain", "find", "static"):
            for world_size in (2, 3):
                yield _scenario(
                    "NEIGH-01", f"{_slug(layout)}-{kind}", world_size, {**_BUCKETS[""], **_OPTIONS[kind]}, layout=layout
                )
    for place in PLACES:
        for kind in ("plain", "find", "static"):
            yield _scenario(
                "NEIGH-02", f"{_slug(place)}-{kind}", 2 if kind == "find" else 3,
                {**_BUCKETS[""], **_OPTIONS[kind]}, layout="alone", collective=place, as_a_bucket=kind == "find",
            )  # fmt: skip


def _unused_beside_wrappers() -> Iterator[Scenario]:
    for layout in LAYOUTS[1:]:
        for unused in UNUSED[1:]:
            for bucket, caps in _BUCKETS.items():
                for hides in (False, True):
                    requirement = "NEIGH-04" if layout == "shared" else "NEIGH-03"
                    slug = f"{_slug(layout)}-{_slug(unused)}{'-hidden' if hides else ''}{bucket}"
                    world_size = 3 if bucket == "-two-pairs" else 2
                    yield _scenario(
                        requirement, slug, world_size, {**caps, **_FIND}, layout=layout, unused=unused, hides=hides
                    )
    for groups in ("one", "own"):
        for slug, first, others in (
            ("plain-and-find", {}, _FIND), ("find-and-static", _FIND, {"static_graph": True, **_FIND}),
            ("find-and-view", _FIND, {**_FIND, "gradient_as_bucket_view": True}),
        ):  # fmt: skip
            for layout in ("side_by_side", "chained", "shared"):
                yield _scenario(
                    "NEIGH-05", f"{slug}-{_slug(layout)}-{groups}", 2, {**_BUCKETS[""], **first}, layout=layout,
                    groups=groups, others=others,
                )  # fmt: skip


def _unused_beside_collectives() -> Iterator[Scenario]:
    buckets = list(_BUCKETS.items())[:2]
    for place in PLACES:
        for unused in UNUSED[1:]:
            for layer in (0, 1, 2) if place in IN_BACKWARD else (1,):
                for bucket, caps in buckets if layer == 1 else buckets[1:]:
                    yield _scenario(
                        "NEIGH-06" if place in IN_BACKWARD else "NEIGH-07",
                        f"{_slug(place)}-{_slug(unused)}-layer{layer}{bucket}", 2 + layer % 2, {**caps, **_FIND},
                        layout="alone", unused=unused, collective=place, layer=layer, as_a_bucket=layer != 1,
                        hides=layer == 2, own_group=place == "thread",
                    )  # fmt: skip


def _sub_groups() -> Iterator[Scenario]:
    for groups in ("parts", "overlapping"):
        for layout in ("side_by_side", "separate", "chained", "three"):
            for unused in ("none", "one_rank", "later"):
                for world_size in (3, 4):
                    kind = "plain" if unused == "none" else "find"
                    yield _scenario(
                        "NEIGH-08", f"{groups}-{_slug(layout)}-{_slug(unused)}", world_size,
                        {**_BUCKETS[""], **_OPTIONS[kind]}, layout=layout, groups=groups, unused=unused,
                    )  # fmt: skip


def _local() -> Iterator[Scenario]:
    for layout in LAYOUTS[1:]:
        for local in LOCAL[1:]:
            for unused in ("none", "later"):
                kind = "plain" if unused == "none" else "find"
                yield _scenario(
                    "NEIGH-09", f"{_slug(layout)}-{local}-{_slug(unused)}", 2, {**_BUCKETS[""], **_OPTIONS[kind]},
                    layout=layout, local=local, unused=unused,
                )  # fmt: skip


def _features() -> Iterator[Scenario]:
    for hook in ("ready", "talking"):
        for layout in ("alone", "side_by_side", "chained"):
            for unused in ("none", "later"):
                yield _scenario(
                    "NEIGH-10", f"{hook}-{_slug(layout)}-{_slug(unused)}", 2, {**_BUCKETS[""], **_FIND}, layout=layout,
                    hook=hook, unused=unused, collective="summed",
                )  # fmt: skip
    for optimizer in ("ordinary", "zero", "in_backward"):
        for layout in ("alone", "side_by_side", "chained"):
            for unused in ("none", "later"):
                yield _scenario(
                    "NEIGH-11", f"{_slug(optimizer)}-{_slug(layout)}-{_slug(unused)}", 2, {**_BUCKETS[""], **_FIND},
                    layout=layout, optimizer=optimizer, unused=unused, collective="after_backward",
                )  # fmt: skip


_AXES: Mapping[str, tuple[Any, ...]] = {
    "layout": LAYOUTS,
    "kind": ("find", *(kind for kind in _OPTIONS if kind != "find")),
    "collective": ("none", *PLACES),
    "unused": UNUSED,
    "groups": GROUPS,
    "local": LOCAL,
    "bucket": tuple(_BUCKETS),
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
    )


def _crossed() -> Iterator[Scenario]:
    """Every value of every axis beside every value of every other."""
    for number, case in enumerate(pairwise(_AXES, _is_meant)):
        arguments = {name: value for name, value in case.items() if name not in ("kind", "bucket", "world_size")}
        yield _scenario(
            "NEIGH-12", f"{number:03}-{_slug(case['layout'])}-{_slug(case['collective'])}-{_slug(case['unused'])}",
            case["world_size"], {**_BUCKETS[case["bucket"]], **_OPTIONS[case["kind"]]}, **arguments,
        )  # fmt: skip


def _slug(name: str) -> str:
    return name.replace("_", "-")
