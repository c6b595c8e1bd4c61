"""Compares what the ranks have with what one process has, quantity by quantity. Pure."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch

import torch
from torch import Tensor

from conformance.parity.record import Run
from conformance.parity.tensors import Key, Part, Value, assemble
from conformance.parity.tolerance import FACTOR, largest, tolerance

#: Kinds of quantities: the earlier one explains the later ones.
KINDS = (
    "optimizer steps", "learning rate", "weight decay", "gradient", "gradient factor", "parameter", "optimizer state",
    "buffer", "number",
)  # fmt: skip
#: Kinds in which ranks must agree with each other to some ulp of the stored dtype, however coarse the tolerance is.
REPLICATED = ("gradient", "parameter", "optimizer state", "buffer")


@dataclass(frozen=True)
class Reference:
    """One process: on the whole batch, again with everything moved by an ulp, and on each share alone for one step."""

    base: Run
    spread: dict[Key, Tensor]  # how far the repetitions are from `base` at most, elementwise
    alone: list[Run]
    rows: list[Counter[int]]
    ulp: float  # of the least precise output of any module
    drawn_in: tuple[str, ...] = ()  # where a step draws random numbers, if its results depend on them


@dataclass
class Comparison:
    """What differs beyond its tolerance, with all that was compared."""

    expected: dict[Key, Value]
    seen: dict[Key, list[Tensor | None]]
    limits: dict[Key, Tensor] = field(default_factory=dict)
    wrong: dict[Key, tuple[Tensor, list[Tensor]]] = field(default_factory=dict)
    excused: Counter[str] = field(default_factory=Counter)  # quantities that differ, by the declared reason
    rounding: int = 0  # elements of parameters whose gradient is rounding

    @property
    def smallest_factor(self) -> float:
        """Return the smallest constant factor of all gradients of a step that would be seen."""
        factors = [largest(limit) for key, limit in self.limits.items() if key.kind == "gradient factor"]
        return 1 + max(factors, default=math.inf)


def compare(
    reference: Reference, runs: Sequence[Run], exempt: Mapping[str, str], *, local_statistics: bool
) -> Comparison:
    """Compare every quantity of the ranks' runs with the reference's; `exempt` maps patterns of names to reasons."""
    expected = _quantities(reference.base)
    found = Comparison(expected, _together(runs, expected))
    noise: dict[str, Tensor] = {}
    for key in dict.fromkeys([*expected, *found.seen]):
        values: list[Value] = [expected.get(key), *found.seen.get(key, [None] * len(runs))]
        some = next((value for value in values if isinstance(value, Tensor)), None)
        if some is None:
            continue
        if key.kind == "optimizer state":  # ZeRO: a rank holds that of some parameters
            values = [values[0], *(value for value in values[1:] if value is not None)]
        elif key.kind == "buffer" and local_statistics:  # the other ranks' last statistics are their own
            values = values[:2]
        want, *got = (
            torch.zeros_like(some).double() if v is None else v.double() for v in values if not isinstance(v, Part)
        )
        if key.kind == "number":
            got = [torch.stack(got).mean(0)]
        raw = reference.base.seen.get(key, some)
        raw = raw if isinstance(raw, Tensor) else some
        found.limits[key] = limit = tolerance(key, want, reference.spread.get(key), raw, reference.ulp)
        name = key.name.split(" ")[0]
        if key.kind == "gradient":
            present = torch.stack([each.abs() for each in (want, *got) if each.shape == want.shape]).sum(0) > 0
            noise[name] = noise.get(name, torch.zeros_like(present)) | (present & (want.abs() <= limit / FACTOR))
        elif key.kind == "parameter" and name in noise and noise[name].shape == limit.shape:
            found.limits[key] = limit = limit.masked_fill(noise[name], math.inf)
        alike = all(_within(limit, value, want) for value in got)
        if alike and not _replicas_differ(key, got, some.dtype, largest(raw)):
            continue
        reason = next((why for pattern, why in exempt.items() if fnmatch(key.name, pattern)), None)
        if reason is None:
            found.wrong[key] = want, got
        else:
            found.excused[reason] += 1
    found.rounding = sum(int(mask.sum()) for mask in noise.values())
    return found


def wrong_data(whole: Sequence[Counter[int]], ranks: Sequence[Sequence[Counter[int]]], shares: int) -> str:
    """Say in which step the ranks' rows are not those of the whole batch; empty if they are. A row is its hash."""
    for step, expected in enumerate(whole):
        own = [batches[step] for batches in ranks]
        distinct = [own[share * len(own) // shares] for share in range(shares)]
        read = sum(distinct, Counter[int]())
        lost, extra = (expected - read).total(), (read - expected).total()
        if lost or extra:
            alike = " All ranks have the same batch." if len(own) > 1 and all(each == own[0] for each in own) else ""
            said = f"no rank reads {lost} rows of the whole batch, and ranks read {extra} too often"
            return f"Step {step + 1}, data: {said}.{alike}"
    return ""


def _within(limit: Tensor, value: Tensor, want: Tensor) -> bool:
    """Whether a value is within its tolerance: not in another shape, nor where one of both is NaN."""
    if value.shape != want.shape or bool((value.isnan() != want.isnan()).any()):
        return False
    difference = (value - want).abs()
    return bool((difference.isnan() | (difference <= limit)).all())


def _replicas_differ(key: Key, got: Sequence[Tensor], dtype: torch.dtype, size: float) -> bool:
    """Whether replicas differ by more than rounding: in bfloat16 the tolerance may hide a missing average."""
    if key.kind not in REPLICATED or not dtype.is_floating_point or not got:
        return False
    slack = FACTOR * torch.finfo(dtype).eps * max(size, largest(got[0]))
    return any(value.shape != got[0].shape or largest(value - got[0]) > slack for value in got[1:])


def spread(base: Run, repetitions: Iterable[Run]) -> dict[Key, Tensor]:
    """Return how far each quantity of the repetitions is from that of `base` at most, elementwise."""
    expected = _quantities(base)
    most: dict[Key, Tensor] = {}
    for run in repetitions:
        for key, value in _quantities(run, expected).items():
            want = expected.get(key)
            if isinstance(value, Tensor) and isinstance(want, Tensor) and value.shape == want.shape:
                apart = (value.double() - want.double()).abs()
                most[key] = torch.maximum(most.get(key, apart), apart)
    return most


def _quantities(run: Run, expected: Mapping[Key, Value] | None = None) -> dict[Key, Value]:
    """Return what was seen, of each parameter how far it has moved, and the factors to those expected."""
    moved = _moved(run)
    return moved | _factors(moved, expected or moved)


def _moved(run: Run) -> dict[Key, Value]:
    """Return what was seen, of each parameter how far it has moved since the start."""

    def moved(key: Key, value: Value) -> Value:
        start = run.start.get(key.name) if key.kind == "parameter" else None
        if isinstance(value, Part) and isinstance(start, Part) and value.local.shape == start.local.shape:
            return Part(value.local - start.local, value.mesh, value.cuts)
        if isinstance(value, Tensor) and isinstance(start, Tensor) and value.shape == start.shape:
            return value - start
        return value

    return {key: moved(key, value) for key, value in run.seen.items()}


def _together(runs: Sequence[Run], expected: Mapping[Key, Value]) -> dict[Key, list[Tensor | None]]:
    """Return for each quantity what every rank has of it, whole."""
    by_rank = [_moved(run) for run in runs]
    keys = dict.fromkeys(key for own in by_rank for key in own)
    seen = {key: assemble([own.get(key) for own in by_rank]) for key in keys}
    factors = [_factors({key: values[rank] for key, values in seen.items()}, expected) for rank in range(len(runs))]
    return seen | {key: [own.get(key) for own in factors] for key in factors[0]}


def _factors(seen: Mapping[Key, Value], expected: Mapping[Key, Value]) -> dict[Key, Tensor]:
    """Return how long all gradients of a step are, projected on those expected: seen where each alone is too coarse."""
    squares: defaultdict[int, float] = defaultdict(float)
    dots: defaultdict[int, float] = defaultdict(float)
    for key, want in expected.items():
        if key.kind == "gradient" and isinstance(want, Tensor):
            squares[key.step] += float(want.double().square().sum())
            if isinstance(value := seen.get(key), Tensor) and value.shape == want.shape:
                dots[key.step] += float((value.double() * want.double()).sum())
    factors = {step: dots[step] / total for step, total in squares.items() if total}
    name = "gradient factor", "all gradients"
    return {Key(step, *name): torch.tensor(factor, dtype=torch.float64) for step, factor in factors.items()}
