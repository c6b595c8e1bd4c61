"""Scenarios of chapter training: whole trainings, compared with the same trainings without DDP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from conformance.models.catalogue import ModelFixture, load_fixtures
from conformance.scenario import Scenario, Step

#: Far above what they take (a second or two), so that a loaded machine is no hang.
_DEADLINE_S = 60.0
_DIGITS = {"task": "digits", "epochs": 4}
_TEXT = {"task": "text", "epochs": 1, "batch_size": 8}
#: Result demanded of the long trainings only.
_LEARNT_DIGITS = {"minimum_accuracy": 0.95, "maximum_loss_ratio": 0.25}
_LEARNT_TEXT = {"maximum_loss_ratio": 0.85}
#: 209 bytes: buckets so small that every model has several of them.
_SMALL_BUCKETS = {"bucket_cap_mb": 0.0002}
#: Long enough for every optimizer's state and every schedule to matter, and for a second epoch.
_SHORT = {"epochs": 2, "max_steps": 8, "batch_size": 16}
_BASICS = ("TRAIN-01", "TRAIN-02", "TRAIN-03")


def scenarios() -> Iterator[Scenario]:
    """Yield all scenarios of the chapter."""
    yield from _digits()
    yield from _text()
    yield from _optimizers()
    yield from _restarts()
    yield from _options()
    yield from _families()
    yield from _dtypes()


def _training(
    requirement: str,
    slug: str,
    model: str,
    world_size: int,
    *recipes: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    also: tuple[str, ...] = (),
) -> Scenario:
    recipe = {key: value for part in recipes for key, value in part.items()}
    return Scenario(
        id=f"training/{requirement}/{slug}-world{world_size}",
        requirements=tuple(dict.fromkeys((requirement, *_BASICS, *also))),
        program="training",
        model=model,
        world_size=world_size,
        options=options or {},
        needs=("no_sync",) if recipe.get("accumulate", 1) > 1 else (),
        arguments=recipe,
        seed=world_size,
        deadline_s=_DEADLINE_S,
    )


def _digits() -> Iterator[Scenario]:
    """All of the data, several epochs, an evaluation after each; the batch over all ranks is about the same."""
    for world_size in (1, 2, 3, 4):
        yield _training(
            "TRAIN-04", "digits-cnn", "cnn", world_size, _DIGITS, {"batch_size": 64 // world_size}, _LEARNT_DIGITS,
            also=("TRAIN-06", "TRAIN-13") + (("TRAIN-15",) if world_size == 1 else ()),
        )  # fmt: skip
    for world_size in (2, 4):
        yield _training("TRAIN-06", "no-evaluation", "cnn", world_size, _DIGITS, {"epochs": 2, "evaluate": False})
        yield _training(
            "TRAIN-06", "local-buffers", "cnn", world_size, _DIGITS, {"epochs": 2},
            options={"broadcast_buffers": False},
        )  # fmt: skip
        yield _training("TRAIN-13", "uneven-last-batch", "cnn", world_size, _DIGITS, {"epochs": 2, "batch_size": 50})
    yield _training("TRAIN-15", "digits-cnn-plain", "cnn", 1, _DIGITS, {"epochs": 1, "optimizer": "adamw"})


def _text() -> Iterator[Scenario]:
    """One epoch of the text, with the loss falling."""
    for world_size, batch_size in ((1, 16), (2, 8), (3, 6), (4, 4)):
        yield _training(
            "TRAIN-05", "small-gpt", "gpt", world_size, _TEXT,
            {"batch_size": batch_size, "optimizer": "adam"}, _LEARNT_TEXT,
            also=("TRAIN-06", "TRAIN-13") + (("TRAIN-15",) if world_size == 1 else ()),
        )  # fmt: skip
    for world_size in (2, 4):
        yield _training("TRAIN-05", "tied-lstm", "lstm", world_size, _TEXT, {"max_steps": 20, "optimizer": "adam"})
        for accumulate in (2, 4):
            yield _training(
                "TRAIN-10", f"small-gpt-accumulate{accumulate}", "gpt", world_size, _TEXT,
                {"batch_size": 4, "accumulate": accumulate, "max_steps": 15, "optimizer": "adamw"},
            )  # fmt: skip
        yield _training(
            "TRAIN-10", "digits-cnn-accumulate3", "cnn", world_size, _DIGITS,
            {"batch_size": 8, "accumulate": 3, "epochs": 2, "max_steps": 8, "evaluate": False},
            options={"forward_sync_buffers": False},  # which forwards copy them around `no_sync` is BUFFER-13
        )  # fmt: skip


def _optimizers() -> Iterator[Scenario]:
    """Optimizers, learning-rate schedules and clipping."""
    for world_size in (2, 4):
        for optimizer in ("sgd", "nesterov", "adam", "adamw"):
            yield _training(
                "TRAIN-09", f"digits-{optimizer}", "cnn", world_size, _DIGITS, _SHORT, {"optimizer": optimizer}
            )
        for schedule in ("step", "cosine", "warmup"):
            yield _training(
                "TRAIN-08", f"digits-{schedule}", "cnn", world_size, _DIGITS, _SHORT, {"schedule": schedule}
            )
        for views in (False, True):
            yield _training(
                "TRAIN-07", f"digits-clipped-{'views' if views else 'copies'}", "cnn", world_size, _DIGITS, _SHORT,
                {"clip_norm": 0.25}, options={"gradient_as_bucket_view": views},
            )  # fmt: skip
        yield _training(
            "TRAIN-07", "gpt-clipped-warmup", "gpt", world_size, _TEXT,
            {"max_steps": 12, "clip_norm": 0.5, "optimizer": "adamw", "schedule": "warmup", "accumulate": 2},
            also=("TRAIN-08", "TRAIN-09", "TRAIN-10"),
        )  # fmt: skip


def _restarts() -> Iterator[Scenario]:
    """Take a checkpoint in the middle of an epoch; the truth knows nothing of it."""
    for requirement, restart in (("TRAIN-11", "every_rank"), ("TRAIN-12", "rank_0")):
        for world_size in (1, 2, 4):
            middle = {**_SHORT, "restart": restart, "restart_after": 11}
            yield _training(
                requirement, "digits-adam", "cnn", world_size, _DIGITS, middle, {"optimizer": "adam"}
            )  # fmt: skip
        yield _training(
            requirement, "gpt-cosine", "gpt", 2, _TEXT,
            {"max_steps": 12, "restart": restart, "restart_after": 5, "schedule": "cosine", "accumulate": 2},
        )  # fmt: skip


def _options() -> Iterator[Scenario]:
    """Options that must not change a training."""
    for slug, options in (
        ("small-buckets", _SMALL_BUCKETS),
        ("bucket-views", {"gradient_as_bucket_view": True}),
        ("small-bucket-views", {"gradient_as_bucket_view": True, **_SMALL_BUCKETS}),
        ("find-unused", {"find_unused_parameters": True}),
    ):
        for world_size in (2, 4):
            yield _training("TRAIN-14", f"digits-{slug}", "cnn", world_size, _DIGITS, _SHORT, options=options)
        yield _training("TRAIN-14", f"gpt-{slug}", "gpt", 2, _TEXT, {"max_steps": 8, "batch_size": 4}, options=options)


def _families() -> Iterator[Scenario]:
    """Five steps of every model fixture, and buckets small enough to have several.

    The third accumulates, unless the model has buffers: which forwards copy those around `no_sync` is BUFFER-13.
    """
    for name, fixture in load_fixtures().items():
        third = Step(local_backwards=int(not fixture.uses_buffers))
        schedule = (Step(), Step(), third, Step(zero_grad="zeros"), Step())
        for world_size in (2, 4) if fixture.has_unused or fixture.uses_buffers else (3,):
            yield Scenario(
                id=f"training/TRAIN-16/{name.replace('_', '-')}-world{world_size}",
                requirements=("TRAIN-16", *_BASICS),
                program="train",
                model=name,
                world_size=world_size,
                options={**_SMALL_BUCKETS, **_unused(fixture)},
                schedule=schedule,
                dtype=fixture.dtypes[0],
                seed=16,
            )


def _dtypes() -> Iterator[Scenario]:
    schedule = (Step(),) * 4
    for model in ("mlp", "many_small_layers"):
        for dtype in ("float64", "float16", "bfloat16"):
            for world_size in (2, 3, 4):
                yield Scenario(
                    id=f"training/TRAIN-17/{model.replace('_', '-')}-{dtype}-world{world_size}",
                    requirements=("TRAIN-17", *_BASICS),
                    program="train",
                    model=model,
                    world_size=world_size,
                    schedule=schedule,
                    dtype=dtype,
                    seed=17,
                )


def _unused(fixture: ModelFixture) -> dict[str, Any]:
    return {"find_unused_parameters": True} if fixture.has_unused else {}
