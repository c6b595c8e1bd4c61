"""Scenarios of chapter pairs: every feature alone and with every other one."""

from collections.abc import Iterator
from itertools import combinations

from conformance.chapters.grid import Grid
from conformance.chapters.pairs.feature_pairs import FEATURES
from conformance.chapters.variants import ENDS_SOON
from conformance.scenario import Scenario

_grid = Grid("pairs", ENDS_SOON)

#: Feature -> the requirement that it works with every other one.
REQUIREMENTS = {feature: f"PAIR-{number:02}" for number, feature in enumerate(FEATURES, start=1)}

#: Feature -> the capabilities that a subject or backend needs for it; of the others every DDP is capable.
_NEEDS = {
    "join": "join",
    "static_graph": "static_graph",
    "find_unused_parameters": "find_unused_parameters",
    "comm_hook": "comm_hook",
    "mixed_precision": "mixed_precision",
    "optimizer_in_backward": "optimizer_in_backward",
    "no_sync": "no_sync",
    "gradient_as_bucket_view": "gradient_as_bucket_view",
    "delayed_all_reduce": "delay_all_reduce",
    "skip_all_reduce_unused_params": "skip_all_reduce_unused_params",
    "ignored_parameters": "ignored_parameters",
    "sparse_gradients": "sparse_gradients",
    "update_process_group": "update_process_group",
}


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    for feature in FEATURES:
        yield from _pair(feature)
    for one, other in combinations(FEATURES, 2):
        yield from _pair(one, other)


def slug_of(*features: str) -> str:
    """Return how the scenario of a pair, or of a feature alone, is called."""
    return "+".join(feature.replace("_", "-") for feature in features)


def _pair(*features: str) -> Iterator[Scenario]:
    requirements = tuple(REQUIREMENTS[feature] for feature in features)
    slug = slug_of(*features) if len(features) > 1 else f"{slug_of(*features)}-alone"
    needs = tuple(_NEEDS[feature] for feature in features if feature in _NEEDS)
    given = {"features": list(features)}
    yield from _grid(requirements[0], slug, "feature_pair", 2, arguments=given, needs=needs, requirements=requirements)
