"""Scenarios of chapter mixed_precision: computing and reducing in a lower precision than that of the parameters."""

from collections.abc import Iterator
from typing import Any

from conformance.chapters.grid import Axis, Grid, Worlds
from conformance.chapters.variants import (
    ENDS_SOON,
    LOCAL_BUFFERS,
    NO_UNUSED,
    PLAIN,
    STATIC,
    UNUSED,
    VIEW,
    Variant,
    arguments,
    capped,
    dashed,
    each,
    fields,
    model,
    models,
    options,
)
from conformance.scenario import Scenario, Step

_grid = Grid("mixed_precision", Variant(needs=("mixed_precision",), fields={"min_collectives": 1}))


def _precision(slug: str, **dtypes: Any) -> Variant:
    return options(slug, mixed_precision=dtypes)


_HALF = _precision("half", param_dtype="float16", buffer_dtype="float16")
_BRAIN = _precision("bfloat16", param_dtype="bfloat16", buffer_dtype="bfloat16")
_BOTH = (_HALF, _BRAIN)
_SUMMED_IN_FULL = _precision("to-full", param_dtype="float16", reduce_dtype="float32")
#: The usual precision where another word than its dtype is in the slug.
_IN_HALF = _HALF.named("")


def _train(requirement: str, slug: str, worlds: Worlds, *axes: Axis) -> Iterator[Scenario]:
    yield from _grid(requirement, slug, "mixed_precision_training", worlds, *axes, schedule=(Step(),) * 3)


def _case(requirement: str, case: str, worlds: Worlds, *axes: Axis) -> Iterator[Scenario]:
    yield from _grid(requirement, dashed(case), "mixed_precision_case", worlds, *axes, arguments={"case": case})


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _models()
    yield from _precisions()
    yield from _cases()
    yield from _grid("MIXED-05", "every-call", "mixed_precision_calls", 2, _BOTH)
    yield from _wishes()
    training = UNUSED.named("")
    modes = (training, training | Variant("evaluating", arguments={"evaluates": True}, fields={"min_collectives": 0}))
    for requirement, asks in (("MIXED-24", "cast"), ("MIXED-25", "order"), ("MIXED-26", "kept")):
        yield from _grid(requirement, "", "mixed_precision_casts", 2, each("asks", [asks]), _BOTH, modes)
    beside = arguments("beside", asks="beside", traces=True)
    yield from _grid("MIXED-25", "", "mixed_precision_casts", 2, beside, _BOTH, modes)
    yield from _surface()


def _models() -> Iterator[Scenario]:
    mlp = model("mlp")
    others = models("cnn", "gpt", "many_small_layers", "nested", "dataclass_output", "frozen")
    yield from _train("MIXED-01", "", 2, (mlp.at(2, 3), *others), _BOTH)
    yield from _train("MIXED-01", "", (1, 4), mlp, _HALF)
    for world_size in (2, 3):
        yield from _train("MIXED-12", "", world_size, model("lstm"), _BOTH)
    yield from _train("MIXED-12", "", 2, model("lstm"), VIEW, _BRAIN.named(""))
    yield from _train("MIXED-15", "", 2, models("moe", "rank_branch", "two_heads", "unused"), _BOTH)
    yield from _train("MIXED-15", "", 3, model("moe"), _HALF)
    yield from _train("MIXED-15", "", 2, model("unused"), NO_UNUSED | STATIC, _IN_HALF)
    yield from _train("MIXED-15", "", 2, mlp, STATIC, _BRAIN.named(""))
    layered = models("mlp", "cnn", "many_small_layers")
    yield from _train("MIXED-16", "", 2, layered, (VIEW, capped("small-buckets", 0.0005)), _IN_HALF)
    accumulating = fields("no-sync", schedule=(Step(local_backwards=1),) * 3)
    yield from _train("MIXED-14", "", (2, 3), mlp, accumulating, (PLAIN, VIEW, STATIC), _IN_HALF)
    zeroing = [fields(way, schedule=(Step(), Step(zero_grad=way))) for way in ("zeros", "keep")]
    yield from _train("MIXED-14", "", 2, mlp, zeroing, (PLAIN, VIEW), _IN_HALF)


def _precisions() -> Iterator[Scenario]:
    mlp = model("mlp").named("")
    precisions = (
        _precision("half-for-all", param_dtype="float16"),
        _precision("half-to-full", param_dtype="float16", reduce_dtype="float32"),
        _precision("half-to-bfloat16", param_dtype="float16", reduce_dtype="bfloat16"),
        _precision("bfloat16-to-full", param_dtype="bfloat16", reduce_dtype="float32"),
        _precision("full-to-double", reduce_dtype="float64"),
    )
    yield from _train("MIXED-06", "", (2, 3), mlp, precisions)
    yield from _train("MIXED-06", "half", 2, mlp, _SUMMED_IN_FULL, VIEW)
    partial = (
        _precision("only-reduce", reduce_dtype="bfloat16"),
        _precision("nothing"),
        _precision("only-buffers", buffer_dtype="float64"),
    )
    yield from _train("MIXED-09", "", (2, 3), mlp, partial)
    norm = model("batchnorm_mlp").named("batchnorm")
    yield from _train("MIXED-07", "", (2, 3), norm, _BOTH)
    yield from _train("MIXED-07", "", 2, norm, LOCAL_BUFFERS.named("local"), _IN_HALF)


