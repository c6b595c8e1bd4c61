"""Scenarios of chapter comm_hooks: user functions that replace the all-reduce, and torch's ready-made ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from conformance.chapters.comm_hooks.hook_calls import ANSWERS, CALLABLES
from conformance.chapters.comm_hooks.hook_registration import MISUSES
from conformance.chapters.comm_hooks.ready_made_hooks import HOOKS
from conformance.chapters.in_chapter import in_chapter
from conformance.models.catalogue import get_fixture
from conformance.own_mistake import certain
from conformance.scenario import Scenario, Step

_of_chapter = in_chapter("comm_hooks")

_VIEW: dict[str, Any] = {"gradient_as_bucket_view": True}
_FIND: dict[str, Any] = {"find_unused_parameters": True}
_STATIC: dict[str, Any] = {"static_graph": True}
_SMALL: dict[str, Any] = {"bucket_cap_mb": 0.00005}
_LAYOUTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("", {}), ("-small", _SMALL), ("-view", _VIEW), ("-small-view", {**_SMALL, **_VIEW}),
)  # fmt: skip


def _scenario(requirement: str, slug: str, program: str, world_size: int, **rest: Any) -> Scenario:
    rest.setdefault("deadline_s", 8.0)
    return _of_chapter(requirement, slug.replace("_", "-"), program, world_size, needs=("comm_hook",), **rest)


def _calls(
    requirement: str, slug: str, world_size: int, *judge: str, options: Mapping[str, Any] | None = None, **rest: Any
) -> Scenario:
    """Return a scenario of program `hook_calls`; `rest` are further arguments of it."""
    arguments = {"answer": "average", "judge": list(judge), **rest}
    return _scenario(requirement, slug, "hook_calls", world_size, arguments=arguments, options=dict(options or {}))


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _what_hooks_see()
    yield from _what_hooks_are()
    yield from _ready_made()
    yield from _power_sgd()
    yield from _misuse()
    yield from _copies()
    yield from _buffer_hooks()


#: Requirement -> the aspect of `hook_calls` that shows it, and the hook's answer.
_SEEN = {
    "HOOK-01": ("raw", "sum"),
    "HOOK-03": ("order", "average"),
    "HOOK-05": ("surface", "identity"),
    "HOOK-06": ("same_buckets", "average"),
    "HOOK-07": ("state", "identity"),
}


def _what_hooks_see() -> Iterator[Scenario]:
    for requirement, (aspect, answer) in _SEEN.items():
        for suffix, options in _LAYOUTS:
            for world_size in (2, 3, 4) if suffix in ("", "-small") else (2,):
                yield _calls(requirement, f"{aspect}{suffix}", world_size, aspect, answer=answer, options=options)
    for suffix, options in _LAYOUTS:
        for world_size in (2, 3) if suffix in ("", "-small") else (2,):
            yield _calls("HOOK-04", f"once{suffix}", world_size, "once", options=options)
            yield _calls("HOOK-04", f"accumulation{suffix}", world_size, "once", "raw", options=options,
                         local_backwards=2)  # fmt: skip
            unused = {**_FIND, **options}
            yield _calls("HOOK-09", f"unused{suffix}", world_size, options=unused, unused=True)
            yield _calls("HOOK-01", f"unused{suffix}", world_size, "raw", options=unused, unused=True)
            saving = {**unused, "skip_all_reduce_unused_params": True}
            yield _calls("HOOK-03", f"skipping{suffix}", world_size, "order", options=saving, unused=True)
            static = {**_STATIC, **options}
            yield _calls("HOOK-37", f"static{suffix}", world_size, "once", "order", "raw", options=static)
            yield _calls("HOOK-37", f"static-unused{suffix}", world_size, "order", options=static, unused=True)
    for suffix, options in (("", _VIEW), ("-small", {**_SMALL, **_VIEW})):
        for world_size in (2, 3):
            for answer in ("average", "in_place", "new_tensor"):
                yield _calls("HOOK-08", f"{answer}{suffix}", world_size, "storage", answer=answer, options=options)


def _what_hooks_are() -> Iterator[Scenario]:
    for answer in ANSWERS:
        for suffix, options in _LAYOUTS:
            for world_size in (2, 3, 4) if not options else (2,):
                yield _calls("HOOK-02", f"{answer}{suffix}", world_size, answer=answer, options=options)
    requirements = {"HOOK-10": ("lambda", "method", "object", "partial"),
                    "HOOK-11": ("other_name", "positional", "star"),
                    "HOOK-12": ("annotated", "postponed")}  # fmt: skip
    certain({kind for kinds in requirements.values() for kind in kinds} == set(CALLABLES), "every kind is tried")
    for requirement, kinds in requirements.items():
        for kind in kinds:
            for world_size in (1, 2):
                yield _calls(requirement, kind, world_size, "state", callable=kind)
    for step in (1, 2):
        for suffix, options in _LAYOUTS:
            yield _calls("HOOK-13", f"before-step{step}{suffix}", 2, "raw", answer="new_tensor", registered_at=step,
                         options=options)  # fmt: skip
    mixed = ["float32", "float64"]
    for suffix, options in _LAYOUTS:
        for world_size in (2, 3):
            yield _calls("HOOK-14", f"dtypes{suffix}", world_size, "once", "order", options=options, dtypes=mixed)
        yield _calls("HOOK-14", f"frozen{suffix}", 2, "once", "raw", options=options, frozen=[1, 5])
        yield _calls("HOOK-14", f"alone{suffix}", 1, "once", "order", "raw", answer="new_tensor", options=options)


#: Requirement -> the hooks of `ready_made_hooks` that show it, and the gradients they are tried with.
_TRIED = {
    "HOOK-16": (("fp16", "fp16_type", "builtin_fp16", "fp16_wrapper"), "small"),
    "HOOK-17": (("fp16", "builtin_fp16", "fp16_wrapper"), "large"),
    "HOOK-18": (("bf16", "bf16_wrapper"), "small"),
    "HOOK-19": (("noop", "noop_type", "fp16_wrapped_noop"), "small"),
    "HOOK-20": (("post_local", "post_local_silent"), "small"),
    "HOOK-24": (("quantised_tensor", "quantised_channel"), "bytes"),
}


def _ready_made() -> Iterator[Scenario]:
    averaging = ("allreduce", "allreduce_type", "builtin_allreduce")
    tried = {hook for hooks, _ in _TRIED.values() for hook in hooks}
    certain({*tried, *averaging} == set(HOOKS), "every hook is tried")
    for requirement, (hooks, gradients) in _TRIED.items():
        for hook in hooks:
            for suffix, options in _LAYOUTS:
                if gradients == "bytes" and "bucket_cap_mb" in options:
                    continue  # their callbacks communicate, in an order that gloo's threads leave open
                for world_size in (2,) if options else (2, 4) if gradients == "large" else (2, 3, 4):
                    yield _scenario(requirement, f"{hook}{suffix}", "ready_made_hook", world_size, options=options,
                                    arguments={"hook": hook, "gradients": gradients})  # fmt: skip
    accumulate = (Step(), Step(local_backwards=2), Step(), Step(local_backwards=1))
    for hook in averaging:
        for slug, model, options, schedule in (
            ("mlp", "mlp", {}, (Step(),) * 3),
            ("accumulation", "mlp", {}, accumulate),
            ("view", "many_small_layers", {**_VIEW, "bucket_cap_mb": 0.0005}, (Step(),) * 3),
            ("static", "unused", _STATIC, (Step(),) * 3),
            ("unused", "moe", _FIND, (Step(),) * 3),
            ("sparse", "sparse_embedding", {}, (Step(),) * 3),
            ("dtypes", "mixed_dtypes", {}, (Step(),) * 3),
            ("buffers", "batchnorm_mlp", {}, (Step(),) * 3),
        ):  # fmt: skip
            for world_size in (2, 3) if hook == "allreduce" else (2,):
                yield _scenario("HOOK-15", f"{hook}-{slug}", "hooked_training", world_size, model=model,
                                dtype=get_fixture(model).dtypes[0], options=options, schedule=schedule,
                                arguments={"hook": hook})  # fmt: skip
    for shard_buckets in (False, True):
        small = {"bucket_cap_mb": 0.0005}  # torch cannot shard a single bucket
        for slug, options in (("", {}), ("-small", small), ("-view", {**small, **_VIEW})):
            for world_size in (2, 3) if options or not shard_buckets else ():
                yield _scenario("HOOK-25", f"{'sharded' if shard_buckets else 'whole'}{slug}", "zero_overlap",
                                world_size, options=options, arguments={"shard_buckets": shard_buckets})  # fmt: skip


def _power_sgd() -> Iterator[Scenario]:
    for world_size in (2, 3, 4):
        enough = {"matrix_approximation_rank": world_size}
        for slug, state in (
            ("enough", enough),
            ("seed", {**enough, "random_seed": 7}),
            ("cold-start", {**enough, "warm_start": False}),
            ("no-feedback", {**enough, "use_error_feedback": False}),
            ("same-shapes", {**enough, "batch_tensors_with_same_shape": True}),
        ):
            yield _power("HOOK-21", slug, world_size, state, gradients="low_rank")
        yield _power("HOOK-22", "batched", world_size, {"matrix_approximation_rank": 2}, batched=True)
        for slug, rank, rest in (("rank1", 1, {}), ("rank2", 2, {}), ("rank3", 3, {}), ("half", 2, {"half": True}),
                                 ("batched", 1, {"batched": True})):  # fmt: skip
            yield _power("HOOK-23", slug, world_size, {"matrix_approximation_rank": rank}, **rest)
        yield _power("HOOK-23", "view", world_size, {"matrix_approximation_rank": 1}, options=_VIEW)


def _power(requirement: str, slug: str, world_size: int, state: Mapping[str, Any], **rest: Any) -> Scenario:
    options = rest.pop("options", {})
    arguments = {"gradients": "full", "state": dict(state), **rest}
    return _scenario(requirement, slug, "power_sgd", world_size, options=options, arguments=arguments)


def _misuse() -> Iterator[Scenario]:
    requirements = {
        "HOOK-26": ("twice", "builtin_then_hook", "hook_then_builtin"),
        "HOOK-27": ("not_callable", "bucket_annotation", "return_annotation"),
        "HOOK-28": ("returns_number", "returns_nothing", "returns_tensor"),
        "HOOK-29": ("future_of_text", "future_of_wrong_size"),
        "HOOK-30": ("raises", "future_raises"),
    }
    certain(
        {misuse for misuses in requirements.values() for misuse in misuses} == set(MISUSES), "every misuse is tried"
    )
    for requirement, misuses in requirements.items():
        for misuse in misuses:
            for suffix, options in (("", {}), ("-view", _VIEW)):
                for world_size in (2, 3) if not options else (2,):
                    yield _scenario(requirement, f"{misuse}{suffix}", "hook_misuse", world_size, options=options,
                                    arguments={"misuse": misuse})  # fmt: skip


def _copies() -> Iterator[Scenario]:
    for copying in ("deepcopy", "pickle"):
        for after_steps in (0, 2):
            for builtin in (False, True):
                slug = f"{copying}{'-builtin' * builtin}-after{after_steps}"
                for world_size in (2, 3):
                    yield _scenario(
                        "HOOK-31", slug, "hook_copy", world_size,
                        arguments={"copy": copying, "after_steps": after_steps, "builtin": builtin},
                    )  # fmt: skip
    for world_size in (1, 2):
        yield _scenario("HOOK-32", "name", "hook_in_logging", world_size)


def _buffer_hooks() -> Iterator[Scenario]:
    for location in ("", "PRE_FORWARD", "POST_FORWARD"):
        for world_size in (2, 3, 4):
            name = location.lower() or "default"
            yield _buffers("HOOK-33", name, world_size, location)
            if location != "PRE_FORWARD":  # its futures may come after the forward that they are for
                yield _buffers("HOOK-34", name, world_size, location, futures=True)
                yield _buffers("HOOK-34", f"{name}-large", world_size, location, futures=True, length=100_000)
            yield _buffers("HOOK-35", name, world_size, location, local_backwards=2)
        yield _buffers("HOOK-33", f"{name}-view", 2, location, options=_VIEW)
        yield _buffers("HOOK-33", f"{name}-static", 2, location, options=_STATIC)
    for world_size in (1, 2):
        yield _scenario("HOOK-36", "text", "buffer_hook_misuse", world_size)
    for location in ("PRE_FORWARD", "POST_FORWARD"):
        yield from _saved_buffers(location.lower().replace("_", "-"), {"location": location})


def _saved_buffers(slug: str, where: dict[str, Any]) -> Iterator[Scenario]:
    for forwards in (1, 2):
        arguments = {**where, "forwards": forwards}
        for world_size in (2, 3):
            name = f"{slug}-{forwards}-forwards"
            yield _scenario("HOOK-38", name, "hooked_saved_buffer", world_size, arguments=arguments)
        yield _scenario("HOOK-38", f"norm-{name}", "hooked_norm", 2, arguments=arguments)
        for suffix, options in (("view", _VIEW), ("static", _STATIC)):
            yield _scenario(
                "HOOK-38", f"{name}-{suffix}", "hooked_saved_buffer", 2, options=options, arguments=arguments
            )
        for dtype in ("float64", "int64", "complex64"):
            kind = {**arguments, "dtype": dtype}
            yield _scenario("HOOK-38", f"{name}-{dtype}", "hooked_saved_buffer", 2, arguments=kind).replace(
                needs=("comm_hook", *(("complex64",) if dtype == "complex64" else ()))
            )
    joined = {**where, "join": True}
    joining = _scenario("HOOK-38", f"{slug}-join", "hooked_saved_buffer", 2, arguments=joined)
    yield joining.replace(needs=("comm_hook", "join"))


def _buffers(requirement: str, slug: str, world_size: int, location: str, **rest: Any) -> Scenario:
    options = rest.pop("options", {})
    arguments = {"location": location, **rest}
    return _scenario(requirement, slug, "buffer_hooks", world_size, options=options, arguments=arguments)
