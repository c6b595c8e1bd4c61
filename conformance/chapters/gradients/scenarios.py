"""Scenarios of chapter gradients: every rank holds the mean in `.grad`, whatever users do with autograd."""

from collections.abc import Iterator
from typing import Any

from conformance.chapters.gradients import lazy_bits, stand_ins
from conformance.chapters.gradients.changed_modules import HARMLESS, UNKNOWN
from conformance.chapters.gradients.dropped_wrappers import WAYS as DROPPED
from conformance.chapters.gradients.frozen_parameters import MOMENTS
from conformance.chapters.gradients.layout import MODULES
from conformance.chapters.gradients.local_hooks import KINDS as KINDS_OF_HOOKS
from conformance.chapters.gradients.local_hooks import MOMENTS as MOMENTS_OF_HOOKS
from conformance.chapters.gradients.returned_tensors import HANDLED
from conformance.chapters.gradients.shared_outputs import IDLE, SHARED
from conformance.chapters.gradients.transforms import TRANSFORMS
from conformance.chapters.grid import Axis, Grid, Worlds
from conformance.chapters.variants import (
    EACH_ALONE,
    ENDS_SOON,
    NO_VIEW,
    PLAIN,
    STATIC,
    UNUSED,
    VIEW,
    Variant,
    arguments,
    capped,
    dashed,
    dtypes,
    each,
    fields,
    model,
    models,
)
from conformance.programs.autograd_uses import USES, layers
from conformance.scenario import Scenario, Step

_grid = Grid("gradients")

MODELS = (
    *models("mlp", "cnn", "gpt", "lstm", "embedding"),
    model("sparse_embedding") | Variant(also=("GRAD-20",)),
    *models("moe", "dataclass_output", "nested", "rank_branch", "two_heads", "many_small_layers", "mixed_dtypes"),
    model("complex"),
    model("frozen") | Variant(also=("GRAD-19",)),
    *models("batchnorm_mlp", "channels_last_cnn", "unused"),
)
_EITHER_VIEW = (NO_VIEW, VIEW)


def _train(requirement: str, slug: str, worlds: Worlds, *axes: Axis, **rest: Any) -> Iterator[Scenario]:
    rest.setdefault("schedule", (Step(), Step(), Step()))
    yield from _grid(requirement, slug, "train", worlds, *axes, **rest)


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _means()
    yield from _sizes()
    yield from _dtypes()
    views = (NO_VIEW | Variant(also=("GRAD-07", "GRAD-09")), VIEW | Variant(also=("GRAD-07", "GRAD-08")))
    yield from _grid("GRAD-06", "", "gradient_layout", (1, 2, 3), each("module", MODULES), views)
    for requirement, module, to in (
        ("GRAD-06", "volume", "to_channels_last"),
        ("GRAD-06", "channels_last", "to_contiguous"),
        ("GRAD-05", "linear", "to_double"),
    ):
        moments = [arguments(f"{to}-after-{after}".replace("_", "-"), conversion=to, after=after) for after in (0, 1)]
        asked = arguments(module=module)
        yield from _grid(requirement, module.replace("_", "-"), "gradient_layout", 2, asked, moments, _EITHER_VIEW)
    for requirement, way in (("GRAD-08", VIEW), ("GRAD-09", PLAIN)):
        double = fields("double", dtype="float64") | arguments(module="linear")
        yield from _grid(requirement, "", "gradient_layout", 2, way.named(""), double)
    yield from _zero_grad()
    yield from _autograd_uses()
    recoveries = each("recovery", ("none", "update_process_group"))
    yield from _grid("GRAD-17", "exception-recovery", "exception_in_backward", 2, recoveries, _EITHER_VIEW, ENDS_SOON)
    yield from _grid("GRAD-18", "replaced", "replaced_parameter", 2, (PLAIN, UNUSED), ENDS_SOON)
    ways = (PLAIN.named("one-bucket"), EACH_ALONE.named("many-buckets"), VIEW)
    yield from _grid("GRAD-29", "read-at-once", "autograd_use", (2, 4), ways, arguments={"use": "ordinary"})
    yield from _frozen()
    yield from _changed()
    yield from _stand_ins()
    yield from _transforms()
    yield from _lazy_bits()
    yield from _shared_outputs()
    yield from _returned_tensors()
    yield from _shared_memory()
    rows = each("rows", ("all", "first", "none"))
    yield from _grid(
        "GRAD-46", "", "sparse_sums", (2, 3), rows, (PLAIN, VIEW), needs=("sparse_gradients",), also=("GRAD-20",)
    )
    bags = model("sparse_bags")
    yield from _train("GRAD-20", "", (2, 3), bags, (PLAIN, VIEW, UNUSED), needs=("sparse_gradients",))
    yield from _overflows()
    yield from _local_hooks()
    yield from _neighbours()
    yield from _kept_graphs()
    yield from _dropped()
    yield from _apart()


