"""`pairwise`: few cases in which every value of every axis stands beside every value of every other axis."""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = Mapping[str, Any]

#: How many random cases with a pair are tried before it counts as one that no allowed case holds.
_TRIES = 60


def pairwise(axes: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool]) -> list[Case]:
    """Return cases, each with a value for every axis, that `allowed` takes and that together hold every pair.

    Always the same for the same arguments. A pair that hardly any allowed case holds is left out.
    """
    chance = random.Random(0)
    names = list(axes)
    number = itertools.count()
    bits = {
        ((first, one), (second, other)): 1 << next(number)
        for first, second in itertools.combinations(names, 2)
        for one in range(len(axes[first]))
        for other in range(len(axes[second]))
    }

    def case_of(places: Mapping[str, int]) -> Case:
        return {name: axes[name][places[name]] for name in names}

    pool: dict[int, Case] = {}  # by the pairs that a case holds
    for pair in bits:
        for _ in range(_TRIES):
            places = {name: chance.randrange(len(axes[name])) for name in names} | dict(pair)
            if allowed(case := case_of(places)):
                pool[sum(bits[held] for held in itertools.combinations(((n, places[n]) for n in names), 2))] = case
                break
    left = 0
    for held in pool:
        left |= held
    chosen: list[Case] = []
    while left:
        best = max(pool, key=lambda held: (held & left).bit_count())
        chosen.append(pool[best])
        left &= ~best
    return chosen
