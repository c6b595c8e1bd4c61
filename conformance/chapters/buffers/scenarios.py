"""Scenarios of chapter buffers: a forward after a synchronised one starts with rank 0's, without side effects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conformance.chapters.in_chapter import in_chapter
from conformance.scenario import Scenario, Step

_scenario = in_chapter("buffers")

_VIEW: dict[str, Any] = {"gradient_as_bucket_view": True}
_FIND: dict[str, Any] = {"find_unused_parameters": True}
_IGNORED = {"root": ("table", "count"), "child": ("state.mask", "state.hidden", "state.turned")}


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _drifting()
    yield from _due()
    yield from _autograd()
    yield from _silence()
    yield from _batch_norm()


def _drifting() -> Iterator[Scenario]:
    for world_size in (1, 2, 3, 4):
        scenario = _scenario("BUFFER-01", "every-kind", "buffer_sync", world_size)
        yield scenario.replace(requirements=("BUFFER-01", "BUFFER-02"))
    for world_size in (2, 3):
        yield _scenario("BUFFER-02", "dtypes-left-out", "uncarried_buffers", world_size, min_collectives=0)
    for slug, options in (("view", _VIEW), ("unused", _FIND), ("explicit", {"forward_sync_buffers": True})):
        yield _scenario("BUFFER-01", slug, "buffer_sync", 2, options=options)
    for world_size in (2, 3):
        yield _scenario("BUFFER-04", "off", "buffer_sync", world_size, options={"forward_sync_buffers": False})
        yield _scenario("BUFFER-05", "off", "buffer_sync", world_size, options={"broadcast_buffers": False})
        for slug, names in _IGNORED.items():
            yield _scenario(
                "BUFFER-07", f"ignored-{slug}", "buffer_sync", world_size, arguments={"ignored": list(names)},
                needs=("ignored_parameters",),
            )  # fmt: skip
        yield _scenario("BUFFER-08", "replaced", "buffer_sync", world_size, arguments={"replaces": True})
    both = {"broadcast_buffers": False, "forward_sync_buffers": True}
    yield _scenario("BUFFER-06", "both-given", "buffer_sync", 2, options=both)
    for options in ({}, {"forward_sync_buffers": False}):
        slug = "asked-off" if options else "asked"
        yield _scenario("BUFFER-10", slug, "buffer_sync", 2, options=options, arguments={"asks": True})
        slug = "announced-off" if options else "announced"
        yield _scenario("BUFFER-10", slug, "announced_buffers", 2, options=options, needs=("no_sync",))
    yield _scenario("BUFFER-10", "announced-none", "announced_buffers", 2, arguments={"none": True}, needs=("no_sync",))
    for world_size in (2, 4):
        yield _scenario("BUFFER-11", "eval", "buffer_sync", world_size, arguments={"mode": "eval"})
    for world_size in (1, 2):
        aspect = {"aspect": "deprecated_broadcast"}
        yield _scenario("BUFFER-06", "warning", "wrapper_surface", world_size, arguments=aspect)


def _due() -> Iterator[Scenario]:
    orders = {
        "in-turn": "synchronised synchronised local local synchronised synchronised",
        "first-local": "local synchronised synchronised local synchronised",
        "evaluated": "synchronised no_grad no_grad synchronised local no_grad synchronised local",
    }
    ways: tuple[tuple[str, int, str, dict[str, Any]], ...] = (
        ("", 2, "train", {}), ("", 3, "train", {}), ("-eval", 2, "eval", {}), ("-view", 2, "train", _VIEW),
        ("-unused", 2, "train", _FIND),
    )  # fmt: skip
    for slug, order in orders.items():
        for suffix, world_size, mode, options in ways:
            yield _scenario(
                "BUFFER-13", f"{slug}{suffix}", "due_buffers", world_size, options=options, needs=("no_sync",),
                arguments={"forwards": order.split(), "mode": mode},
            )  # fmt: skip


def _autograd() -> Iterator[Scenario]:
    for suffix, options in (("", {}), ("-view", _VIEW), ("-unused", _FIND)):
        for forwards, world_size in ((1, 2), (2, 2), (2, 3), (3, 2)):
            yield _scenario(
                "BUFFER-03", f"saved-{forwards}-forwards{suffix}", "saved_buffer", world_size, options=options,
                arguments={"forwards": forwards},
            )  # fmt: skip
        for world_size in (2, 3):
            yield _scenario(
                "BUFFER-03", f"batchnorm-2-forwards{suffix}", "forwards_before_backward", world_size, options=options,
                model="batchnorm_mlp", arguments={"forwards": 2},
            )  # fmt: skip
    yield _scenario(
        "BUFFER-03", "cnn-3-forwards", "forwards_before_backward", 2, model="cnn", arguments={"forwards": 3}
    )


def _silence() -> Iterator[Scenario]:
    kinds: tuple[tuple[str, dict[str, Any]], ...] = (
        ("no_buffers", {}), ("ignored", {}), ("off", {"forward_sync_buffers": False}),
    )  # fmt: skip
    for kind, options in kinds:
        for world_size in (2, 3):
            slug = kind.replace("_", "-")
            yield _scenario("BUFFER-09", slug, "silent_forward", world_size, options=options, arguments={"kind": kind})


def _batch_norm() -> Iterator[Scenario]:
    schedule = (Step(), Step(), Step(), Step())
    for model in ("batchnorm_mlp", "cnn"):
        slug = model.replace("_", "-")
        for world_size in (1, 2, 3, 4):
            yield _scenario("BUFFER-12", slug, "train", world_size, model=model, schedule=schedule)
        variants = [("view", _VIEW), ("off", {"forward_sync_buffers": False})]
        if model == "batchnorm_mlp":
            variants.append(("unused", _FIND))
        for suffix, options in variants:
            yield _scenario(
                "BUFFER-12", f"{slug}-{suffix}", "train", 2, model=model, schedule=schedule, options=options
            )
        for world_size in (2, 3):
            yield _scenario("BUFFER-11", f"evaluation-{slug}", "evaluation", world_size, model=model)
