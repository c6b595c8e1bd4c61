"""How a DDP moves gradients, read from what a rank has issued: by all-reduces of their own elements, or otherwise.

A DDP may average gradients by any operations. What torch's documentation says of buckets - how many elements a
collective has, and that each element travels once - can be counted only where each bucket is one all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from conformance.checkers.protocol import is_gradient
from conformance.observation import Collective
from conformance.waiting.kept_waiting import own_seconds

_ALL_REDUCES = ("all_reduce", "all_reduce_coalesced")
#: How many elements a DDP may add to a collective, so that its size is a multiple of 64 or of the number of ranks.
_MAX_PADDING = 63
#: How long a DDP's own thread may take to its turn, where it gets a processor: it needs microseconds.
_PATIENCE_S = 2.0


def elements_of(collectives: Iterable[Collective]) -> dict[str, int]:
    """Return how many elements of each dtype the gradient collectives among `collectives` hold."""
    elements: dict[str, int] = {}
    for one in filter(is_gradient, collectives):
        elements[one.dtypes[0]] = elements.get(one.dtypes[0], 0) + one.numel
    return elements


def num_bytes(elements: Mapping[str, int]) -> int:
    """Return how many bytes so many elements of each dtype take."""
    return sum(count * getattr(torch, dtype).itemsize for dtype, count in elements.items())


def num_issued(collectives: Callable[[], Iterable[Collective]], awaited: int) -> int:
    """Return how many gradient collectives there are, once there are as many as `awaited` or there has been time.

    A DDP may issue them in a thread of its own, which gets its turn while the backward of a large layer runs. That of a
    scenario's layer is over before any other thread runs, so we wait here. Not collective.
    """
    issued = 0
    for _ in own_seconds(_PATIENCE_S, pause_s=0.001):
        if (issued := sum(map(is_gradient, collectives()))) >= awaited:
            break
    return issued


def other_means(collectives: Iterable[Collective], world_size: int) -> str:
    """Return how gradients travel, as a clause, if not by all-reduces of all `world_size` ranks alone; else nothing."""
    reduced = list(filter(is_gradient, collectives))
    if others := sorted({one.op for one in reduced} - {*_ALL_REDUCES}):
        return f"this DDP moves gradients by {', '.join(others)}"
    if smaller := [one for one in reduced if 0 < len(one.members) < world_size]:
        return f"this DDP reduces gradients in groups of {len(smaller[0].members)} of {world_size} ranks"
    return ""


def uncounted(collectives: Sequence[Collective], gradients: Mapping[str, int], world_size: int) -> str:
    """Return why the collectives of a step cannot be counted as buckets of `gradients` (elements by dtype); or nothing.

    Whatever the means, all bytes of the gradients must travel: fewer are counted, and wrong. So are all-reduces of all
    ranks, unless they hold each element once, in another dtype or with a little padding.
    """
    sent = elements_of(one for one in collectives if one.op != "recv")  # what was received, another rank has sent
    if num_bytes(sent) < num_bytes(gradients):
        return ""
    if means := other_means(collectives, world_size):
        return means
    added = sum(sent.values()) - sum(gradients.values())
    most = min(_MAX_PADDING * sum(map(is_gradient, collectives)), sum(gradients.values()) - 1)
    if sent == gradients or not 0 <= added <= most:
        return ""
    if added:
        return f"this DDP reduces {added} elements more than there are, as if they were padding"
    return f"this DDP reduces gradients in another dtype: {', '.join(sorted(sent))}"
