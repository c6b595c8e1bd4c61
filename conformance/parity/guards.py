"""Reasons why a comparison shows nothing, and mistakes that stand in one process too. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch

import torch
from torch import Tensor

from conformance.parity.comparison import Comparison, Reference
from conformance.parity.record import Run
from conformance.parity.tolerance import largest

_COARSE = 1.25  # a factor that must be seen


def by_chance(places: Sequence[str]) -> str:
    """Return why ranks differ whose step draws random numbers in these places, empty if there are none."""
    if not places:
        return ""
    said = f"Not comparable: train_step draws random numbers on which its results depend ({listed(places)})."
    return f"{said} Draw them in make_batch, of which ranks get their share, or make a training without them."


def mistakes_in_one_process(run: Run, exempt: Mapping[str, str]) -> list[str]:
    """Return the mistakes that one process shows by itself; `exempt` maps patterns of names to reasons."""
    unheld = [name for name in run.unheld - set(run.trained) if not run.moved(name)]
    left_over = run.strangers if unheld else ()
    unheld = [name for name in unheld if not any(fnmatch(name, pattern) for pattern in exempt)]
    sentences = {
        "Gradients are not cleared: a backward adds to used ones: {}.": run.uncleared,
        "The optimizer holds tensors that no module has, so it is older than they are: {}.": left_over,
        "No optimizer moves these, though they get gradients: {}. Freeze them, or declare them (exempt).": unheld,
    }
    return [sentence.format(listed(names)) for sentence, names in sentences.items() if names]


def vacuous(found: Comparison, reference: Reference) -> list[str]:
    """Return why agreement would prove nothing."""
    said = []
    if _COARSE < found.smallest_factor < math.inf:
        factor = f"a factor of {found.smallest_factor:.2g} in all gradients would not be seen"
        said.append(f"Vacuous: too coarse: {factor}. Compare in float64 (dtype).")
    last = max((key.step for key in found.expected), default=0)
    values = {key: value for key, value in found.expected.items() if isinstance(value, Tensor) and key in found.limits}
    results = [key for key in values if key.kind in ("gradient", "parameter") or key[1:] == ("number", "loss")]
    if bad := [key.name for key in results if not values[key].isfinite().all()]:
        said.append(f"Vacuous: one process computes what is not finite: {listed(bad)}.")
    ends = [key for key in values if key[:2] == (last, "parameter") and key.name in reference.base.held]
    if ends and all(bool((values[key].abs() <= found.limits[key]).all()) for key in ends):
        said.append("Vacuous: no parameter has moved by more than the tolerance.")
    first = [key for key in values if key[:2] == (0, "gradient")]
    own = reference.alone[0].seen if len(reference.alone) > 1 else {}
    shares = {key: share if isinstance(share := own.get(key), Tensor) else torch.zeros(()) for key in first}
    if own and first and all(largest(values[key] - shares[key]) <= largest(found.limits[key]) for key in first):
        blind = "rank 0's share alone gives the gradients of the whole batch, so that a missing average is not seen"
        said.append(f"Vacuous: {blind}. Give shares that differ.")
    return said


def listed(names: Iterable[str]) -> str:
    """Return the first three names, sorted, and how many more there are."""
    distinct = sorted(set(names))
    return ", ".join(distinct[:3]) + (f" and {len(distinct) - 3} more" if len(distinct) > 3 else "")
