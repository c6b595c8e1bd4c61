"""Scenarios of chapter mixed_precision: computing and reducing in a lower precision than that of the parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conformance.models.catalogue import get_fixture
from conformance.scenario import Scenario, Step

_HALF: dict[str, Any] = {"param_dtype": "float16", "buffer_dtype": "float16"}
_BRAIN: dict[str, Any] = {"param_dtype": "bfloat16", "buffer_dtype": "bfloat16"}
_VIEW: dict[str, Any] = {"gradient_as_bucket_view": True}
_FIND: dict[str, Any] = {"find_unused_parameters": True}
_STATIC: dict[str, Any] = {"static_graph": True}
_NEEDS = ("mixed_precision",)
_STEPS = (Step(), Step(), Step())


def _scenario(
    requirement: str,
    slug: str,
    program: str,
    world_size: int,
    precision: dict[str, Any],
    *,
    options: dict[str, Any] | None = None,
    needs: tuple[str, ...] = (),
    **rest: Any,
) -> Scenario:
    scenario_id = f"mixed_precision/{requirement}/{slug}-world{world_size}"
    options = {"mixed_precision": precision, **(options or {})}
    return Scenario(
        id=scenario_id, requirements=(requirement,), program=program, world_size=world_size, options=options,
        needs=(*_NEEDS, *needs), **rest,
    )  # fmt: skip


def _train(
    requirement: str, slug: str, model: str, world_size: int, precision: dict[str, Any], **rest: Any
) -> Scenario:
    fixture = get_fixture(model)
    options = {**(_FIND if fixture.has_unused else {}), **rest.pop("options", {})}
    rest.setdefault("schedule", _STEPS)
    return _scenario(
        requirement, slug, "mixed_precision_training", world_size, precision, model=model, options=options, **rest
    )


def _case(requirement: str, case: str, world_size: int, precision: dict[str, Any], **rest: Any) -> Scenario:
    """Return a scenario of program `mixed_precision_case`; `slug` is added to the case's name."""
    slug = case.replace("_", "-") + rest.pop("slug", "")
    arguments = {"case": case, **rest.pop("arguments", {})}
    return _scenario(requirement, slug, "mixed_precision_case", world_size, precision, arguments=arguments, **rest)


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _models()
    yield from _precisions()
    yield from _cases()
    yield from _calls()
    yield from _wishes()
    yield from _casts()
    yield from _surface()


def _models() -> Iterator[Scenario]:
    for model in ("mlp", "cnn", "gpt", "many_small_layers", "nested", "dataclass_output", "frozen"):
        for slug, precision in (("half", _HALF), ("bfloat16", _BRAIN)):
            for world_size in (2, 3) if model == "mlp" else (2,):
                yield _train("MIXED-01", f"{model.replace('_', '-')}-{slug}", model, world_size, precision)
    for world_size in (1, 4):
        yield _train("MIXED-01", "mlp-half", "mlp", world_size, _HALF)
    for world_size in (2, 3):
        for slug, precision in (("half", _HALF), ("bfloat16", _BRAIN)):
            yield _train("MIXED-12", f"lstm-{slug}", "lstm", world_size, precision)
    yield _train("MIXED-12", "lstm-view", "lstm", 2, _BRAIN, options=_VIEW)
    for model in ("moe", "rank_branch", "two_heads", "unused"):
        for slug, precision in (("half", _HALF), ("bfloat16", _BRAIN)):
            yield _train("MIXED-15", f"{model.replace('_', '-')}-{slug}", model, 2, precision)
    yield _train("MIXED-15", "moe-half", "moe", 3, _HALF)
    yield _train("MIXED-15", "unused-static", "unused", 2, _HALF, options={"find_unused_parameters": False, **_STATIC})
    yield _train("MIXED-15", "mlp-static", "mlp", 2, _BRAIN, options=_STATIC)
    for model in ("mlp", "cnn", "many_small_layers"):
        for slug, options in (("view", _VIEW), ("small-buckets", {"bucket_cap_mb": 0.0005})):
            yield _train("MIXED-16", f"{model.replace('_', '-')}-{slug}", model, 2, _HALF, options=options)
    accumulating = (Step(local_backwards=1),) * 3
    for slug, options in (("", {}), ("-view", _VIEW), ("-static", _STATIC)):
        for world_size in (2, 3):
            yield _train(
                "MIXED-14", f"mlp-no-sync{slug}", "mlp", world_size, _HALF, options=options, schedule=accumulating
            )
    for zero_grad in ("zeros", "keep"):
        for slug, options in (("", {}), ("-view", _VIEW)):
            steps = (Step(), Step(zero_grad=zero_grad))
            yield _train("MIXED-14", f"mlp-{zero_grad}{slug}", "mlp", 2, _HALF, options=options, schedule=steps)


