"""Scenarios of chapter compatibility: optional backend features, and names that users and frameworks access."""

from collections.abc import Iterator

from conformance.chapters.grid import Grid
from conformance.chapters.variants import (
    ENDS_SOON,
    PLAIN,
    SCALARS_ALONE,
    STATIC,
    UNUSED,
    VIEW,
    arguments,
    each,
    fields,
    model,
)
from conformance.models.catalogue import get_fixture
from conformance.scenario import Scenario, Step

_grid = Grid("compatibility")

_OTHERS = (VIEW, UNUSED, STATIC, SCALARS_ALONE)
_VARIANTS = (PLAIN, *_OTHERS)
#: Every variant at two ranks, the default at three too.
_MORE_RANKS = (PLAIN.at(2, 3), *_OTHERS)
#: The keys of `KINDS` in `subclasses`.
_KINDS = (
    "runs_another_method",
    "forward_of_phases",
    "around_the_phases",
    "forward_of_its_own",
    "passes_attributes_through",
    "chooses_parameters",
)


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    no_results = arguments("no-results", no_results=True)
    yield from _grid("COMPAT-01", "", "compatible_training", 2, no_results, _MORE_RANKS, ENDS_SOON)
    for name in ("mlp", "gpt", "batchnorm_mlp", "moe", "many_small_layers", "sparse_embedding"):
        # Which forwards copy buffers around `no_sync` is BUFFER-13.
        schedule = (Step(), Step(local_backwards=int(not get_fixture(name).uses_buffers)), Step())
        unrecorded = fields(recorded=False, schedule=schedule)
        yield from _grid("COMPAT-02", "", "train", 2, model(name), (PLAIN, VIEW), unrecorded)
    yield from _more_from_users()


def _more_from_users() -> Iterator[Scenario]:
    training, slow = "compatible_training", fields(deadline_s=15.0)
    yield from _grid("COMPAT-03", "moved", "moved_arguments", (1, 2))
    yield from _grid("COMPAT-04", "", training, 2, arguments("by-hand", by_hand=True), _VARIANTS, ENDS_SOON)
    yield from _grid("COMPAT-05", "reference", "remote_references", 2, _MORE_RANKS, slow)
    distributed = arguments("distributed", distributed=True)
    yield from _grid("COMPAT-05", "reference", "remote_references", 2, distributed, slow)
    between = arguments("local-between", local_between=True)
    yield from _grid("COMPAT-05", "reference", "remote_references", 2, between, slow, needs=("no_sync",))
    yield from _grid("COMPAT-06", "names", "documented_names", 1)
    yield from _grid("COMPAT-07", "views", "replicated_views", 2, _VARIANTS, slow, needs=("replicated_parameters",))
    yield from _grid("COMPAT-08", "synchronised-mean", "synchronised_statistics", 2, _MORE_RANKS, ENDS_SOON)
    yield from _grid("COMPAT-13", "penalty", "penalised_norm", 2, (PLAIN.at(1, 2, 3), VIEW, UNUSED), ENDS_SOON)
    norms = [
        arguments(slug, norm=norm)
        for slug, norm in (
            ("usual", {}),
            ("cumulative", {"momentum": None}),
            ("fast", {"momentum": 0.75, "eps": 0.5}),
            ("without-weight", {"affine": False}),
            ("untracked", {"track_running_stats": False}),
        )
    ]
    yield from _grid("COMPAT-16", "", "normalised_training", (2, 3), norms, ENDS_SOON)
    yield from _grid("COMPAT-16", "one-value", "normalised_value", (1, 2), ENDS_SOON, min_collectives=0)
    planes = [arguments(f"{len(beyond) + 2}-dimensions", beyond=beyond) for beyond in ([3], [3, 2], [2, 1, 3])]
    yield from _grid("COMPAT-16", "", "normalised_training", 2, planes, norms[0], ENDS_SOON)
    converted = each("converted", ("training", "evaluating"))
    yield from _grid("COMPAT-16", "", "normalised_training", 2, converted, (norms[0], *norms[-2:]), ENDS_SOON)
    yield from _grid("COMPAT-09", "buffer-elsewhere", "misplaced_buffer", 2, _VARIANTS)
    bare = arguments("bare-group", bare_group=True) | fields(recorded=False)
    yield from _grid("COMPAT-10", "", training, 2, bare, _MORE_RANKS, ENDS_SOON)
    served = [each_one | fields(recorded=False) for each_one in each("served", ("ended", "raised", "raised-ended"))]
    yield from _grid("COMPAT-14", "", training, 2, served, _MORE_RANKS, ENDS_SOON)
    yield from _grid("COMPAT-12", "used", training, 2, _MORE_RANKS, ENDS_SOON)
    yield from _grid("COMPAT-12", "freed", "dropped_wrapper", 2, _VARIANTS)
    yield from _grid("COMPAT-12", "kept", "dropped_wrapper", 2, arguments(keeps=True), _VARIANTS)
    yield from _grid("COMPAT-17", "", "dropped_wrapper", 2, arguments("at-once", at_once=True), _VARIANTS)
    changed = arguments("changed", changed=True)
    yield from _grid("COMPAT-15", "", training, 2, changed, (PLAIN, UNUSED), ENDS_SOON)
    for kind in _KINDS:
        # On torch's DDP `forward_of_its_own` would have to pass its outputs through torch's private _DDPSink.
        ways = [way for way in _MORE_RANKS if way is not STATIC or kind != "forward_of_its_own"]
        yield from _grid("COMPAT-11", "", "derived_wrapper", 2, each("kind", [kind]), ways, ENDS_SOON)
