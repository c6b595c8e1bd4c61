"""Scenarios of chapter comm_hooks: user functions that replace the all-reduce, and torch's ready-made ones."""

from collections.abc import Iterator, Mapping
from typing import Any

from conformance.chapters.comm_hooks.hook_calls import ANSWERS, CALLABLES
from conformance.chapters.comm_hooks.hook_registration import MISUSES
from conformance.chapters.comm_hooks.ready_made_hooks import HOOKS
from conformance.chapters.grid import Axis, Grid, Worlds
from conformance.chapters.variants import (
    EACH_ALONE,
    ENDS_SOON,
    PLAIN,
    SKIPPING,
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
)
from conformance.errors import certain
from conformance.scenario import Scenario, Step

_grid = Grid("comm_hooks", ENDS_SOON | Variant(needs=("comm_hook",)))

_SMALL = capped("small", 0.00005)
_LAYOUTS = (PLAIN, _SMALL, VIEW, _SMALL | VIEW)


def _calls(
    requirement: str, slug: str, worlds: Worlds, *axes: Axis, judge: tuple[str, ...] = (), **given: Any
) -> Iterator[Scenario]:
    asked = {"answer": "average", "judge": list(judge), **given}
    yield from _grid(requirement, slug, "hook_calls", worlds, *axes, arguments=asked)


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _what_hooks_see()
    yield from _what_hooks_are()
    yield from _ready_made()
    yield from _power_sgd()
    yield from _misuse()
    hooks = (arguments(builtin=False), arguments("builtin", builtin=True))
    for copying in each("copy", ("deepcopy", "pickle")):
        for steps in (0, 2):
            after = arguments(f"after{steps}", after_steps=steps)
            yield from _grid("HOOK-31", "", "hook_copy", (2, 3), copying, hooks, after)
    yield from _grid("HOOK-32", "name", "hook_in_logging", (1, 2))
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
    ways = (PLAIN.at(2, 3, 4), _SMALL.at(2, 3, 4), VIEW, _SMALL | VIEW)
    for requirement, (aspect, answer) in _SEEN.items():
        yield from _calls(requirement, dashed(aspect), 2, ways, judge=(aspect,), answer=answer)
    leaving = each("answer", ("exchanged", "in_place", "several_collectives"))
    yield from _calls("HOOK-05", "", 2, leaving, _LAYOUTS, judge=("surface",))
    yield from _calls("HOOK-39", "", 2, each("answer", ANSWERS), _LAYOUTS, judge=("raw", "lists"))
    unused = UNUSED | arguments(unused=True)
    skipping = unused.named("") | SKIPPING
    static_unused = STATIC | arguments("unused", unused=True)
    for way in _LAYOUTS:
        for world_size in (2, 3) if way in (PLAIN, _SMALL) else (2,):
            yield from _calls("HOOK-04", "once", world_size, way, judge=("once",))
            yield from _calls("HOOK-04", "accumulation", world_size, way, judge=("once", "raw"), local_backwards=2)
            yield from _calls("HOOK-09", "", world_size, unused, way)
            yield from _calls("HOOK-09", "doubled", world_size, unused, way, answer="exchanged")
            yield from _calls("HOOK-01", "", world_size, unused, way, judge=("raw",))
            yield from _calls("HOOK-03", "", world_size, skipping, way, judge=("order",))
            last = arguments("last", unused="last")
            yield from _calls("HOOK-03", "", world_size, skipping | last, way, judge=("order",))
            yield from _calls("HOOK-37", "", world_size, STATIC, way, judge=("once", "order", "raw"))
            yield from _calls("HOOK-37", "", world_size, static_unused, way, judge=("order",))
    answers = each("answer", ("average", "in_place", "new_tensor"))
    for way in (VIEW.named(""), (_SMALL | VIEW).named("small")):
        for world_size in (2, 3):
            yield from _calls("HOOK-08", "", world_size, answers, way, judge=("storage",))


