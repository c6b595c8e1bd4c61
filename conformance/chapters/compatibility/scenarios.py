"""Scenarios of chapter compatibility: optional backend features, and names that users and frameworks access."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conformance.chapters.in_chapter import in_chapter
from conformance.models.catalogue import get_fixture
from conformance.scenario import Scenario, Step

_of_chapter = in_chapter("compatibility")

_VIEW: dict[str, Any] = {"gradient_as_bucket_view": True}
_FIND: dict[str, Any] = {"find_unused_parameters": True}
_STATIC: dict[str, Any] = {"static_graph": True}
_EACH_ALONE: dict[str, Any] = {"bucket_cap_mb": 0.000001}
_VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("", {}), ("-view", _VIEW), ("-unused", _FIND), ("-static", _STATIC), ("-each-alone", _EACH_ALONE),
)  # fmt: skip
#: The keys of `KINDS` in `subclasses`.
_KINDS = (
    "runs_another_method", "forward_of_phases", "around_the_phases", "forward_of_its_own", "passes_attributes_through",
    "chooses_parameters",
)  # fmt: skip


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _less_from_backends()
    yield from _more_from_users()


def _variants() -> Iterator[tuple[str, dict[str, Any], int]]:
    """Yield suffix, options and world size: every variant at two ranks, the default at three."""
    for suffix, options in _VARIANTS:
        yield suffix, options, 2
        if not options:
            yield suffix, options, 3


def _less_from_backends() -> Iterator[Scenario]:
    for suffix, options, world_size in _variants():
        yield _of_chapter(
            "COMPAT-01", f"no-results{suffix}", "compatible_training", world_size, options=options,
            arguments={"no_results": True}, deadline_s=8.0,
        )  # fmt: skip
    for model in ("mlp", "gpt", "batchnorm_mlp", "moe", "many_small_layers", "sparse_embedding"):
        # Which forwards copy buffers around `no_sync` is BUFFER-13.
        schedule = (Step(), Step(local_backwards=int(not get_fixture(model).uses_buffers)), Step())
        needed = _FIND if get_fixture(model).has_unused else {}
        for suffix, options in (("", {}), ("-view", _VIEW)):
            yield _of_chapter(
                "COMPAT-02", f"{model.replace('_', '-')}{suffix}", "train", 2, model=model, recorded=False,
                options={**needed, **options}, schedule=schedule,
            )  # fmt: skip


def _more_from_users() -> Iterator[Scenario]:
    for world_size in (1, 2):
        yield _of_chapter("COMPAT-03", "moved", "moved_arguments", world_size)
    for suffix, options in _VARIANTS:
        yield _of_chapter(
            "COMPAT-04", f"by-hand{suffix}", "compatible_training", 2, options=options, arguments={"by_hand": True},
            deadline_s=8.0,
        )  # fmt: skip
    for suffix, options, world_size in _variants():
        yield _of_chapter(
            "COMPAT-05", f"reference{suffix}", "remote_references", world_size, options=options,
            deadline_s=15.0,
        )  # fmt: skip
    yield _of_chapter("COMPAT-06", "names", "documented_names", 1)
    for suffix, options in _VARIANTS:
        yield _of_chapter(
            "COMPAT-07", f"views{suffix}", "replicated_views", 2, options=options, needs=("replicated_parameters",),
            deadline_s=15.0,
        )  # fmt: skip
    for suffix, options, world_size in _variants():
        yield _of_chapter(
            "COMPAT-08", f"synchronised-mean{suffix}", "synchronised_statistics", world_size, options=options,
            deadline_s=8.0,
        )  # fmt: skip
    for suffix, options, world_size in (
        ("", {}, 1),
        ("", {}, 2),
        ("", {}, 3),
        ("-view", _VIEW, 2),
        ("-unused", _FIND, 2),
    ):
        yield _of_chapter(
            "COMPAT-13", f"penalty{suffix}", "penalised_norm", world_size, options=options, deadline_s=8.0
        )
    for suffix, options in _VARIANTS:
        yield _of_chapter("COMPAT-09", f"buffer-elsewhere{suffix}", "misplaced_buffer", 2, options=options)
    for suffix, options, world_size in _variants():
        yield _of_chapter(
            "COMPAT-10", f"bare-group{suffix}", "compatible_training", world_size, options=options,
            arguments={"bare_group": True}, recorded=False, deadline_s=8.0,
        )  # fmt: skip
    for suffix, options, world_size in _variants():
        yield _of_chapter(
            "COMPAT-12", f"used{suffix}", "compatible_training", world_size, options=options, deadline_s=8.0
        )
    for suffix, options in _VARIANTS:
        yield _of_chapter("COMPAT-12", f"freed{suffix}", "dropped_wrapper", 2, options=options)
    for kind in _KINDS:
        for suffix, options, world_size in _variants():
            if kind == "forward_of_its_own" and options == _STATIC:
                continue  # on torch's DDP it would have to pass its outputs through torch's private _DDPSink
            yield _of_chapter(
                "COMPAT-11", f"{kind.replace('_', '-')}{suffix}", "derived_wrapper", world_size, options=options,
                arguments={"kind": kind}, deadline_s=8.0,
            )  # fmt: skip