def _precisions() -> Iterator[Scenario]:
    for slug, precision in (
        ("half-for-all", {"param_dtype": "float16"}),
        ("half-to-full", {"param_dtype": "float16", "reduce_dtype": "float32"}),
        ("half-to-bfloat16", {"param_dtype": "float16", "reduce_dtype": "bfloat16"}),
        ("bfloat16-to-full", {"param_dtype": "bfloat16", "reduce_dtype": "float32"}),
        ("full-to-double", {"reduce_dtype": "float64"}),
    ):
        for world_size in (2, 3):
            yield _train("MIXED-06", slug, "mlp", world_size, precision)
    yield _train("MIXED-06", "half-to-full-view", "mlp", 2, {"param_dtype": "float16", "reduce_dtype": "float32"},
                 options=_VIEW)  # fmt: skip
    for slug, precision in (
        ("only-reduce", {"reduce_dtype": "bfloat16"}), ("nothing", {}), ("only-buffers", {"buffer_dtype": "float64"}),
    ):  # fmt: skip
        for world_size in (2, 3):
            yield _train("MIXED-09", slug, "mlp", world_size, precision)
    for slug, precision in (("half", _HALF), ("bfloat16", _BRAIN)):
        for world_size in (2, 3):
            yield _train("MIXED-07", f"batchnorm-{slug}", "batchnorm_mlp", world_size, precision)
    yield _train("MIXED-07", "batchnorm-local", "batchnorm_mlp", 2, _HALF, options={"forward_sync_buffers": False})


def _cases() -> Iterator[Scenario]:
    for requirement, case in (
        ("MIXED-04", "layers"), ("MIXED-04", "two_forwards"), ("MIXED-04", "frozen"), ("MIXED-11", "tied"),
        ("MIXED-13", "checkpoint"), ("MIXED-13", "checkpoint_reentrant"), ("MIXED-08", "ignored_in_root"),
        ("MIXED-05", "containers"), ("MIXED-05", "input_gradient"), ("MIXED-22", "two_dtypes"),
        ("MIXED-22", "complex"), ("MIXED-02", "evaluating"), ("MIXED-02", "interrupted"),
        ("MIXED-27", "frozen_is_written"), ("MIXED-28", "lent"), ("MIXED-28", "lent_checkpoint"),
        ("MIXED-04", "peeking"),
    ):  # fmt: skip
        also = ("MIXED-03", "MIXED-10") if case == "layers" else ()
        for slug, precision in (("-half", _HALF), ("-bfloat16", _BRAIN)):
            for world_size in (2, 3):
                scenario = _case(requirement, case, world_size, precision, slug=slug)
                yield scenario.replace(requirements=(requirement, *also))
    yield _case("MIXED-22", "sparse", 2, {"param_dtype": "float32"}, needs=("sparse",))
    yield _case("MIXED-22", "sparse", 2, _BRAIN, slug="-bfloat16", needs=("sparse",))
    yield _case("MIXED-08", "ignored_layer", 2, _HALF)
    yield _case("MIXED-08", "not_ignored", 2, _HALF)
    for world_size in (2, 3):
        yield _case("MIXED-15", "branch_by_rank", world_size, _HALF, options=_FIND)
        yield _case("MIXED-15", "branch_never_used", world_size, _HALF, options=_FIND)
        yield _case("MIXED-15", "branch_never_used", world_size, _HALF, options=_STATIC, slug="-static")
        yield _case("MIXED-14", "two_forwards", world_size, _HALF, options=_FIND, slug="-unused")
        overflow: dict[str, Any] = {"branches": "by_rank", "ranks": [1]}
        for slug, options in (("unused", _FIND), ("static", _STATIC)):
            yield _scenario(
                "MIXED-15", f"overflow-{slug}", "overflowed_step", world_size, _HALF, options=options,
                arguments=overflow,
            )  # fmt: skip
        yield _case("MIXED-13", "checkpoint_reentrant", world_size, _HALF, options=_STATIC, slug="-static")
    for slug, precision in (("-half", _HALF), ("-to-full", {"param_dtype": "float16", "reduce_dtype": "float32"})):
        for world_size in (2, 3):
            yield _case(
                "MIXED-21", "layers", world_size, precision, slug=f"-hook{slug}", arguments={"hook": True},
                needs=("comm_hook",),
            )  # fmt: skip


