"""Scenarios of chapter accumulation: `no_sync`, from its plain use to unusual ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conformance.chapters.in_chapter import in_chapter
from conformance.composed.training import ACTIONS, Action, Block, Training
from conformance.models.catalogue import get_fixture
from conformance.scenario import Scenario, Step

_of_chapter = in_chapter("accumulation")

_VIEW: dict[str, Any] = {"gradient_as_bucket_view": True}
_FIND: dict[str, Any] = {"find_unused_parameters": True}
_VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (("", {}), ("-view", _VIEW), ("-unused", _FIND))
_NEEDS = ("no_sync",)


def _scenario(requirement: str, slug: str, program: str, world_size: int, **rest: Any) -> Scenario:
    return _of_chapter(requirement, slug, program, world_size, needs=_NEEDS, **rest)


def _steps(
    requirement: str, slug: str, world_size: int, options: dict[str, Any], *steps: str, zero_grad: str = "none"
) -> Scenario:
    """Return a scenario of program `accumulation`; each step is written as micro-batches between blanks."""
    arguments = {"steps": [step.split() for step in steps], "zero_grad": zero_grad, "flags": requirement == "ACCUM-11"}
    return _scenario(requirement, slug, "accumulation", world_size, options=options, arguments=arguments)


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _plain()
    yield from _twisted()
    yield from _schedules()
    yield from _in_between()


def _plain() -> Iterator[Scenario]:
    for suffix, options in _VARIANTS:
        for world_size in (2, 3, 4):
            yield _steps("ACCUM-01", f"local{suffix}", world_size, options, "sync", "local local", "local", "sync")
        for world_size in (2, 3):
            yield _steps("ACCUM-07", f"uneven{suffix}", world_size, options, "local_by_rank sync", "local_by_rank sync")
            yield _steps("ACCUM-08", f"first{suffix}", world_size, options, "local local sync", "local sync", "sync")
    yield _steps("ACCUM-07", "uneven-first", 4, {}, "sync", "local_by_rank local sync")
    for zero_grad in ("zeros", "keep"):
        for suffix, options in _VARIANTS[:2]:
            yield _steps(
                "ACCUM-03", f"{zero_grad}{suffix}", 2, options, "local sync", "local sync", "sync", zero_grad=zero_grad
            )


def _twisted() -> Iterator[Scenario]:
    for suffix, options in _VARIANTS:
        for requirement, slug, steps in (
            ("ACCUM-04", "nested", ("sync", "after_inner sync", "after_inner", "sync")),
            ("ACCUM-05", "forward-inside", ("sync", "forward_inside sync", "forward_inside forward_inside sync")),
            ("ACCUM-05", "backward-inside", ("backward_inside", "local backward_inside", "backward_inside sync")),
            ("ACCUM-06", "exception", ("after_exception", "local after_exception", "sync")),
            ("ACCUM-11", "empty", ("after_empty", "local after_empty after_empty", "sync")),
            ("ACCUM-11", "every-kind", ("local after_inner sync", "forward_inside backward_inside", "after_exception")),
        ):
            for world_size in (2, 3):
                if world_size == 3 and options:
                    continue
                yield _steps(requirement, f"{slug}{suffix}", world_size, options, *steps)
    for suffix, options in (("", _FIND), ("-view", {**_FIND, **_VIEW})):
        for world_size in (2, 3, 4):
            yield _steps(
                "ACCUM-09", f"only-local{suffix}", world_size, options,
                "sync:ab", "local:b sync:a", "local:a local:b sync:a", "local:a sync:b sync:a", "sync:b",
            )  # fmt: skip


def _schedules() -> Iterator[Scenario]:
    # None of them has buffers: which forwards copy those around `no_sync` is BUFFER-13.
    models = ("mlp", "channels_last_cnn", "gpt", "lstm", "many_small_layers", "mixed_dtypes", "moe", "sparse_embedding")
    for model in models:
        fixture = get_fixture(model)
        needed = _FIND if fixture.has_unused else {}
        for num_local, world_size in ((1, 2), (3, 2), (2, 3)):
            schedule = tuple(Step(local_backwards=num_local) for _ in range(3))
            yield _scenario(
                "ACCUM-02", f"{model.replace('_', '-')}-{num_local}-local", "train", world_size, model=model,
                options=needed, schedule=schedule, dtype=fixture.dtypes[0],
            )  # fmt: skip
    for world_size in (1, 4):
        schedule = tuple(Step(local_backwards=2) for _ in range(3))
        yield _scenario("ACCUM-02", "mlp-2-local", "train", world_size, model="mlp", schedule=schedule)
    for model in ("mlp", "gpt"):
        for zero_grad in ("zeros", "keep"):
            for suffix, options in _VARIANTS[:2]:
                schedule = tuple(Step(local_backwards=1, zero_grad=zero_grad) for _ in range(3))
                yield _scenario(
                    "ACCUM-03", f"{model}-{zero_grad}{suffix}", "train", 2, model=model, options=options,
                    schedule=schedule,
                )  # fmt: skip
    only_local = Step(local_backwards=2, synchronised=False)
    for suffix, options in _VARIANTS[:2]:
        for world_size in (2, 3):
            schedule = (Step(), only_local, only_local, Step(local_backwards=1))
            yield _scenario(
                "ACCUM-10", f"local-optimizer{suffix}", "train", world_size, model="mlp", options=options,
                schedule=schedule,
            )  # fmt: skip
            paused = Step(local_backwards=1, synchronised=False, optimizer=False)
            schedule = (paused, Step(zero_grad="keep"), paused, paused, Step(zero_grad="keep"))
            yield _scenario(
                "ACCUM-08", f"steps-apart{suffix}", "train", world_size, model="mlp", options=options,
                schedule=schedule,
            )  # fmt: skip


def _in_between() -> Iterator[Scenario]:
    """Local backwards between a synchronised forward and its backward, and after a backward that failed."""
    for how in ACTIONS["no_sync"]:
        for forward in ("plain", "eval_mode"):
            actions = (Action("forward", forward), Action("no_sync", how), Action("backward", "together"))
            for suffix, options in _VARIANTS:
                for world_size in (2, 3):
                    slug = f"in-between-{how}-{forward}{suffix}".replace("_", "-")
                    yield _composed(slug, world_size, options, *actions)
        for suffix, options in _VARIANTS:
            slug = f"after-failure-{how}{suffix}".replace("_", "-")
            yield _composed(slug, 2, options, Action("fail", "backward"), Action("no_sync", how))


def _composed(slug: str, world_size: int, options: dict[str, Any], *actions: Action) -> Scenario:
    last = Block(when="even_forwards" if options.get("find_unused_parameters") else "always")
    # A loss of two outputs reaches one of them before the failure.
    training = Training((last, Block()), output="dict", actions=actions)
    return _scenario(
        "ACCUM-12", slug, "composed", world_size, options=options, arguments=training.to_json(), min_collectives=0,
        deadline_s=8.0,
    )  # fmt: skip
