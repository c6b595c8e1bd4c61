"""What a device's trace of one step shows: pairs of a stream and an operation, in the order of their launches.

An event for which a stream waits is an operation `waits for <stream>`.
"""

from collections.abc import Sequence

Trace = Sequence[tuple[str, str]]

_REDUCTION = "allreduce"
_WHOLE_NUMBERS = " x int"
#: Gradients of weights are products of matrices.
_PRODUCT = "mm"
#: A layer's weight and bias become ready together, behind the last product.
_NUM_LAST = 2


def launches_early(trace: Trace) -> bool:
    """Whether the first reduction was launched before the last gradient was computed."""
    launches, last = _launches(trace), _last_product(trace)
    return bool(launches) and launches[0] < last


def is_late(trace: Trace) -> list[str]:
    """Return the reductions, but for those of the last layer, that were launched behind the last gradient."""
    launches, last = _launches(trace), _last_product(trace)
    late = [trace[place][1] for place in launches if place > last]
    return late[:-_NUM_LAST]


def waits_early(trace: Trace) -> list[str]:
    """Return which streams of gradients waited for reductions between the first launch and the last gradient."""
    launches, last = _launches(trace), _last_product(trace)
    if not launches:
        return []
    reducing = {trace[place][0] for place in launches}
    waits = {f"waits for {stream}" for stream in reducing}
    computing = {stream for stream, operation in trace[launches[0] : last + 1] if operation.endswith(_PRODUCT)}
    return [f"{stream} {what}" for stream, what in trace[launches[0] : last] if what in waits and stream in computing]


def _launches(trace: Trace) -> list[int]:
    """Return the places of the reductions of gradients: those of whole numbers exchange which parameters are used."""
    return [
        place
        for place, (_, operation) in enumerate(trace)
        if operation.startswith(_REDUCTION) and _WHOLE_NUMBERS not in operation
    ]


def _last_product(trace: Trace) -> int:
    return max((place for place, (_, operation) in enumerate(trace) if operation.endswith(_PRODUCT)), default=-1)