def _what_hooks_are() -> Iterator[Scenario]:
    answers = each("answer", [answer for answer in ANSWERS if answer != "with_the_last"])  # HOOK-40
    yield from _calls("HOOK-02", "", 2, answers, (PLAIN.at(2, 3, 4), *_LAYOUTS[1:]))
    for way in _LAYOUTS:
        for world_size in (1, 2, 3) if way is _SMALL else (2,):
            yield from _calls("HOOK-40", "", world_size, (PLAIN, UNUSED, STATIC), way, answer="with_the_last")
    requirements = {
        "HOOK-10": ("lambda", "method", "object", "partial", "closed_over_later"),
        "HOOK-11": ("other_name", "positional", "star"),
        "HOOK-12": ("annotated", "postponed"),
    }
    certain({kind for kinds in requirements.values() for kind in kinds} == set(CALLABLES), "every kind is tried")
    for requirement, kinds in requirements.items():
        yield from _calls(requirement, "", (1, 2), each("callable", kinds), judge=("state",))
    late = [arguments(f"before-step{step}", registered_at=step) for step in (1, 2)]
    yield from _calls("HOOK-13", "", 2, late, _LAYOUTS, judge=("raw",), answer="new_tensor")
    mixed = ["float32", "float64"]
    imaginary = Variant("complex", arguments={"dtypes": ["complex64"]}, needs=("complex64",))
    answers = each("answer", ("average", "exchanged", "future_value"))
    for way in _LAYOUTS:
        yield from _calls("HOOK-14", "", 2, imaginary, answers, way)
        yield from _calls("HOOK-14", "dtypes", (2, 3), way, judge=("once", "order"), dtypes=mixed)
        yield from _calls("HOOK-14", "frozen", 2, way, judge=("once", "raw"), frozen=[1, 5])
        yield from _calls("HOOK-14", "alone", 1, way, judge=("once", "order", "raw"), answer="new_tensor")


#: Requirement -> the hooks of `ready_made_hooks` that show it, and the gradients they are tried with.
_TRIED = {
    "HOOK-16": (("fp16", "fp16_type", "builtin_fp16", "fp16_wrapper"), "small"),
    "HOOK-17": (("fp16", "builtin_fp16", "fp16_wrapper"), "large"),
    "HOOK-18": (("bf16", "bf16_wrapper"), "small"),
    "HOOK-19": (("noop", "noop_type", "fp16_wrapped_noop"), "small"),
    "HOOK-20": (("post_local", "post_local_silent"), "small"),
    "HOOK-24": (("quantised_tensor", "quantised_channel"), "bytes"),
}
_AVERAGING = ("allreduce", "allreduce_type", "builtin_allreduce")


def _ready_made() -> Iterator[Scenario]:
    tried = {hook for hooks, _ in _TRIED.values() for hook in hooks}
    certain({*tried, *_AVERAGING} == set(HOOKS), "every hook is tried")
    for requirement, (hooks, gradients) in _TRIED.items():
        plain = PLAIN.at(2, 4) if gradients == "large" else PLAIN.at(2, 3, 4)
        # Callbacks of "bytes" communicate: with several buckets, in an order that gloo's threads leave open.
        ways = (plain, VIEW) if gradients == "bytes" else (plain, *_LAYOUTS[1:])
        given = {"gradients": gradients}
        yield from _grid(requirement, "", "ready_made_hook", 2, each("hook", hooks), ways, arguments=given)
    accumulate = (Step(), Step(local_backwards=2), Step(), Step(local_backwards=1))
    trainings = (
        model("mlp"),
        model("mlp").named("accumulation") | fields(schedule=accumulate),
        model("many_small_layers").named("") | VIEW | capped("", 0.0005),
        fields(model="unused") | STATIC,
        model("moe").named("unused"),
        model("sparse_embedding").named("sparse"),
        model("mixed_dtypes").named("dtypes"),
        model("batchnorm_mlp").named("buffers"),
    )
    for hook in each("hook", _AVERAGING):
        worlds = (2, 3) if hook.slug == "allreduce" else (2,)
        yield from _grid("HOOK-15", "", "hooked_training", worlds, hook, trainings, schedule=(Step(),) * 3)
    small = capped("small", 0.0005)  # torch cannot shard a single bucket
    sizes = (PLAIN, small, (small | VIEW).named("view"))
    whole, sharded = arguments("whole", shard_buckets=False), arguments("sharded", shard_buckets=True)
    yield from _grid("HOOK-25", "", "zero_overlap", (2, 3), whole, sizes)
    yield from _grid("HOOK-25", "", "zero_overlap", (2, 3), sharded, sizes[1:])


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
            yield from _power("HOOK-21", slug, world_size, state, arguments(gradients="low_rank"))
        # gloo waits in two threads: one bucket more than that.
        alone = EACH_ALONE | arguments(gradients="low_rank", num_pairs=2)
        yield from _power("HOOK-21", "enough", world_size, enough, alone)
        batched = arguments("batched", batched=True)
        one, two, three = ({"matrix_approximation_rank": rank} for rank in (1, 2, 3))
        yield from _power("HOOK-22", "", world_size, two, batched)
        yield from _power("HOOK-23", "rank1", world_size, one)
        yield from _power("HOOK-23", "rank2", world_size, two)
        yield from _power("HOOK-23", "rank3", world_size, three)
        yield from _power("HOOK-23", "", world_size, two, arguments("half", half=True))
        yield from _power("HOOK-23", "", world_size, one, batched)
        yield from _power("HOOK-23", "", world_size, one, VIEW)