def _means() -> Iterator[Scenario]:
    for trained in MODELS:
        yield from _train("GRAD-01", "", (1, 2, 3, 4), trained)
        yield from _train("GRAD-03", "", (2, 3), VIEW, trained, needs=("gradient_as_bucket_view",))
    yield from _train("GRAD-01", "", 2, model("mlp"), [fields(f"seed{seed}", seed=seed) for seed in (1, 2)])
    copied = models("mlp", "cnn", "mixed_dtypes", "moe", "many_small_layers")
    yield from _train("GRAD-04", "batched", 2, copied, _EITHER_VIEW, options={"batched_grad_copy": True})
    ways = (PLAIN.named("default"), VIEW, capped("small-buckets", 0.002), UNUSED)
    yield from _grid("GRAD-02", "", "agreement", (2, 3, 4), ways)
    yield from _grid("GRAD-25", "", "gradient_values", (2, 3, 4), each("values", ["not_finite"]))
    yield from _grid("GRAD-25", "", "gradient_values", (2, 3), each("values", ["signed_zeros"]), _EITHER_VIEW)
    yield from _grid("GRAD-26", "", "gradient_values", (2, 4), each("values", ["large"]), _EITHER_VIEW)


def _sizes() -> Iterator[Scenario]:
    ways = (
        PLAIN.named("plain"),
        capped("alone", 0.001),
        UNUSED,
        STATIC,
        fields("half", dtype="float16", schedule=(Step(), Step())),
        fields("local", schedule=(Step(local_backwards=2), Step(), Step())),
        fields("kept", schedule=(Step(), Step(zero_grad="keep"), Step(zero_grad="zeros"))),
    )
    yield from _train("GRAD-37", "", (2, 3), model("wide").named(""), ways, _EITHER_VIEW)


def _dtypes() -> Iterator[Scenario]:
    others = dtypes("float64", "float16", "bfloat16")
    two_steps = fields(schedule=(Step(), Step()))
    yield from _train("GRAD-05", "", (2, 3), models("mlp", "many_small_layers", "frozen"), others, two_steps)
    yield from _train("GRAD-05", "", 4, model("mlp"), others, VIEW, two_steps)
    yield from _train("GRAD-05", "", 2, models("complex", "mixed_dtypes"), capped("small-buckets", 0.0001))
    for way, worlds in ((PLAIN, (1, 2, 3, 4)), (VIEW, (2, 3)), (UNUSED, (2, 3)), (EACH_ALONE, (2, 3))):
        yield from _grid("GRAD-05", "every-kind", "parameter_kinds", worlds, way, arguments={"judge": "grad"})
        yield from _grid("GRAD-06", "every-kind", "parameter_kinds", 2, way, arguments={"judge": "strides"})
    tables = arguments(judge="grad", sparse=["float32", "float64"]) | Variant(needs=("sparse_gradients",))
    yield from _grid("GRAD-20", "every-kind", "parameter_kinds", (2, 3), tables, also=("GRAD-05",))


def _zero_grad() -> Iterator[Scenario]:
    ways = [fields(way, schedule=(Step(zero_grad=way),) * 3) for way in ("zeros", "keep")]
    yield from _train("GRAD-10", "", 2, models("mlp", "gpt", "mixed_dtypes", "channels_last_cnn"), ways, _EITHER_VIEW)
    mixed = (Step(), Step(zero_grad="zeros"), Step(zero_grad="none"), Step(zero_grad="keep"), Step(zero_grad="zeros"))
    yield from _train("GRAD-10", "", (3, 4), model("mlp"), fields("mixed", schedule=mixed), _EITHER_VIEW)