def _cases() -> Iterator[Scenario]:
    for requirement, case in (
        ("MIXED-04", "layers"),
        ("MIXED-04", "two_forwards"),
        ("MIXED-04", "frozen"),
        ("MIXED-11", "tied"),
        ("MIXED-13", "checkpoint"),
        ("MIXED-13", "checkpoint_reentrant"),
        ("MIXED-08", "ignored_in_root"),
        ("MIXED-05", "containers"),
        ("MIXED-05", "input_gradient"),
        ("MIXED-22", "two_dtypes"),
        ("MIXED-22", "complex"),
        ("MIXED-02", "evaluating"),
        ("MIXED-02", "interrupted"),
        ("MIXED-27", "frozen_is_written"),
        ("MIXED-27", "written"),
        ("MIXED-27", "written_checkpoint"),
        ("MIXED-28", "lent"),
        ("MIXED-28", "lent_checkpoint"),
        ("MIXED-30", "stand_ins"),
        ("MIXED-30", "stand_ins_checkpoint"),
        ("MIXED-30", "stand_ins_within"),
        ("MIXED-04", "peeking"),
    ):
        also = Variant(also=("MIXED-03", "MIXED-10") if case == "layers" else ())
        yield from _case(requirement, case, (2, 3), _BOTH, also)
    sparse = Variant(needs=("sparse_gradients",))
    yield from _case("MIXED-22", "sparse", 2, sparse, (_precision("", param_dtype="float32"), _BRAIN))
    yield from _case("MIXED-08", "ignored_layer", 2, _IN_HALF)
    yield from _case("MIXED-08", "not_ignored", 2, _IN_HALF)
    searching = _IN_HALF | UNUSED.named("")
    overflow = arguments("overflow", branches="by_rank", ranks=[1])
    for world_size in (2, 3):
        yield from _case("MIXED-15", "branch_by_rank", world_size, searching)
        yield from _case("MIXED-15", "branch_never_used", world_size, (searching, _IN_HALF | STATIC))
        yield from _case("MIXED-14", "two_forwards", world_size, _IN_HALF, UNUSED)
        yield from _grid("MIXED-15", "", "overflowed_step", world_size, _IN_HALF, overflow, (UNUSED, STATIC))
        yield from _case("MIXED-13", "checkpoint_reentrant", world_size, _IN_HALF, STATIC)
    hook = Variant("hook", arguments={"hook": True}, needs=("comm_hook",))
    yield from _case("MIXED-21", "layers", (2, 3), hook, (_HALF, _SUMMED_IN_FULL))


def _wishes() -> Iterator[Scenario]:
    kept = Variant(needs=("full_precision_modules",))
    for precision in _BOTH:
        dtypes = precision.options["mixed_precision"]
        between = _precision(precision.slug, **dtypes, full_precision_modules=["PReLU"])
        yield from _case("MIXED-17", "between", (2, 3), between, kept)
        yield from _case("MIXED-17", "between_checkpoint", 2, between, kept)
        uncast = _precision(precision.slug, **dtypes, cast_forward_inputs=False)
        yield from _case("MIXED-18", "casts_itself", (2, 3), uncast, Variant(needs=("cast_forward_inputs",)))
    # Where nothing is to be cast, a layer of such a type stays in its own precision: double, for one.
    reduced = _precision("only-reduce", reduce_dtype="bfloat16", full_precision_modules=["PReLU"])
    yield from _case("MIXED-09", "between_doubles", 2, reduced, kept)
    whole = _precision("", param_dtype="bfloat16", full_precision_modules=["Sequential"])
    yield from _case("MIXED-17", "within", (2, 3), whole, kept)
    norm = model("batchnorm_mlp").named("batchnorm")
    for dtype in ("float16", "bfloat16"):
        precision = _precision(dtype, param_dtype=dtype, full_precision_modules=["BatchNorm1d"])
        yield from _train("MIXED-17", "", 2, norm, precision, kept)
    norms = _precision("", param_dtype="bfloat16", full_precision_modules=["LayerNorm", "Embedding"])
    yield from _train("MIXED-17", "", 2, model("gpt"), norms, kept)


def _surface() -> Iterator[Scenario]:
    constructed = arguments("constructed", aspect="construct") | Variant(also=("MIXED-07",))
    checkpoint = arguments(aspect="checkpoint")
    for precision in (
        *_BOTH,
        _precision("only-buffers", buffer_dtype="bfloat16"),
        _precision("full-buffers", param_dtype="float16"),
    ):
        for world_size in (1, 2):
            yield from _grid("MIXED-02", "", "mixed_precision_surface", world_size, constructed, precision)
            yield from _grid("MIXED-23", "", "mixed_precision_surface", world_size, precision, checkpoint)
    ignored = [
        arguments(f"{len(names)}-ignored", aspect="construct", ignored=names)
        for names in (["table"], ["table", "layer.bias"])
    ]
    yield from _grid("MIXED-07", "", "mixed_precision_surface", 2, ignored, _BRAIN.named(""))
    yield from _refused("MIXED-19", 2, "integer_param", "integer_reduce", "text", "dtype_alone", "other_object")
    yield from _refused("MIXED-29", 2, "keeps_gradients", "keeps_gradients_as_fsdp")
    yield from _refused("MIXED-20", (2, 3), "reduce_differs", "param_differs", "only_one_rank")


def _refused(requirement: str, worlds: Worlds, *cases: str) -> Iterator[Scenario]:
    refusal = ENDS_SOON | fields(min_collectives=0)
    yield from _grid(requirement, "", "mixed_precision_refusal", worlds, each("case", cases), refusal)
