"""Scenarios of chapter devices: one training, on several streams and with the options that move work about."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conformance.chapters.in_chapter import in_chapter
from conformance.scenario import Scenario

_of_chapter = in_chapter("devices")

_OPTIONS: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("plain", {}, ()),
    ("view", {"gradient_as_bucket_view": True}, ("gradient_as_bucket_view",)),
    ("tiny-buckets", {"bucket_cap_mb": 0.00002}, ()),
    ("tiny-view", {"bucket_cap_mb": 0.00002, "gradient_as_bucket_view": True}, ("gradient_as_bucket_view",)),
    ("static", {"static_graph": True}, ("static_graph",)),
)
_UNUSED: dict[str, Any] = {"find_unused_parameters": True}


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    for world_size in (1, 2, 3):
        for slug, options, needs in _OPTIONS:
            for requirement, place in (("DEV-01", "default"), ("DEV-02", "side"), ("DEV-02", "side_each")):
                yield _training(requirement, f"{place}-{slug}", world_size, options, needs, place=place)
            yield _training("DEV-03", slug, world_size, options, needs, counts=0)
            yield _training("DEV-03", f"side-{slug}", world_size, options, needs, counts=0, place="side")
            yield _training("DEV-03", f"no-sync-{slug}", world_size, options, (*needs, "no_sync"), counts=0, local=1)
            yield _training("DEV-01", f"no-sync-{slug}", world_size, options, (*needs, "no_sync"), local=2)
            yield _training("DEV-08", slug, world_size, options, needs, churns=True)
            yield _training("DEV-08", f"side-{slug}", world_size, options, needs, churns=True, place="side_each")
            if world_size > 1:
                yield _training("DEV-06", slug, world_size, options, (*needs, "comm_hook"), hook=True)
                yield _training(
                    "DEV-06", f"side-{slug}", world_size, options, (*needs, "comm_hook"), hook=True, place="side"
                )
                yield _training("DEV-07", slug, world_size, options, needs, buffers=True)
                yield _training("DEV-07", f"side-{slug}", world_size, options, needs, buffers=True, place="side_each")
                if "bucket_cap_mb" in options:
                    yield _training("DEV-05", slug, world_size, options, needs, traces=True)
        for place in ("default", "side"):
            yield _training("DEV-04", place, world_size, _UNUSED, ("find_unused_parameters",), counts=1, place=place)
            yield _training(
                "DEV-04", f"{place}-view", world_size, {**_UNUSED, "gradient_as_bucket_view": True},
                ("find_unused_parameters", "gradient_as_bucket_view"), counts=1, place=place,
            )  # fmt: skip


def _training(
    requirement: str, slug: str, world_size: int, options: dict[str, Any], needs: tuple[str, ...], **arguments: Any
) -> Scenario:
    return _of_chapter(
        requirement, slug, "on_streams", world_size, options=options, needs=("streams", *needs), arguments=arguments
    )