#: Requirement -> uses.
_USES = {
    "GRAD-11": ("tensor_hooks",),
    "GRAD-12": ("gradient_set_before",),
    "GRAD-13": ("create_graph", "create_graph_idle"),
    "GRAD-14": ("retain_graph",),
    "GRAD-15": ("autograd_grad_first", "autograd_grad_on_one_rank", "gradient_penalty"),
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
        searching = UNUSED | Variant(also=("UNUSED-07",) if requirement == "GRAD-30" else ())
        # The search cannot look into reentrant checkpoints, as torch documents.
        every_way = (PLAIN.at(2, 3), VIEW) if requirement == "GRAD-28" else (PLAIN.at(2, 3), VIEW, searching)
        for use in uses:
            ways = (searching, searching | VIEW) if use.endswith("idle") else every_way
            program = "refusable_use" if USES[use].refusal else "autograd_use"
            yield from _grid(requirement, dashed(use), program, 2, ways, ENDS_SOON, arguments={"use": use})
            if USES[use].build is layers:
                large = arguments("large", use=use, hidden=9000)  # one gradient of 36,000 elements, one of 18,000
                yield from _grid(requirement, dashed(use), program, 2, (PLAIN, VIEW), large, ENDS_SOON)
    held = each("use", [use for use in USES if use.startswith("gradient_held")])
    in_place = (PLAIN.at(2, 3), EACH_ALONE, UNUSED, STATIC, Variant("batched", {"batched_grad_copy": True}))
    yield from _grid("GRAD-48", "", "autograd_use", 2, held, in_place, ENDS_SOON)


#: What a wrapped module is changed under.
_CHANGED_UNDER = (PLAIN, VIEW, EACH_ALONE, UNUSED, (UNUSED | VIEW | EACH_ALONE).named("unused-view"), STATIC)
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
    }
    moments = each("moment", MOMENTS)
    for slug, (world_size, plan) in plans.items():
        frozen = arguments(f"{slug}-before", frozen=plan)
        ways = _CHANGED_UNDER if slug == "everywhere" else _CHANGED_UNDER[:-1]
        yield from _grid("GRAD-32", "", "frozen_parameters", world_size, frozen, moments, ways, ENDS_SOON)
    kept = arguments("everywhere-kept", frozen=plans["everywhere"][1], keeps=True)
    yield from _grid("GRAD-32", "", "frozen_parameters", 2, kept, moments, (PLAIN, VIEW, UNUSED | VIEW), ENDS_SOON)


def _changed() -> Iterator[Scenario]:
    ways = [
        way | arguments(steps_before=0 if way is VIEW else 2, accumulates=way is EACH_ALONE) for way in _CHANGED_UNDER
    ]
    unknown = each("change", UNKNOWN)
    yield from _grid("GRAD-33", "", "unknown_parameters", 2, unknown, ways, ENDS_SOON, min_collectives=0)
    replaced = each("change", ("replaced_parameter", "replaced_layer"))
    frozen = (arguments("frozen-on-one", frozen_on=[0]), arguments("frozen", frozen_on=[0, 1]))
    after = UNUSED | arguments(steps_before=2)
    yield from _grid("GRAD-18", "", "unknown_parameters", 2, replaced, frozen, after, ENDS_SOON, min_collectives=0)
    harmless = (*each("change", HARMLESS), arguments("converted-later", change="converted_and_back", after=1))
    yield from _grid("GRAD-34", "", "harmless_change", 2, harmless, _CHANGED_UNDER[:4], ENDS_SOON)


def _shared_memory() -> Iterator[Scenario]:
    ways = (PLAIN, EACH_ALONE, VIEW | EACH_ALONE)
    yield from _grid("GRAD-36", "views-of-one", "shared_memory", 2, ways)


def _shared_outputs() -> Iterator[Scenario]:
    """Yield outputs that share memory; a rank that uses no parameter takes part where that is allowed."""
    shared, beside = each("shared", SHARED), (arguments(beside=False), arguments("beside", beside=True))
    used, of_rank_0, by_turns = each("idle", IDLE)
    yield from _grid("GRAD-44", "", "shared_outputs", 2, shared, beside, (PLAIN, UNUSED, STATIC), used)
    yield from _grid("GRAD-44", "", "shared_outputs", (2, 3), shared, beside, UNUSED, by_turns)
    yield from _grid("GRAD-44", "", "shared_outputs", 2, shared, beside, STATIC, of_rank_0)


