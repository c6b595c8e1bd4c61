"""Scenarios of chapter devices: one training, on several streams and with the options that move work about."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conformance.chapters.in_chapter import in_chapter
from conformance.scenario import Scenario

_of_chapter = in_chapter("devices")

_VIEW: dict[str, Any] = {"gradient_as_bucket_view": True}
_TINY: dict[str, Any] = {"bucket_cap_mb": 0.00002}
_STATIC: dict[str, Any] = {"static_graph": True}
_UNUSED: dict[str, Any] = {"find_unused_parameters": True}
_LOCAL_BUFFERS: dict[str, Any] = {"forward_sync_buffers": False}
_HALF: dict[str, Any] = {"mixed_precision": {"param_dtype": "float16"}}
_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("plain", {}),
    ("view", _VIEW),
    ("tiny-buckets", _TINY),
    ("tiny-view", {**_TINY, **_VIEW}),
    ("static", _STATIC),
)
_FEW = _OPTIONS[0::3]  # plain, tiny-view
#: Options that a subject must declare.
_DECLARED = ("gradient_as_bucket_view", "static_graph", "find_unused_parameters", "mixed_precision")


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    for world_size in (1, 2, 3):
        yield from _streams(world_size)
    for world_size in (2, 3):
        yield from _user_streams(world_size)
        yield from _hooks(world_size)
        yield from _features(world_size)
        yield from _waits(world_size)
        yield from _overlap(world_size)
        yield from _places(world_size)
    for slug, options in (*_FEW, ("static", _STATIC)):
        yield _training("DEV-42", slug, 4, options)
        yield _training("DEV-42", f"side-{slug}", 4, options, place="side")
    yield from _memory()


def _streams(world_size: int) -> Iterator[Scenario]:
    for slug, options in _OPTIONS:
        for requirement, place in (("DEV-01", "default"), ("DEV-02", "side"), ("DEV-02", "side_each")):
            yield _training(requirement, f"{place}-{slug}", world_size, options, place=place)
        yield _training("DEV-03", slug, world_size, options, counts=0)
        yield _training("DEV-03", f"side-{slug}", world_size, options, counts=0, place="side")
        yield _training("DEV-03", f"no-sync-{slug}", world_size, options, counts=0, local=1)
        yield _training("DEV-01", f"no-sync-{slug}", world_size, options, local=2)
        yield _training("DEV-08", slug, world_size, options, churns=True)
        yield _training("DEV-08", f"side-{slug}", world_size, options, churns=True, place="side_each")
        if world_size > 1:
            yield _training("DEV-06", slug, world_size, options, hook="divides")
            yield _training("DEV-06", f"side-{slug}", world_size, options, hook="divides", place="side")
            yield _training("DEV-07", slug, world_size, options, buffers=True)
            yield _training("DEV-07", f"side-{slug}", world_size, options, buffers=True, place="side_each")
            if "bucket_cap_mb" in options:
                yield _training("DEV-05", slug, world_size, options, traces="launches_early")
    for place in ("default", "side"):
        yield _training("DEV-04", place, world_size, _UNUSED, counts=0, place=place)
        yield _training("DEV-04", f"{place}-spare", world_size, _UNUSED, counts=1, place=place, spare=True)
        yield _training("DEV-04", f"{place}-view", world_size, {**_UNUSED, **_VIEW}, counts=0, place=place)


def _user_streams(world_size: int) -> Iterator[Scenario]:
    for slug, options in (*_FEW, ("unused", _UNUSED)):
        yield _training("DEV-09", slug, world_size, options, forks=True)
        yield _training("DEV-09", f"side-{slug}", world_size, options, forks=True, place="side_each")
        yield _training("DEV-10", slug, world_size, options, turns=True)
        yield _training("DEV-11", slug, world_size, options, local=2, apart=True)
        yield _training("DEV-12", slug, world_size, options, wraps=True)
        yield _training("DEV-12", f"side-{slug}", world_size, options, wraps=True, place="side")
        yield _training("DEV-13", slug, world_size, options, guards=True)
        yield _training("DEV-13", f"side-{slug}", world_size, options, guards=True, place="side_each", forks=True)


def _hooks(world_size: int) -> Iterator[Scenario]:
    for requirement, hook in (("DEV-14", "reads"), ("DEV-15", "chains"), ("DEV-16", "completes"), ("DEV-17", "fp16")):
        for slug, options in _FEW:
            yield _training(requirement, slug, world_size, options, hook=hook)
            yield _training(requirement, f"side-{slug}", world_size, options, hook=hook, place="side")
    for slug, options in _FEW:
        yield _training("DEV-18", slug, world_size, options, listens=True)
        yield _training("DEV-22", slug, world_size, options, buffer_hook="sums")


def _features(world_size: int) -> Iterator[Scenario]:
    for slug, options in _FEW:
        yield _training("DEV-19", slug, world_size, options, optimizer="sgd")
        yield _training("DEV-19", f"side-{slug}", world_size, options, optimizer="sgd", place="side_each")
        yield _training("DEV-20", slug, world_size, options, optimizer="in_backward")
        yield _training("DEV-20", f"side-{slug}", world_size, options, optimizer="in_backward", place="side")
        yield _training("DEV-21", slug, world_size, {**options, **_HALF})
        yield _training("DEV-21", f"side-{slug}", world_size, {**options, **_HALF}, place="side")
        yield _training("DEV-21", f"sgd-{slug}", world_size, {**options, **_HALF}, optimizer="sgd")
    for slug, arguments in (("early", {}), ("by-active", {"divide_by_initial_world_size": False})):
        yield _of_chapter(
            "DEV-23", slug, "uneven_training", world_size, model="mlp", needs=("streams", "join"),
            arguments={"num_inputs": [1, 3, 2][:world_size], **arguments},
        )  # fmt: skip
    for slug, options in (("plain", {}), ("unused", _UNUSED)):
        yield _of_chapter(
            "DEV-51", slug, "dropped_backward", world_size, options=options, needs=_needs(options, {}),
            min_collectives=0, deadline_s=5.0,
        )  # fmt: skip
    for slug, side in (("plain", False), ("side", True)):
        yield _of_chapter("DEV-31", slug, "synchronised_norm", world_size, needs=("streams",), arguments={"side": side})
        yield _of_chapter(
            "DEV-32", slug, "synchronised_norm", world_size, needs=("streams",), arguments={"side": side, "counts": 0}
        )
        yield _of_chapter(
            "DEV-50", slug, "synchronised_norm", world_size, needs=("streams",),
            arguments={"side": side, "counts": 0, "own": True},
        )  # fmt: skip


def _waits(world_size: int) -> Iterator[Scenario]:
    for slug, options in _FEW:
        yield _training("DEV-24", slug, world_size, {**options, **_LOCAL_BUFFERS}, counts=0, joins=True)
        yield _training("DEV-25", slug, world_size, {**options, **_HALF}, counts=0)
        yield _training("DEV-26", slug, world_size, options, counts=0, hook="chains")
        yield _training("DEV-27", slug, world_size, options, counts=0, optimizer="in_backward")
        yield _training("DEV-28", slug, world_size, options, counts=0, buffers=True)
        yield _training("DEV-29", slug, world_size, {**options, **_STATIC}, counts=0, spare=True)
        yield _training("DEV-30", slug, world_size, options, counts=0, logs=True)


def _overlap(world_size: int) -> Iterator[Scenario]:
    for slug, options in (("tiny", {}), ("view", _VIEW), ("unused", _UNUSED), ("static", _STATIC)):
        tiny = {**_TINY, **options}
        yield _training("DEV-48", slug, world_size, tiny, traces="late")
        yield _training("DEV-49", slug, world_size, tiny, traces="waits_early")
    yield _training("DEV-48", "hook", world_size, _TINY, traces="late", hook="divides")
    yield _training("DEV-48", "no-sync", world_size, _TINY, traces="late", local=1)
    yield _training("DEV-49", "hook", world_size, _TINY, traces="waits_early", hook="divides")


def _places(world_size: int) -> Iterator[Scenario]:
    for slug, options in _FEW:
        for requirement, name, arguments in _PLACES:
            yield _of_chapter(
                requirement, f"{name}-{slug}", "on_devices", world_size, options=options,
                needs=_needs(options, arguments), arguments=arguments,
                min_collectives=0 if "refused" in arguments else 1,
            )  # fmt: skip


_PLACES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("DEV-33", "host", {"inputs": "host"}),
    ("DEV-33", "nested", {"inputs": "host", "nested": True}),
    ("DEV-33", "current", {"inputs": "host", "nested": True, "current": "other"}),
    ("DEV-34", "host", {"inputs": "host", "ids": "none"}),
    ("DEV-34", "here", {"inputs": "here", "ids": "none"}),
    ("DEV-35", "other", {"inputs": "host", "ids": "other"}),
    ("DEV-35", "from-here", {"inputs": "here", "ids": "other"}),
    ("DEV-36", "host", {"inputs": "host", "reused": True}),
    ("DEV-36", "pinned", {"inputs": "pinned", "reused": True}),
    ("DEV-36", "side", {"inputs": "pinned", "reused": True, "side": True}),
    ("DEV-37", "plain", {"inputs": "other"}),
    ("DEV-37", "side", {"inputs": "other", "side": True}),
    ("DEV-38", "plain", {"layers": "other", "ids": "none"}),
    ("DEV-38", "side", {"layers": "other", "ids": "none", "side": True}),
    ("DEV-39", "module", {"layers": "other", "ids": "here", "refused": True}),
    ("DEV-39", "ids", {"ids": "both", "refused": True}),
    ("DEV-40", "plain", {"current": "other"}),
    ("DEV-40", "side", {"current": "other", "side": True, "inputs": "host"}),
    ("DEV-41", "plain", {"elsewhere": True, "inputs": "host"}),
    ("DEV-41", "current", {"elsewhere": True, "current": "other"}),
    ("DEV-43", "plain", {"host_buffer": True}),
    ("DEV-43", "side", {"host_buffer": True, "side": True}),
)


def _memory() -> Iterator[Scenario]:
    small = {"bucket_cap_mb": 0.02}  # one layer each
    for slug, more in (("plain", {}), ("view", _VIEW), ("static", _STATIC), ("unused", _UNUSED)):
        options = {**small, **more}
        for requirement, asks in (("DEV-44", "over_torch"), ("DEV-46", "growth"), ("DEV-47", "left")):
            yield _remembering(requirement, slug, options, asks)
    for slug, options in (("plain", _VIEW), ("tiny", {**_TINY, **_VIEW}), ("unused", {**_UNUSED, **_VIEW})):
        yield _remembering("DEV-45", slug, options, "beside_gradients")


def _remembering(requirement: str, slug: str, options: dict[str, Any], asks: str) -> Scenario:
    return _of_chapter(
        requirement, slug, "device_memory", 2, options=options, needs=_needs(options, {}), arguments={"asks": asks},
        recorded=False,  # a recorder keeps works, and works keep tensors
    )  # fmt: skip


def _training(requirement: str, slug: str, world_size: int, options: dict[str, Any], **arguments: Any) -> Scenario:
    return _of_chapter(
        requirement, slug, "on_streams", world_size, options=options, needs=_needs(options, arguments),
        arguments=arguments,
    )  # fmt: skip


def _needs(options: dict[str, Any], arguments: dict[str, Any]) -> tuple[str, ...]:
    needs = ["streams", *(name for name in _DECLARED if name in options)]
    named = {"hook": "comm_hook", "local": "no_sync", "joins": "join", "logs": "logging_data"}
    needs += [capability for name, capability in named.items() if name in arguments]
    if arguments.get("optimizer") == "in_backward":
        needs.append("optimizer_in_backward")
    return tuple(needs)
