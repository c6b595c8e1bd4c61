"""Scenarios of chapter static_graph: the user promises that the graph stays the same, and the DDP may rely on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from conformance.chapters.in_chapter import in_chapter
from conformance.chapters.static_graph.promised_graphs import USES
from conformance.models.catalogue import get_fixture
from conformance.own_mistake import certain
from conformance.scenario import Scenario, Step

_of_chapter = in_chapter("static_graph")

_STATIC: dict[str, Any] = {"static_graph": True}
_VIEW: dict[str, Any] = {"gradient_as_bucket_view": True}
_FIND: dict[str, Any] = {"find_unused_parameters": True}
_SMALL: dict[str, Any] = {"bucket_cap_mb": 0.0005}
_EACH_ALONE: dict[str, Any] = {"bucket_cap_mb": 0.00001}
_VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (("", {}), ("-view", _VIEW), ("-each-alone", _EACH_ALONE))

#: Models whose graph is the same in every step, if not on every rank.
MODELS = (
    "mlp", "cnn", "gpt", "lstm", "embedding", "sparse_embedding", "dataclass_output", "nested", "many_small_layers",
    "mixed_dtypes", "complex", "frozen", "batchnorm_mlp",
)  # fmt: skip


def _scenario(
    requirement: str, slug: str, program: str, world_size: int, *, options: dict[str, Any] | None = None, **rest: Any
) -> Scenario:
    rest.setdefault("deadline_s", 8.0)
    return _of_chapter(
        requirement, slug, program, world_size, options={**_STATIC, **(options or {})}, needs=("static_graph",), **rest
    )


def _train(requirement: str, slug: str, model: str, world_size: int, **rest: Any) -> Scenario:
    rest.setdefault("schedule", (Step(),) * 4)
    return _scenario(
        requirement, slug, "train", world_size, model=model, dtype=get_fixture(model).dtypes[0], **rest
    )  # fmt: skip


def _use(requirement: str, use: str, world_size: int, suffix: str = "", **rest: Any) -> Scenario:
    slug = f"{use.replace('_', '-')}{suffix}"
    arguments = {"use": use, **rest.pop("arguments", {})}
    return _scenario(requirement, slug, "static_use", world_size, arguments=arguments, **rest)


def _switched(
    requirement: str, slug: str, program: str, world_size: int, *uses: Sequence[str], **rest: Any
) -> Scenario:
    """Return a scenario in which each step says what rank 0, 1, ... uses, in turn."""
    arguments = {"uses": [list(step) for step in uses], **rest.pop("arguments", {})}
    return _scenario(requirement, slug, program, world_size, arguments=arguments, **rest)


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _models()
    yield from _unused()
    yield from _accumulation()
    yield from _uses()
    yield from _outputs()
    yield from _traffic()
    yield from _promises()
    yield from _broken_promises()


def _models() -> Iterator[Scenario]:
    for model in MODELS:
        for world_size in (2, 3, 4) if model in ("mlp", "many_small_layers", "frozen") else (2,):
            yield _train("STATIC-01", model.replace("_", "-"), model, world_size)
    yield _train("STATIC-01", "mlp", "mlp", 1)
    for suffix, options in (("-view", _VIEW), ("-small-buckets", _SMALL), ("-view-small", {**_VIEW, **_SMALL})):
        for model in ("many_small_layers", "mixed_dtypes", "rank_branch"):
            for world_size in (2, 3):
                slug = f"{model.replace('_', '-')}{suffix}"
                requirement = "STATIC-18" if "view" in suffix else "STATIC-01"
                if (model, suffix) != ("rank_branch", "-view"):  # it shows STATIC-04, below
                    yield _train(requirement, slug, model, world_size, options=options)
    for model in ("mlp", "rank_branch", "two_heads"):
        for world_size in (2, 3):
            yield _train("STATIC-19", model.replace("_", "-"), model, world_size, options=_FIND)


def _unused() -> Iterator[Scenario]:
    for suffix, options in _VARIANTS:
        for world_size in (1, 2, 3, 4):
            yield _train("STATIC-02", f"unused{suffix}", "unused", world_size, options=options)
            nobody = _switched("STATIC-02", f"nobody{suffix}", "unused_parameters", world_size, *[["a c"]] * 4,
                               options=options)  # fmt: skip
            yield nobody
            if world_size > 1:
                yield _train("STATIC-04", f"rank-branch{suffix}", "rank_branch", world_size, options=options)
                yield _switched("STATIC-04", f"by-rank{suffix}", "unused_parameters", world_size,
                                *[["a b", "b c", "d a"]] * 4, options=options)  # fmt: skip
                yield _use("STATIC-04", "heads_by_rank", world_size, suffix, options=options)
        for world_size in (2, 3):
            yield _train("STATIC-03", f"two-heads{suffix}", "two_heads", world_size, options=options)
            yield _use("STATIC-03", "one_head_of_two_forwards", world_size, suffix, options=options)
    for zero_grad in ("zeros", "keep"):
        yield _switched("STATIC-02", f"zero-grad-{zero_grad}", "unused_parameters", 2, *[["a c", "c b"]] * 4,
                        arguments={"zero_grad": zero_grad})  # fmt: skip
    yield _switched("STATIC-02", "optimizer", "unused_parameters", 2, *[["a c", "c b"]] * 4,
                    arguments={"optimizer": True})  # fmt: skip


def _accumulation() -> Iterator[Scenario]:
    accumulate = Step(local_backwards=1)
    local = Step(local_backwards=2, synchronised=False, optimizer=False)
    schedules = (
        ("STATIC-05", "first-step", (accumulate, Step(), Step())),
        ("STATIC-05", "every-step", (accumulate,) * 4),
        ("STATIC-05", "local-step-first", (local, Step(zero_grad="keep"), Step(), Step())),
        ("STATIC-06", "later-steps", (Step(), accumulate, Step(), Step(local_backwards=3))),
        ("STATIC-06", "local-step-later", (Step(), Step(), local, Step(zero_grad="keep"))),
    )
    for requirement, slug, schedule in schedules:
        for model in ("mlp", "rank_branch"):
            for suffix, options in (("", {}), ("-view", _VIEW)):
                for world_size in (2, 3) if not options else (2,):
                    yield _train(requirement, f"{slug}-{model.replace('_', '-')}{suffix}", model, world_size,
                                 schedule=schedule, options=options)  # fmt: skip
    for world_size in (2, 4):
        yield _use("STATIC-05", "first_local", world_size)


#: Requirement -> uses that show it; each is run with the variants of options below.
_USES = {
    "STATIC-07": ("checkpoint_reentrant", "reentrant_three_times", "reentrant_inside_each_other"),
    "STATIC-08": ("checkpoint", "checkpoint_twice", "reentrant_and_not"),
    "STATIC-09": ("two_forwards", "heads_of_forwards"),
    "STATIC-11": ("gradient_penalty", "autograd_grad_first"),
    "STATIC-12": ("retain_graph",),
    "STATIC-22": ("validation_first", "discarded_forward"),
    "STATIC-23": ("two_wrappers", "stacked_wrappers"),
    "STATIC-25": ("tensor_hooks", "module_hooks", "create_graph", "tied", "used_twice", "gradient_set_before",
                  "odd_shapes"),
    "STATIC-26": ("local_elsewhere",),
}  # fmt: skip


def _uses() -> Iterator[Scenario]:
    for requirement, uses in _USES.items():
        for use in uses:
            for suffix, options in _VARIANTS:
                for world_size in (2, 3, 4) if not options else (2,):
                    yield _use(requirement, use, world_size, suffix, options=options)
    covered = {use for uses in _USES.values() for use in uses}
    elsewhere = {"ordinary", "first_local", "heads_by_rank", "one_head_of_two_forwards"}
    certain(set(USES) == covered | elsewhere, "every use is tried")
    for recovery in ("none", "update_process_group"):
        for suffix, options in (("", {}), ("-view", _VIEW)):
            yield _scenario("STATIC-24", f"recovery-{recovery.replace('_', '-')}{suffix}", "exception_in_backward", 2,
                            arguments={"recovery": recovery}, options=options)  # fmt: skip


def _outputs() -> Iterator[Scenario]:
    for structure in ("opaque", "dataclass", "nested_dataclass"):
        for world_size in (2, 3):
            for suffix, rest in (("", {}), ("-spare", {"spare": True}), ("-first", {"loss": "first"})):
                yield _scenario("STATIC-10", f"{structure.replace('_', '-')}{suffix}", "outputs", world_size,
                                arguments={"structure": structure, **rest})  # fmt: skip


def _traffic() -> Iterator[Scenario]:
    sizes = [40, 30, 20, 50, 10, 60]
    for order in ("registered", "reversed"):
        for world_size in (2, 3):
            for cap in (0.0001, 0.0004):
                yield _scenario("STATIC-13", f"{order}-cap{cap}", "bucket_traffic", world_size,
                                arguments={"sizes": sizes, "order": order, "judge": ["first", "elements"]},
                                options={"bucket_cap_mb": cap})  # fmt: skip
    yield _scenario("STATIC-13", "dtypes", "bucket_traffic", 2, options={"bucket_cap_mb": 0.0001},
                    arguments={"sizes": sizes, "dtypes": ["float32", "float64"] * 3, "judge": ["first", "dtypes"]},
                    )  # fmt: skip
    for spare in (0, 1, 3):
        for world_size in (2, 3, 4):
            scenario = _scenario("STATIC-14", f"spare{spare}", "learnt_unused", world_size, arguments={"spare": spare},
                                 options={"bucket_cap_mb": 0.0004})  # fmt: skip
            yield scenario.replace(requirements=("STATIC-02", "STATIC-13", "STATIC-14"))


def _promises() -> Iterator[Scenario]:
    for use in ("ordinary", "reentrant_three_times", "heads_by_rank"):
        for world_size in (2, 3):
            yield _use("STATIC-15", use, world_size, "-late", arguments={"late": True},
                       options={"static_graph": False})  # fmt: skip
    for world_size in (1, 2):
        yield _scenario("STATIC-15", "twice", "static_promise", world_size, arguments={"when": "twice"})
        yield _scenario("STATIC-16", "too-late", "static_promise", world_size, arguments={"when": "too_late"},
                        options={"static_graph": False})  # fmt: skip
    undecided = {"static_graph": False, **_FIND}
    for slug, uses, options in (
        ("promised", [["a b"]] * 3, {}),
        ("constant", [["a b"]] * 3, undecided),
        ("everything", [["a b c d"]] * 3, undecided),
        ("changing", [["a b"], ["a b"], ["b c"], ["a b"]], undecided),
    ):  # fmt: skip
        for world_size in (1, 2):
            yield _switched("STATIC-17", slug, "static_logging", world_size, *uses, options=options)


def _broken_promises() -> Iterator[Scenario]:
    changes = (
        ("goes-unused", [["a b c"]] * 2 + [["a b"]] * 2, "c"),
        ("comes-into-use", [["a b"]] * 2 + [["a b c"]] * 2, "c"),
        ("exchanged", [["a b"]] * 2 + [["a c"]] * 2, "bc"),
        ("unused-in-second-step", [["a b c"], ["a b"], ["a b c"]], "c"),
        ("all-else", [["a b"]] * 2 + [["c d"]] * 2, "abcd"),
    )
    for slug, uses, changed in changes:
        for suffix, options in _VARIANTS:
            for world_size in (2, 3) if not options else (2,):
                yield _switched("STATIC-20", f"{slug}{suffix}", "changing_graph", world_size, *uses, options=options,
                                arguments={"changed": list(changed)})  # fmt: skip
    yield _switched("STATIC-20", "frozen", "changing_graph", 2, *[["a b c"]] * 4,
                    arguments={"changed": ["c"], "freezes": "c.weight"})  # fmt: skip
    for suffix, options in _VARIANTS:
        for world_size in (2, 3) if not options else (2,):
            yield _switched("STATIC-21", f"goes-unused-on-rank-1{suffix}", "changing_graph", world_size,
                            *[["a b c"]] * 2, *[["a b c", "a b", "a b c"]] * 2, options=options,
                            arguments={"changed": ["c"]}, deadline_s=4.0)  # fmt: skip