def _returned_tensors() -> Iterator[Scenario]:
    handled, beside = each("handled", HANDLED), (arguments(beside=False), arguments("beside", beside=True))
    yield from _grid("GRAD-45", "", "returned_tensors", 2, handled, beside, (UNUSED, STATIC))
    ordinary = [way for way in handled if way.slug != "no-gradient"]  # else every parameter is unused
    yield from _grid("GRAD-45", "", "returned_tensors", 2, ordinary, beside, PLAIN)


def _lazy_bits() -> Iterator[Scenario]:
    ways = (PLAIN, VIEW, UNUSED, EACH_ALONE, VIEW | EACH_ALONE)
    for world_size in (2, 3):
        ranks = (arguments(ranks=list(range(world_size))), arguments("of-one", ranks=[world_size - 1]))
        for case in lazy_bits.CASES:
            yield from _grid(
                "GRAD-41", dashed(case), "lazy_bits", world_size, ways if world_size == 2 else PLAIN, ranks, ENDS_SOON,
                arguments={"case": case}, needs=("complex64",),
            )  # fmt: skip


def _stand_ins() -> Iterator[Scenario]:
    for use in stand_ins.USES:
        ways = [way for way in _CHANGED_UNDER[:5] if use != "one_leaf" or "find_unused_parameters" in way.options]
        yield from _grid("GRAD-35", dashed(use), "stand_ins", 2, ways, ENDS_SOON, arguments={"use": use})


def _transforms() -> Iterator[Scenario]:
    ways = (PLAIN.at(1, 2, 3), VIEW, UNUSED, STATIC, EACH_ALONE.named("alone"))
    first, second, third = (arguments(slug, at=at) for at, slug in enumerate(("first", "second", "third")))
    buffer = arguments("buffer", buffer=True)
    by_one = arguments("by-one", ranks=[0])
    beside, alone = arguments("beside", trains="beside"), arguments("trains-alone", trains="alone")
    kinds = each("transform", TRANSFORMS)
    yield from _grid("GRAD-43", "", "transforms", 2, kinds, second, ways)
    chosen = each("transform", ("grad", "vmap"))
    yield from _grid("GRAD-43", "", "transforms", 2, chosen, (first, third), ways)
    yield from _grid("GRAD-43", "", "transforms", 2, chosen, (first, second), (buffer, by_one, by_one | buffer))
    trained = each("transform", ("grad", "jvp", "vmap", "jacrev"))
    yield from _grid("GRAD-43", "", "transforms", 2, trained, (first, second), beside, ways)
    returning = arguments("returns-parameter", returns_parameter=True)
    of_rows = each("transform", ("grad", "jvp", "vmap"))
    yield from _grid("GRAD-43", "", "transforms", 2, of_rows, second, returning, (PLAIN, UNUSED, STATIC))
    idle = arguments("idle", idle=1)
    yield from _grid(
        "GRAD-43", "", "transforms", 2, each("transform", ("of_stand_ins",)), (first, second), idle, UNUSED
    )
    # The derivative by the inputs leaves the last bias out.
    searching = (UNUSED, UNUSED | VIEW, UNUSED | EACH_ALONE.named("alone"))
    yield from _grid("GRAD-43", "", "transforms", (2, 3), trained, (first, second), alone, searching, (PLAIN, by_one))


def _overflows() -> Iterator[Scenario]:
    alternating, by_rank = arguments(branches="alternating"), arguments(branches="by_rank")
    local = arguments(branches="both", local=2) | Variant(needs=("no_sync",))
    joining = arguments(joins=True) | Variant(needs=("join",))
    both_joining = arguments(branches="both") | joining
    ways = (
        UNUSED | alternating,
        UNUSED | by_rank.named("by-some"),
        UNUSED | arguments("by-all", branches="one"),
        UNUSED | alternating | arguments("zeroed", set_to_none=False),
        UNUSED | EACH_ALONE.named("alone") | alternating,
        UNUSED | alternating | Variant("local", arguments={"local": 1}, needs=("no_sync",)),
        UNUSED | alternating | Variant("hook", arguments={"hook": True}, needs=("comm_hook",)),
        STATIC | by_rank,
        capped("join", 25.0) | both_joining,
        EACH_ALONE.named("join-alone") | both_joining,
        UNUSED.named("join-unused") | alternating | joining,
        capped("local", 25.0) | local,
    )
    ranks = (arguments(ranks=[1]).at(2), arguments(ranks=[0, 1, 2]).at(3))
    yield from _grid("GRAD-38", "", "overflowed_step", (), ways, _EITHER_VIEW, ranks)


