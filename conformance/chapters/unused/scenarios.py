"""Scenarios of chapter unused: parameters that get no gradient, with `find_unused_parameters`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from conformance.chapters.in_chapter import in_chapter
from conformance.chapters.unused.hidden_layers import HIDING, PLACES
from conformance.chapters.unused.idle_ranks import USES as IDLE_USES
from conformance.chapters.unused.outside_forward import USES
from conformance.models.catalogue import get_fixture
from conformance.programs.outputs import STRUCTURES
from conformance.scenario import Scenario, Step

_of_chapter = in_chapter("unused")

_FIND: dict[str, Any] = {"find_unused_parameters": True}
_VIEW: dict[str, Any] = {"gradient_as_bucket_view": True}
_EACH_ALONE: dict[str, Any] = {"bucket_cap_mb": 0.00001}
_NEEDS = ("find_unused_parameters",)
_VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("", {}), ("-view", _VIEW), ("-each-alone", _EACH_ALONE),
)  # fmt: skip


def _scenario(
    requirement: str, slug: str, program: str, world_size: int, *, options: dict[str, Any] | None = None, **rest: Any
) -> Scenario:
    rest.setdefault("needs", _NEEDS)
    return _of_chapter(requirement, slug, program, world_size, options={**_FIND, **(options or {})}, **rest)


def _switched(
    requirement: str, slug: str, world_size: int, options: dict[str, Any], *uses: Sequence[str], **arguments: Any
) -> Scenario:
    """Return a scenario of program `unused_parameters`; each step says what rank 0, 1, ... uses, in turn."""
    arguments["uses"] = [list(step) for step in uses]
    return _scenario(requirement, slug, "unused_parameters", world_size, options=options, arguments=arguments)


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _sets()
    yield from _errors()
    yield from _outputs()
    yield from _models()
    yield from _outside_forward()
    yield from _idle_ranks()
    yield from _hidden_layers()


def _sets() -> Iterator[Scenario]:
    for suffix, options in _VARIANTS:
        also = ("UNUSED-12",) if options == _VIEW else ()
        for world_size in (1, 2, 3, 4):
            nobody = _switched("UNUSED-01", f"nobody{suffix}", world_size, options, ["a b"], ["a b"], ["a b"])
            yield nobody.replace(requirements=("UNUSED-01", *also))
        for zero_grad in ("zeros", "keep"):
            kept = _switched(
                "UNUSED-01", f"earlier-{zero_grad}{suffix}", 2, options, ["a b c d"], ["a b"], ["b d"],
                zero_grad=zero_grad,
            )  # fmt: skip
            yield kept.replace(requirements=("UNUSED-01", *also))
        for world_size in (2, 3, 4):
            some = _switched("UNUSED-02", f"some{suffix}", world_size, options, *[["a b c d", "a c", "c d a"]] * 3)
            yield some.replace(requirements=("UNUSED-02", *also))
        for world_size in (2, 3):
            yield _switched(
                "UNUSED-03", f"changing{suffix}", world_size, options,
                ["a b", "c d"], ["a", "a"], ["b c d", "a"], ["d", "d c", "d b"], ["a b c d"], ["b", "c", "d"],
            )  # fmt: skip
        yield _switched("UNUSED-02", f"one-rank-has-all{suffix}", 2, options, *[["a b c d", "b"]] * 3)
    for world_size in (2, 3):
        for slug, options in (("", {}), ("-view", _VIEW)):
            yield _switched(
                "UNUSED-13", f"optimizer{slug}", world_size, options,
                ["a b c d"], ["a b"], ["a c", "a"], ["d", "a"], optimizer=True,
            )  # fmt: skip
    for world_size in (2, 3):
        yield _switched("UNUSED-14", "detached", world_size, {}, ["a b!"], ["a! b"], ["a b! c", "b a! d?"])
        yield _switched("UNUSED-14", "no-grad", world_size, {}, ["a b?"], ["a? b"], ["c d?", "d c?"])
    skip = {"skip_all_reduce_unused_params": True}
    for slug, options in (("", {**skip, **_EACH_ALONE}), ("-view", {**skip, **_EACH_ALONE, **_VIEW})):
        for world_size in (2, 3):
            yield _switched(
                "UNUSED-10", f"skipped{slug}", world_size, options, *[["a c"]] * 4, saves_traffic=True
            ).replace(needs=(*_NEEDS, "skip_all_reduce_unused_params"))  # fmt: skip


def _errors() -> Iterator[Scenario]:
    for world_size in (2, 3):
        for slug, arguments in (
            ("never-used", {"uses": "a b d"}), ("detached", {"uses": "a b c! d"}),
            ("not-in-loss", {"uses": "a b d c", "partial_loss": True}),
        ):  # fmt: skip
            for suffix, options in (("", {}), ("-view", _VIEW)):
                scenario = _scenario(
                    "UNUSED-05", f"{slug}{suffix}", "forgotten_parameter", world_size, arguments=arguments, needs=(),
                    deadline_s=8.0,
                )  # fmt: skip
                yield scenario.replace(options=options)


def _outputs() -> Iterator[Scenario]:
    for structure in STRUCTURES:
        if structure == "opaque":
            continue
        slug = structure.replace("_", "-")
        arguments = {"structure": structure, "spare": True}
        for world_size in (2, 3):
            yield _scenario("UNUSED-08", slug, "outputs", world_size, arguments=arguments)
        if structure != "tensor":
            first = {**arguments, "loss": "first"}
            yield _scenario("UNUSED-04", f"first-of-{slug}", "outputs", 2, arguments=first)
    opaque = {"structure": "opaque"}
    for world_size in (2, 3):
        yield _scenario("UNUSED-09", "spare", "opaque_output", world_size, arguments={**opaque, "spare": True})
    yield _scenario("UNUSED-09", "all-used", "opaque_output", 2, arguments=opaque)
    yield _scenario("UNUSED-09", "not-searched", "opaque_output", 2, arguments=opaque, needs=()).replace(options={})


def _models() -> Iterator[Scenario]:
    schedule = (Step(), Step(), Step(), Step())
    for model in ("moe", "rank_branch", "two_heads", "unused", "sparse_embedding_unused"):
        requirement = {"two_heads": "UNUSED-04", "sparse_embedding_unused": "UNUSED-06"}.get(model, "UNUSED-03")
        for suffix, options in (("", {}), ("-view", _VIEW), ("-small-cap", {"bucket_cap_mb": 0.001})):
            for world_size in (2, 3):
                yield _scenario(
                    requirement, f"{model.replace('_', '-')}{suffix}", "train", world_size, model=model,
                    options=options, schedule=schedule, deadline_s=8.0,
                )  # fmt: skip
    for model in ("mlp", "cnn", "gpt", "lstm", "mixed_dtypes", "sparse_embedding", "nested", "dataclass_output"):
        for world_size in (2, 3):
            yield _scenario(
                "UNUSED-11", model.replace("_", "-"), "train", world_size, model=model, schedule=schedule,
                dtype=get_fixture(model).dtypes[0],
            )  # fmt: skip
    for use in ("two_forwards", "discarded_forward", "forward_under_no_grad"):
        requirement = "UNUSED-07" if use == "two_forwards" else "UNUSED-11"
        arguments = {"use": use}
        yield _scenario(
            requirement, f"{use.replace('_', '-')}-view", "autograd_use", 2, arguments=arguments, options=_VIEW
        )
    for model in ("two_heads", "moe", "unused", "nested"):
        for world_size in (2, 3):
            yield _scenario(
                "UNUSED-07", f"{model.replace('_', '-')}-2-forwards", "forwards_before_backward", world_size,
                model=model, arguments={"forwards": 2}, deadline_s=8.0,
            )  # fmt: skip


def _outside_forward() -> Iterator[Scenario]:
    variants: tuple[tuple[str, dict[str, Any]], ...] = (
        *_VARIANTS, ("-view-each-alone", {**_VIEW, **_EACH_ALONE}), ("-static", {"static_graph": True}),
    )  # fmt: skip
    for use in USES:
        for suffix, options in variants:
            for world_size in (2, 3) if suffix in ("", "-each-alone") else (2,):
                yield _scenario(
                    "UNUSED-15", f"{use.replace('_', '-')}{suffix}", "outside_forward", world_size, options=options,
                    arguments={"use": use}, deadline_s=8.0,
                )  # fmt: skip


#: The ranks that are idle in each step. Every rank is idle equally often, so that the collectives of a DDP that forgets
#: idle ranks still pair up, wrongly, and its verdict is a difference rather than a hang.
_IDLE: dict[int, list[list[int]]] = {2: [[], [0], [], [1], []], 3: [[], [0, 1], [1, 2], [], [2, 0]]}


def _idle_ranks() -> Iterator[Scenario]:
    variants: tuple[tuple[str, dict[str, Any]], ...] = (
        *_VARIANTS, ("-view-each-alone", {**_VIEW, **_EACH_ALONE}),
        ("-skipping", {"skip_all_reduce_unused_params": True, **_EACH_ALONE}),
    )  # fmt: skip
    for use in IDLE_USES:
        for suffix, options in variants:
            for world_size in (2, 3) if suffix == "" else (2,):
                yield _idle_rank(f"{use.replace('_', '-')}{suffix}", world_size, options, use, _IDLE[world_size])
    for suffix, options in variants:
        yield _idle_rank(f"from-the-first-step{suffix}", 2, options, "outer_head", [[0], [1], [], [0], [1]])
        yield _idle_rank(f"every-rank{suffix}", 2, options, "learnt_input", [[0, 1], [], [0, 1], []])
    static = {"static_graph": True}
    for suffix, options in (("", static), ("-view", {**static, **_VIEW})):
        yield _idle_rank(f"static{suffix}", 2, options, "outer_head", [[0]] * 3).replace(deadline_s=6.0)


def _idle_rank(slug: str, world_size: int, options: dict[str, Any], use: str, idle: list[list[int]]) -> Scenario:
    needs = (*_NEEDS, *(["skip_all_reduce_unused_params"] if "skip_all_reduce_unused_params" in options else []))
    return _scenario(
        "UNUSED-16", slug, "idle_ranks", world_size, options=options, arguments={"use": use, "idle": idle},
        needs=needs, deadline_s=8.0,
    )  # fmt: skip


def _hidden_layers() -> Iterator[Scenario]:
    skips: dict[int, list[list[int]]] = {2: [[], [0], [1], [0, 1], []], 3: [[2], [0], [], [1, 2], [0]]}
    for hiding in HIDING:
        for place in PLACES:
            for suffix, options in (*_VARIANTS, ("-view-each-alone", {**_VIEW, **_EACH_ALONE})):
                for world_size in (2, 3) if suffix == "-each-alone" else (2,):
                    yield _scenario(
                        "UNUSED-17", f"{hiding.replace('_', '-')}-{place}{suffix}", "hidden_layers", world_size,
                        options=options, arguments={"hiding": hiding, "place": place, "skips": skips[world_size]},
                        deadline_s=8.0,
                    )  # fmt: skip
