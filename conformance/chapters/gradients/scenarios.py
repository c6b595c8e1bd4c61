"""Scenarios of chapter gradients: every rank holds the mean in `.grad`, whatever users do with autograd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conformance.chapters.gradients import stand_ins
from conformance.chapters.gradients.changed_modules import HARMLESS, UNKNOWN
from conformance.chapters.gradients.frozen_parameters import MOMENTS
from conformance.chapters.gradients.layout import MODULES
from conformance.chapters.gradients.local_hooks import KINDS as KINDS_OF_HOOKS
from conformance.chapters.gradients.local_hooks import MOMENTS as MOMENTS_OF_HOOKS
from conformance.chapters.in_chapter import in_chapter
from conformance.models.catalogue import get_fixture
from conformance.programs.autograd_uses import USES
from conformance.scenario import Scenario, Step

_scenario = in_chapter("gradients")

MODELS = (
    "mlp", "cnn", "gpt", "lstm", "embedding", "sparse_embedding", "moe", "dataclass_output", "nested", "rank_branch",
    "two_heads", "many_small_layers", "mixed_dtypes", "complex", "frozen", "batchnorm_mlp", "channels_last_cnn",
    "unused",
)  # fmt: skip

#: What training some of the models shows besides the mean.
_SHOWN_BY = {"frozen": ("GRAD-19",), "sparse_embedding": ("GRAD-20",)}

_VIEW: dict[str, Any] = {"gradient_as_bucket_view": True}
_FIND: dict[str, Any] = {"find_unused_parameters": True}


def _train(requirement: str, slug: str, model: str, world_size: int, options: dict[str, Any], **rest: Any) -> Scenario:
    """Return a scenario of program `train`, whose model gets `find_unused_parameters` where it needs it."""
    fixture = get_fixture(model)
    needed = _FIND if fixture.has_unused else {}
    rest.setdefault("dtype", fixture.dtypes[0])
    rest.setdefault("schedule", (Step(), Step(), Step()))
    return _scenario(requirement, slug, "train", world_size, model=model, options={**needed, **options}, **rest)


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _means()
    yield from _sizes()
    yield from _dtypes()
    yield from _layouts()
    yield from _zero_grad()
    yield from _autograd_uses()
    yield from _accidents()
    yield from _frozen()
    yield from _changed()
    yield from _stand_ins()
    yield from _shared_memory()
    yield from _overflows()
    yield from _local_hooks()
    yield from _neighbours()
    yield from _apart()


def _means() -> Iterator[Scenario]:
    for model in MODELS:
        also = _SHOWN_BY.get(model, ())
        for world_size in (1, 2, 3, 4):
            scenario = _train("GRAD-01", model.replace("_", "-"), model, world_size, {})
            yield scenario.replace(requirements=("GRAD-01", *also))
        for world_size in (2, 3):
            slug = f"view-{model.replace('_', '-')}"
            scenario = _train("GRAD-03", slug, model, world_size, _VIEW, needs=("gradient_as_bucket_view",))
            yield scenario.replace(requirements=("GRAD-03", *also))
    for seed in (1, 2):
        yield _train("GRAD-01", f"mlp-seed{seed}", "mlp", 2, {}, seed=seed)
    for model in ("mlp", "cnn", "mixed_dtypes", "moe", "many_small_layers"):
        for as_view in (False, True):
            slug = f"batched-{model.replace('_', '-')}{'-view' * as_view}"
            options: dict[str, Any] = {"batched_grad_copy": True, "gradient_as_bucket_view": as_view}
            yield _train("GRAD-04", slug, model, 2, options)
    variants: tuple[tuple[str, dict[str, Any]], ...] = (
        ("default", {}), ("view", _VIEW), ("small-buckets", {"bucket_cap_mb": 0.002}), ("unused", _FIND),
    )  # fmt: skip
    for slug, options in variants:
        for world_size in (2, 3, 4):
            yield _scenario("GRAD-02", slug, "agreement", world_size, options=options)
    for world_size in (2, 3, 4):
        yield _scenario("GRAD-25", "not-finite", "gradient_values", world_size, arguments={"values": "not_finite"})
    for as_view in (False, True):
        for world_size in (2, 4):
            yield _scenario(
                "GRAD-26", f"large{'-view' * as_view}", "gradient_values", world_size, arguments={"values": "large"},
                options={"gradient_as_bucket_view": as_view},
            )  # fmt: skip


def _sizes() -> Iterator[Scenario]:
    alone = {"bucket_cap_mb": 0.001}
    static = {"static_graph": True}
    half: dict[str, Any] = {"dtype": "float16", "schedule": (Step(), Step())}
    local, kept = (Step(local_backwards=2), Step(), Step()), (Step(), Step(zero_grad="keep"), Step(zero_grad="zeros"))
    ways: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
        ("plain", {}, {}), ("alone", alone, {}), ("unused", _FIND, {}), ("static", static, {}), ("half", {}, half),
        ("local", {}, {"schedule": local}), ("kept", {}, {"schedule": kept}),
    )  # fmt: skip
    for slug, options, rest in ways:
        for as_view in (False, True):
            for world_size in (2, 3):
                given = {**options, "gradient_as_bucket_view": as_view}
                yield _train("GRAD-37", f"{slug}{'-view' * as_view}", "wide", world_size, given, **rest)


def _dtypes() -> Iterator[Scenario]:
    for model in ("mlp", "many_small_layers", "frozen"):
        for dtype in ("float64", "float16", "bfloat16"):
            for world_size in (2, 3):
                slug = f"{model.replace('_', '-')}-{dtype}"
                yield _train("GRAD-05", slug, model, world_size, {}, dtype=dtype, schedule=(Step(), Step()))
    for dtype in ("float64", "float16", "bfloat16"):
        yield _train("GRAD-05", f"mlp-{dtype}-view", "mlp", 4, _VIEW, dtype=dtype, schedule=(Step(), Step()))
    for model in ("complex", "mixed_dtypes"):
        yield _train("GRAD-05", f"{model.replace('_', '-')}-small-buckets", model, 2, {"bucket_cap_mb": 0.0001})
    ways: tuple[tuple[str, dict[str, Any]], ...] = (
        ("", {}), ("-view", _VIEW), ("-unused", _FIND), ("-each-alone", {"bucket_cap_mb": 0.00001}),
    )  # fmt: skip
    for suffix, options in ways:
        for world_size in (2, 3) if options else (1, 2, 3, 4):
            kinds = {"options": options, "arguments": {"judge": "grad"}}
            yield _scenario("GRAD-05", f"every-kind{suffix}", "parameter_kinds", world_size, **kinds)
        yield _scenario(
            "GRAD-06", f"every-kind{suffix}", "parameter_kinds", 2, options=options, arguments={"judge": "strides"}
        )


def _layouts() -> Iterator[Scenario]:
    for module in MODULES:
        for as_view in (False, True):
            for world_size in (1, 2, 3):
                slug = f"{module.replace('_', '-')}{'-view' * as_view}"
                requirements = {"GRAD-06", "GRAD-07", "GRAD-08" if as_view else "GRAD-09"}
                scenario = _scenario(
                    "GRAD-06", slug, "gradient_layout", world_size, arguments={"module": module},
                    options={"gradient_as_bucket_view": as_view},
                )  # fmt: skip
                yield scenario.replace(requirements=tuple(sorted(requirements)))
    double: dict[str, Any] = {"arguments": {"module": "linear"}, "dtype": "float64"}
    yield _scenario("GRAD-08", "double", "gradient_layout", 2, options=_VIEW, **double)
    yield _scenario("GRAD-09", "double", "gradient_layout", 2, **double)


def _zero_grad() -> Iterator[Scenario]:
    for model in ("mlp", "gpt", "mixed_dtypes", "channels_last_cnn"):
        for zero_grad in ("zeros", "keep"):
            for as_view in (False, True):
                schedule = tuple(Step(zero_grad=zero_grad) for _ in range(3))
                slug = f"{model.replace('_', '-')}-{zero_grad}{'-view' * as_view}"
                options = {"gradient_as_bucket_view": as_view}
                yield _train("GRAD-10", slug, model, 2, options, schedule=schedule)
    mixed = (Step(), Step(zero_grad="zeros"), Step(zero_grad="none"), Step(zero_grad="keep"), Step(zero_grad="zeros"))
    for as_view in (False, True):
        for world_size in (3, 4):
            slug = f"mlp-mixed{'-view' * as_view}"
            yield _train("GRAD-10", slug, "mlp", world_size, {"gradient_as_bucket_view": as_view}, schedule=mixed)


#: Requirement -> uses; and with which options each is run besides the default.
_USES = {
    "GRAD-11": ("tensor_hooks",),
    "GRAD-12": ("gradient_set_before",),
    "GRAD-13": ("create_graph",),
    "GRAD-14": ("retain_graph",),
    "GRAD-15": ("autograd_grad_first", "gradient_penalty"),
    "GRAD-16": ("partial_backward",),
    "GRAD-21": ("change_in_place",),
    "GRAD-22": ("used_twice",),
    "GRAD-23": ("forward_under_no_grad", "discarded_forward"),
    "GRAD-24": ("two_wrappers", "stacked_wrappers"),
    "GRAD-27": ("checkpoint", "checkpoint_twice"),
    "GRAD-28": ("checkpoint_reentrant", "checkpoint_reentrant_twice"),
    "GRAD-30": ("two_forwards",),
    "GRAD-31": ("without_clone",),
}


def _autograd_uses() -> Iterator[Scenario]:
    for requirement, uses in _USES.items():
        for use in uses:
            for suffix, options in (("", {}), ("-view", _VIEW), ("-unused", _FIND)):
                if use.startswith("checkpoint_reentrant") and options == _FIND:
                    continue  # the search cannot look into reentrant checkpoints, as torch documents
                for world_size in (2, 3):
                    if world_size == 3 and options:
                        continue
                    program = "refusable_use" if USES[use].refusal else "autograd_use"
                    scenario = _scenario(
                        requirement, f"{use.replace('_', '-')}{suffix}", program, world_size,
                        arguments={"use": use}, options=options, deadline_s=8.0,
                    )  # fmt: skip
                    if requirement == "GRAD-30" and options == _FIND:
                        scenario = scenario.replace(requirements=("GRAD-30", "UNUSED-07"))
                    yield scenario


def _accidents() -> Iterator[Scenario]:
    for recovery in ("none", "update_process_group"):
        for as_view in (False, True):
            slug = f"exception-recovery-{recovery.replace('_', '-')}{'-view' * as_view}"
            yield _scenario(
                "GRAD-17", slug, "exception_in_backward", 2, arguments={"recovery": recovery},
                options={"gradient_as_bucket_view": as_view}, deadline_s=8.0,
            )  # fmt: skip
    for suffix, options in (("", {}), ("-unused", _FIND)):
        yield _scenario("GRAD-18", f"replaced{suffix}", "replaced_parameter", 2, options=options, deadline_s=8.0)
    for slug, options in (("one-bucket", {}), ("many-buckets", {"bucket_cap_mb": 0.00001}), ("view", _VIEW)):
        for world_size in (2, 4):
            yield _scenario(
                "GRAD-29", f"read-at-once-{slug}", "autograd_use", world_size, arguments={"use": "ordinary"},
                options=options,
            )  # fmt: skip


#: Options under which a wrapped module is changed.
_CHANGE_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("", {}), ("-view", _VIEW), ("-each-alone", {"bucket_cap_mb": 0.00001}), ("-unused", _FIND),
    ("-unused-view", {**_FIND, **_VIEW, "bucket_cap_mb": 0.00001}), ("-static", {"static_graph": True}),
)  # fmt: skip
_ALL = ["one.", "two.", "three."]


def _frozen() -> Iterator[Scenario]:
    plans: dict[str, tuple[int, list[list[list[str]]]]] = {
        "everywhere": (2, [[[], []], [["two."], ["two."]], [["two."], ["two."]], [[], []]]),
        "on-one-rank": (2, [[[], []], [["two."], []], [[], ["two."]], [[], []]]),
        "differently": (2, [[[], []], [["one.", "two."], ["two.", "three."]], [["three."], ["two."]], [[], []]]),
        "from-the-first-step": (2, [[["two.", "three."], ["two."]], [["two."], []], [[], []], [["two."], []]]),
        "most-on-one-rank": (2, [[[], []], [["one.", "two."], ["one."]], [[], ["one.", "three."]], [[], []]]),
        "everything-everywhere": (2, [[[], []], [_ALL, _ALL], [[], []]]),
        "one-by-one": (3, [[[]] * 3, [["one."]] * 3, [["one.", "two."]] * 3, [["one.", "two."], ["one."], []]]),
    }  # fmt: skip
    for slug, (world_size, plan) in plans.items():
        for moment in MOMENTS:
            for suffix, options in _CHANGE_OPTIONS:
                if "static" in suffix and slug != "everywhere":
                    continue
                yield _scenario(
                    "GRAD-32", f"{slug}-before-{moment}{suffix}", "frozen_parameters", world_size, options=options,
                    arguments={"frozen": plan, "moment": moment}, deadline_s=8.0,
                )  # fmt: skip


def _changed() -> Iterator[Scenario]:
    for change in UNKNOWN:
        for suffix, options in _CHANGE_OPTIONS:
            steps_before = 0 if suffix == "-view" else 2
            arguments = {"change": change, "steps_before": steps_before, "accumulates": suffix == "-each-alone"}
            yield _scenario(
                "GRAD-33", f"{change.replace('_', '-')}{suffix}", "unknown_parameters", 2, options=options,
                arguments=arguments, deadline_s=8.0, min_collectives=0,
            )  # fmt: skip
    for harmless in HARMLESS:
        for suffix, options in _CHANGE_OPTIONS[:4]:
            yield _scenario(
                "GRAD-34", f"{harmless.replace('_', '-')}{suffix}", "harmless_change", 2, options=options,
                arguments={"change": harmless}, deadline_s=8.0,
            )  # fmt: skip
    for suffix, options in _CHANGE_OPTIONS[:4]:
        yield _scenario(
            "GRAD-34", f"converted-later{suffix}", "harmless_change", 2, options=options,
            arguments={"change": "converted_and_back", "after": 1}, deadline_s=8.0,
        )  # fmt: skip


def _shared_memory() -> Iterator[Scenario]:
    for suffix, options in (
        ("", {}), ("-each-alone", {"bucket_cap_mb": 0.00001}),
        ("-view-each-alone", {"bucket_cap_mb": 0.00001, "gradient_as_bucket_view": True}),
    ):  # fmt: skip
        yield _scenario("GRAD-36", f"views-of-one{suffix}", "shared_memory", 2, options=options)


def _stand_ins() -> Iterator[Scenario]:
    for use in stand_ins.USES:
        for suffix, options in _CHANGE_OPTIONS[:5]:
            if use != "one_leaf" or options.get("find_unused_parameters"):
                yield _scenario(
                    "GRAD-35", f"{use.replace('_', '-')}{suffix}", "stand_ins", 2, options=options,
                    arguments={"use": use}, deadline_s=8.0,
                )  # fmt: skip


def _overflows() -> Iterator[Scenario]:
    plain, alone = {"bucket_cap_mb": 25.0}, {"bucket_cap_mb": 0.00001}
    alternating, by_rank = {"branches": "alternating"}, {"branches": "by_rank"}
    ways: tuple[tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]], ...] = (
        ("unused", _FIND, alternating, ()), ("unused-by-some", _FIND, by_rank, ()),
        ("unused-by-all", _FIND, {"branches": "one"}, ()),
        ("unused-zeroed", _FIND, {**alternating, "set_to_none": False}, ()),
        ("unused-alone", {**_FIND, **alone}, alternating, ()),
        ("unused-local", _FIND, {**alternating, "local": 1}, ("no_sync",)),
        ("unused-hook", _FIND, {**alternating, "hook": True}, ("comm_hook",)),
        ("static", {"static_graph": True}, by_rank, ()),
        ("join", plain, {"branches": "both", "joins": True}, ("join",)),
        ("join-alone", alone, {"branches": "both", "joins": True}, ("join",)),
        ("join-unused", _FIND, {**alternating, "joins": True}, ("join",)),
        ("local", plain, {"branches": "both", "local": 2}, ("no_sync",)),
    )  # fmt: skip
    for slug, options, arguments, needs in ways:
        for as_view in (False, True):
            for world_size, ranks in ((2, [1]), (3, [0, 1, 2])):
                yield _scenario(
                    "GRAD-38", f"{slug}{'-view' * as_view}", "overflowed_step", world_size, needs=needs,
                    options={**options, "gradient_as_bucket_view": as_view}, arguments={**arguments, "ranks": ranks},
                )  # fmt: skip


def _local_hooks() -> Iterator[Scenario]:
    alone: dict[str, Any] = {"bucket_cap_mb": 0.00001}
    local, by_rank = {"local": 1}, {"branches": "by_rank"}
    ways: tuple[tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]], ...] = (
        ("", {}, {}, ()), ("-view", _VIEW, {}, ()), ("-alone", alone, {}, ()), ("-alone-view", alone | _VIEW, {}, ()),
        ("-static", {"static_graph": True}, {}, ()), ("-unused", _FIND, by_rank, ()),
        ("-unused-view", _FIND | _VIEW, by_rank, ()), ("-local", {}, local, ("no_sync",)),
        ("-local-view", _VIEW, local, ("no_sync",)),
    )  # fmt: skip
    for moment in MOMENTS_OF_HOOKS:
        for kind in KINDS_OF_HOOKS:
            # How a reducer is told of what a tensor hook returns does not depend on its options.
            for suffix, options, arguments, needs in ways[:1] if kind == "returns" else ways:
                for world_size in (2,) if suffix else (2, 3):
                    yield _scenario(
                        "GRAD-39", f"{moment}-{kind.replace('_', '-')}{suffix}", "local_hooks", world_size,
                        options=options, needs=needs, arguments={**arguments, "moment": moment, "kind": kind},
                    )  # fmt: skip


def _apart() -> Iterator[Scenario]:
    alone: dict[str, Any] = {"bucket_cap_mb": 0.00001}
    for slug, model, options, needs in (
        ("", "many_small_layers", {}, ()), ("-view", "many_small_layers", _VIEW, ()),
        ("-alone", "many_small_layers", alone, ()), ("-static", "many_small_layers", {"static_graph": True}, ()),
        ("-unused", "moe", {}, ()), ("-dtypes", "mixed_dtypes", {}, ()), ("-buffers", "batchnorm_mlp", {}, ()),
        ("-local", "many_small_layers", {}, ("no_sync",)),
    ):  # fmt: skip
        schedule = (Step(local_backwards=1), Step()) if needs else (Step(), Step(), Step())
        yield _train(
            "GRAD-40", f"interpreters{slug}", model, 2, options, needs=needs, schedule=schedule, apart=True,
            deadline_s=60.0,  # one at a time: to start interpreters costs seconds, which all of these share
        )  # fmt: skip


def _neighbours() -> Iterator[Scenario]:
    alone: dict[str, Any] = {"bucket_cap_mb": 0.00001}
    for suffix, options in (("", {}), ("-view", _VIEW), ("-alone", alone), ("-alone-view", alone | _VIEW),
                            ("-unused", _FIND)):  # fmt: skip
        for which, arguments, needs in (
            ("", {}, ("no_sync",)), ("-frozen", {"freezes": True}, ("no_sync",)),
            ("-joined", {"joins": True}, ("no_sync", "join")),
        ):  # fmt: skip
            for world_size, seed in ((2, 0), (3, 1)):
                yield _scenario(
                    "GRAD-24", f"neighbours{which}{suffix}", "neighbours", world_size, options=options, needs=needs,
                    arguments=arguments, seed=seed,
                )  # fmt: skip
