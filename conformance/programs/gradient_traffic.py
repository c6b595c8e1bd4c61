"""How a DDP moves gradients, as the collectives of a rank show: by all-reduces of their own elements, or otherwise.

A DDP may average gradients by any operations. torch's documentation says how many elements a bucket has, and that each
element travels once: both can be counted only where each bucket is one all_reduce.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from conformance.checkers.protocol import is_gradient
from conformance.observation import Collective
from conformance.waiting.kept_waiting import process_seconds

_ALL_REDUCES = ("all_reduce", "all_reduce_coalesced")
#: How many elements of padding a collective may have: its size may be a multiple of 64 or of the number of ranks.
_MAX_PADDING = 63
#: How long a DDP's own thread may wait for the interpreter, while it has a processor: it needs microseconds.
_PATIENCE_S = 2.0


def elements_of(collectives: Iterable[Collective]) -> dict[str, int]:
    """Return how many elements of each dtype the gradient collectives among `collectives` hold."""
    elements: dict[str, int] = {}
    for one in filter(is_gradient, collectives):
        elements[one.dtypes[0]] = elements.get(one.dtypes[0], 0) + one.numel
    return elements


def num_bytes(elements: Mapping[str, int]) -> int:
    """Return the bytes of the elements of each dtype."""
    return sum(count * getattr(torch, dtype).itemsize for dtype, count in elements.items())


def num_issued(collectives: Callable[[], Iterable[Collective]], awaited: int) -> int:
    """Return the number of gradient collectives, after a wait until there are `awaited` or the time is over.

    A DDP may issue them in a thread of its own. The backward of a scenario's small layer is over before that thread
    runs, so we wait here. Not collective.
    """
    issued = 0
    for _ in process_seconds(_PATIENCE_S, pause_s=0.001):
        if (issued := sum(map(is_gradient, collectives()))) >= awaited:
            break
    return issued


def other_means(collectives: Iterable[Collective], world_size: int) -> str:
    """Return how gradients travel, as a clause; empty for all-reduces over all `world_size` ranks."""
    reduced = list(filter(is_gradient, collectives))
    if others := sorted({one.op for one in reduced} - {*_ALL_REDUCES}):
        return f"this DDP moves gradients by {', '.join(others)}"
    if smaller := [one for one in reduced if 0 < len(one.members) < world_size]:
        return f"this DDP reduces gradients in groups of {len(smaller[0].members)} of {world_size} ranks"
    return ""


def uncounted(collectives: Sequence[Collective], gradients: Mapping[str, int], world_size: int) -> str:
    """Return why the collectives of a step cannot be counted as buckets of `gradients` (elements by dtype); or nothing.

    All bytes of the gradients must travel by any means, so fewer bytes are counted, and are wrong. All-reduces over all
    ranks are counted, too, unless they hold each element once, in another dtype or with a little padding.
    """
    sent = elements_of(one for one in collectives if one.op != "recv")  # another rank has sent it
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
