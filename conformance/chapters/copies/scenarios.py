"""Scenarios of chapter copies: pickles, deep copies and checkpoints of a wrapper, and its bare module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conformance.chapters.in_chapter import in_chapter
from conformance.scenario import Scenario

_of_chapter = in_chapter("copies")

_VIEW: dict[str, Any] = {"gradient_as_bucket_view": True}
_FIND: dict[str, Any] = {"find_unused_parameters": True}
_STATIC: dict[str, Any] = {"static_graph": True}
_EACH_ALONE: dict[str, Any] = {"bucket_cap_mb": 0.000001}
_LOCAL_BUFFERS: dict[str, Any] = {"forward_sync_buffers": False}
_WAYS = ("pickle", "deepcopy", "save")
_NEEDS = ("pickling",)


def _copied(
    requirement: str, slug: str, world_size: int, way: str, moment: str = "trained", *,
    options: dict[str, Any] | None = None, needs: tuple[str, ...] = (), **arguments: Any,
) -> Scenario:  # fmt: skip
    return _of_chapter(
        requirement, slug, "copied_wrapper", world_size, options=options or {}, needs=(*_NEEDS, *needs),
        arguments={"way": way, "moment": moment, **arguments}, deadline_s=8.0,
    )  # fmt: skip


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _wrappers()
    yield from _twisted()
    yield from _modules()


def _wrappers() -> Iterator[Scenario]:
    for way in _WAYS:
        for moment in ("constructed", "trained"):
            for world_size in (1, 2, 3):
                plain = _copied("COPY-01", f"{way}-{moment}", world_size, way, moment)
                yield plain.replace(requirements=("COPY-01", "COPY-02", "COPY-04"))
        yield _copied("COPY-01", f"{way}-twice", 2, way, twice=True)
        for slug, options in (
            ("view", _VIEW), ("unused", _FIND), ("static", _STATIC), ("each-alone", _EACH_ALONE),
            ("local-buffers", _LOCAL_BUFFERS), ("all", {**_VIEW, **_FIND, **_EACH_ALONE}),
        ):  # fmt: skip
            yield _copied("COPY-03", f"{way}-{slug}", 2, way, options=options)
        yield _copied("COPY-03", f"{way}-ignored", 2, way, ignored=["b.weight", "b.bias"])
        yield _copied("COPY-03", f"{way}-ignored-buffer", 2, way, ignored=["seen"])
        for suffix, options in (("", {}), ("-view", _VIEW)):
            yield _copied("COPY-02", f"{way}-gradients{suffix}", 2, way, "gradients", options=options)
    yield _copied("COPY-02", "deepcopy-gradients-each-alone", 3, "deepcopy", "gradients", options=_EACH_ALONE)


def _twisted() -> Iterator[Scenario]:
    for way in _WAYS:
        for world_size in (2, 3):
            yield _copied("COPY-06", way, world_size, way, hook=True, needs=("comm_hook",))
            yield _copied("COPY-07", way, world_size, way, "no_sync", needs=("no_sync",))
            yield _of_chapter(
                "COPY-05", way, "copied_in_group", world_size, needs=_NEEDS, arguments={"way": way}
            )  # fmt: skip
        yield _copied("COPY-06", f"{way}-at-once", 2, way, "constructed", hook=True, needs=("comm_hook",))
        for suffix, options in (("", {}), ("-view", _VIEW), ("-each-alone", _EACH_ALONE)):
            yield _copied("COPY-08", f"{way}{suffix}", 2, way, "forward", options=options)
        yield _copied("COPY-09", way, 2, way, "join", needs=("join",))


def _modules() -> Iterator[Scenario]:
    for suffix, options in (("", {}), ("-view", _VIEW), ("-unused", _FIND), ("-static", _STATIC)):
        for world_size in (2, 3):
            if world_size == 2 or not options:
                for requirement, case in (("COPY-10", "copy"), ("COPY-11", "freed")):
                    yield _of_chapter(
                        requirement, f"{case}{suffix}", "copied_module", world_size, options=options,
                        arguments={"case": case}, deadline_s=8.0,
                    )  # fmt: skip
    for to in ("wrapper", "torch", "from_torch", "bare"):
        for suffix, options in (("", {}), ("-view", _VIEW)):
            for world_size in (2, 3):
                if world_size == 2 or not options:
                    yield _of_chapter(
                        "COPY-12", f"{to.replace('_', '-')}{suffix}", "carried_state", world_size, options=options,
                        arguments={"to": to}, deadline_s=8.0,
                    )  # fmt: skip
    for way in ("same", "to_torch", "from_torch", "to_bare", "from_bare"):
        for world_size in (1, 2):
            yield _of_chapter(
                "COPY-13", way.replace("_", "-"), "distributed_checkpoint", world_size, arguments={"way": way},
                deadline_s=8.0,
            )  # fmt: skip
    yield _of_chapter("COPY-14", "recognised", "recognised_wrapper", 1)