def _power(requirement: str, slug: str, worlds: Worlds, state: Mapping[str, Any], *axes: Axis) -> Iterator[Scenario]:
    given = {"gradients": "full", "state": dict(state)}
    yield from _grid(requirement, slug, "power_sgd", worlds, *axes, arguments=given)


def _misuse() -> Iterator[Scenario]:
    requirements = {
        "HOOK-26": ("twice", "builtin_then_hook", "hook_then_builtin"),
        "HOOK-27": ("not_callable", "bucket_annotation", "return_annotation"),
        "HOOK-28": ("returns_number", "returns_nothing", "returns_tensor"),
        "HOOK-29": ("future_of_text", "future_of_wrong_size"),
        "HOOK-30": ("raises", "future_raises"),
    }
    tried = {misuse for misuses in requirements.values() for misuse in misuses}
    certain(tried == set(MISUSES), "every misuse is tried")
    for requirement, misuses in requirements.items():
        yield from _grid(requirement, "", "hook_misuse", 2, each("misuse", misuses), (PLAIN.at(2, 3), VIEW))


def _buffer_hooks() -> Iterator[Scenario]:
    futures = arguments(futures=True)
    for location in ("", "PRE_FORWARD", "POST_FORWARD"):
        where = arguments(dashed(location.lower()) or "default", location=location)
        for world_size in (2, 3, 4):
            yield from _grid("HOOK-33", "", "buffer_hooks", world_size, where)
            if location != "PRE_FORWARD":  # its futures may complete after the forward that they are for
                lengths = (PLAIN, arguments("large", length=100_000))
                yield from _grid("HOOK-34", "", "buffer_hooks", world_size, where, futures, lengths)
            yield from _grid("HOOK-35", "", "buffer_hooks", world_size, where, arguments(local_backwards=2))
        yield from _grid("HOOK-33", "", "buffer_hooks", 2, where, (VIEW, STATIC))
    yield from _grid("HOOK-36", "text", "buffer_hook_misuse", (1, 2))
    for location in ("PRE_FORWARD", "POST_FORWARD"):
        yield from _saved_buffers(arguments(dashed(location.lower()), location=location))


def _saved_buffers(where: Variant) -> Iterator[Scenario]:
    for forwards in (1, 2):
        of_forwards = where | arguments(f"{forwards}-forwards", forwards=forwards)
        yield from _grid("HOOK-38", "", "hooked_saved_buffer", (2, 3), of_forwards)
        yield from _grid("HOOK-38", "norm", "hooked_norm", 2, of_forwards)
        numbers = each("dtype", ("float64", "int64"))
        imaginary = Variant("complex64", arguments={"dtype": "complex64"}, needs=("complex64",))
        ways = (VIEW, STATIC, *numbers, imaginary)
        yield from _grid("HOOK-38", "", "hooked_saved_buffer", 2, of_forwards, ways)
    joined = Variant("join", arguments={"join": True}, needs=("join",))
    yield from _grid("HOOK-38", "", "hooked_saved_buffer", 2, where, joined)