def _calls() -> Iterator[Scenario]:
    for slug, precision in (("half", _HALF), ("bfloat16", _BRAIN)):
        yield _scenario("MIXED-05", f"every-call-{slug}", "mixed_precision_calls", 2, precision)


def _wishes() -> Iterator[Scenario]:
    kept = ("full_precision_modules",)
    for slug, precision in (("-half", _HALF), ("-bfloat16", _BRAIN)):
        with_kept = {**precision, "full_precision_modules": ["PReLU"]}
        for world_size in (2, 3):
            yield _case("MIXED-17", "between", world_size, with_kept, slug=slug, needs=kept)
        uncast = {**precision, "cast_forward_inputs": False}
        for world_size in (2, 3):
            yield _case("MIXED-18", "casts_itself", world_size, uncast, slug=slug, needs=("cast_forward_inputs",))
    for dtype in ("float16", "bfloat16"):
        precision = {"param_dtype": dtype, "full_precision_modules": ["BatchNorm1d"]}
        yield _train("MIXED-17", f"batchnorm-{dtype}", "batchnorm_mlp", 2, precision, needs=kept)
    norms = {"param_dtype": "bfloat16", "full_precision_modules": ["LayerNorm", "Embedding"]}
    yield _train("MIXED-17", "gpt", "gpt", 2, norms, needs=kept)


def _casts() -> Iterator[Scenario]:
    for requirement, asks in (("MIXED-24", "cast"), ("MIXED-25", "order"), ("MIXED-26", "kept")):
        for slug, precision in (("half", _HALF), ("bfloat16", _BRAIN)):
            for evaluates in (False, True):
                arguments = {"asks": asks, **({"evaluates": True} if evaluates else {})}
                yield _scenario(
                    requirement, f"{asks}-{slug}{'-evaluating' * evaluates}", "mixed_precision_casts", 2, precision,
                    arguments=arguments, options=_FIND, min_collectives=0 if evaluates else 1,
                )  # fmt: skip
    for slug, precision in (("half", _HALF), ("bfloat16", _BRAIN)):
        for evaluates in (False, True):
            arguments = {"asks": "beside", "traces": True, **({"evaluates": True} if evaluates else {})}
            yield _scenario(
                "MIXED-25", f"beside-{slug}{'-evaluating' * evaluates}", "mixed_precision_casts", 2, precision,
                arguments=arguments, options=_FIND, min_collectives=0 if evaluates else 1,
            )  # fmt: skip


def _surface() -> Iterator[Scenario]:
    for slug, precision in (
        ("half", _HALF), ("bfloat16", _BRAIN), ("only-buffers", {"buffer_dtype": "bfloat16"}),
        ("full-buffers", {"param_dtype": "float16"}),
    ):  # fmt: skip
        for world_size in (1, 2):
            constructed = _scenario(
                "MIXED-02", f"constructed-{slug}", "mixed_precision_surface", world_size, precision,
                arguments={"aspect": "construct"},
            )  # fmt: skip
            yield constructed.replace(requirements=("MIXED-02", "MIXED-07"))
            yield _scenario(
                "MIXED-23", slug, "mixed_precision_surface", world_size, precision, arguments={"aspect": "checkpoint"}
            )
    for ignored in (["table"], ["table", "layer.bias"]):
        yield _scenario(
            "MIXED-07", f"{len(ignored)}-ignored", "mixed_precision_surface", 2, _BRAIN,
            arguments={"aspect": "construct", "ignored": ignored},
        )  # fmt: skip
    for case in ("integer_param", "integer_reduce", "text", "dtype_alone", "other_object"):
        yield _refused("MIXED-19", case, 2)
    for case in ("keeps_gradients", "keeps_gradients_as_fsdp"):
        yield _refused("MIXED-29", case, 2)
    for case in ("reduce_differs", "param_differs", "only_one_rank"):
        for world_size in (2, 3):
            yield _refused("MIXED-20", case, world_size)


def _refused(requirement: str, case: str, world_size: int) -> Scenario:
    return Scenario(
        id=f"mixed_precision/{requirement}/{case.replace('_', '-')}-world{world_size}", requirements=(requirement,),
        program="mixed_precision_refusal", world_size=world_size, arguments={"case": case}, needs=_NEEDS,
        min_collectives=0, deadline_s=8.0,
    )  # fmt: skip
