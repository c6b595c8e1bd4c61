"""Scenarios of chapter pairs: every feature alone and with every other one."""

from collections.abc import Iterator
from itertools import combinations

from conformance.chapters.grid import Grid
from conformance.chapters.pairs.feature_pairs import FEATURES
from conformance.chapters.variants import ENDS_SOON, dashed
from conformance.scenario import Scenario

_grid = Grid("pairs", ENDS_SOON)

#: Feature -> the requirement that it works with every other one.
REQUIREMENTS = {feature: f"PAIR-{number:02}" for number, feature in enumerate(FEATURES, start=1)}

#: Features that a capability of another name stands for; buffers every DDP has.
_NEEDS = {"delayed_all_reduce": ("delay_all_reduce",), "buffers": ()}


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    for feature in FEATURES:
        yield from _pair(feature)
    for one, other in combinations(FEATURES, 2):
        yield from _pair(one, other)


def _pair(*features: str) -> Iterator[Scenario]:
    requirements = tuple(REQUIREMENTS[feature] for feature in features)
    slug = "+".join(map(dashed, features)) if len(features) > 1 else f"{dashed(features[0])}-alone"
    needs = tuple(need for feature in features for need in _NEEDS.get(feature, (feature,)))
    given = {"features": list(features)}
    yield from _grid(requirements[0], slug, "feature_pair", 2, arguments=given, needs=needs, requirements=requirements)