def _local_hooks() -> Iterator[Scenario]:
    alone = EACH_ALONE.named("alone")
    unused = UNUSED | arguments(branches="by_rank")
    local = Variant("local", arguments={"local": 1}, needs=("no_sync",))
    ways = (PLAIN.at(2, 3), VIEW, alone, alone | VIEW, STATIC, unused, unused | VIEW, local, local | VIEW)
    for moment in MOMENTS_OF_HOOKS:
        for kind in each("kind", KINDS_OF_HOOKS):
            # What a tensor hook returns reaches the reducer in one way, whatever its options.
            tried = ways[:1] if kind.slug == "returns" else ways
            yield from _grid("GRAD-39", moment, "local_hooks", 2, kind, tried, arguments={"moment": moment})
    halves = [arguments(f"of-two-{first}", of_two=first) for first in (0, 1)]
    shared = arguments("shared", shared=True)
    for moment in MOMENTS_OF_HOOKS[1:]:
        kinds = each("kind", KINDS_OF_HOOKS[1:])
        yield from _grid("GRAD-39", moment, "local_hooks", 2, kinds, EACH_ALONE | shared, arguments(moment=moment))
        when = arguments(moment=moment)
        yield from _grid("GRAD-39", moment, "local_hooks", 2, kinds, halves, (PLAIN, VIEW), when)


def _apart() -> Iterator[Scenario]:
    layers = model("many_small_layers").named("")
    local = Variant("local", needs=("no_sync",), fields={"schedule": (Step(local_backwards=1), Step())})
    ways = (
        layers,
        layers | VIEW,
        layers | EACH_ALONE.named("alone"),
        layers | STATIC,
        model("moe").named("unused"),
        model("mixed_dtypes").named("dtypes"),
        model("batchnorm_mlp").named("buffers"),
        layers | local,
    )
    # One at a time: to start interpreters costs seconds, which all of these share.
    yield from _train("GRAD-40", "interpreters", 2, ways, apart=True, deadline_s=60.0)


def _neighbours() -> Iterator[Scenario]:
    """Yield two wrappers beside each other, of which every other step may hold one within its own `no_sync`."""
    alone = EACH_ALONE.named("alone")
    layouts, local = each("layout", ("side_by_side", "separate")), each("local", ("none", "first", "last"))
    for way in (PLAIN.at(2, 3), VIEW, alone, alone | VIEW, UNUSED):
        yield from _grid("GRAD-24", "neighbours", "company", 2, Variant(needs=("no_sync",)), way, layouts, local)


def _kept_graphs() -> Iterator[Scenario]:
    local = arguments("local", local=True) | Variant(needs=("no_sync",))
    yield from _grid("GRAD-47", "", "kept_graph", 2, (PLAIN, UNUSED, STATIC), (PLAIN, local))


def _dropped() -> Iterator[Scenario]:
    ways = (PLAIN.at(2, 3), VIEW, EACH_ALONE, UNUSED.at(2, 3), STATIC)
    kept = (PLAIN, arguments("output-kept", keeps=True))
    yield from _grid("GRAD-42", "", "backward_without_wrapper", 2, each("way", DROPPED), kept, ways)
    nested = arguments("nested", nested=True) | Variant(needs=("ignored_parameters",))
    bare = arguments("bare", bare=True)
    yield from _grid("GRAD-42", "dropped", "backward_without_wrapper", 2, (bare, bare | nested), ways, ENDS_SOON,
                     arguments={"way": "dropped"})  # fmt: skip
    alone = each("way", ["kept"]), (PLAIN, arguments("probed", probed=True))
    yield from _grid("GRAD-49", "", "backward_without_wrapper", 2, *alone, ways, needs=("no_sync",))
