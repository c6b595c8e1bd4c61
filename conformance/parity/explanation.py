"""Says what a difference looks like: a factor, a share, a part of the model, and from which step on. Pure.

The best witness is a fit: what the ranks have, and what one process has, as weighted sums of the gradients that one
process gets from each share alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from conformance.parity.comparison import KINDS, REPLICATED, Comparison
from conformance.parity.guards import listed
from conformance.parity.record import Run
from conformance.parity.tensors import Key, Part, Value

_SAME = 1e-5  # replicas that are this close, relative to their norm, are one value to the reader
_TINY = 1e-300
#: How far off equal weights and factors may be: of exact data, and in bfloat16, whose tolerance is wider than that.
_LEAST_SLACK, _MOST_SLACK = 1e-6, 2.0**-6
_DIGITS = 2.0**-7  # of each element: rounded to bfloat16 on the ranks, and as their sum
_ANSWERS = ("scatter", "alltoall", "all_to_all")  # in the names of collectives of a gather's backward


def first_difference(found: Comparison) -> tuple[int, str]:
    """Return the step and the kind of the first quantities that differ; the others follow from them."""
    return min(((key.step, key.kind) for key in found.wrong), key=lambda one: (one[0], KINDS.index(one[1])))


def explain(found: Comparison, base: Run, runs: Sequence[Run], alone: Sequence[Run]) -> str:
    """Return sentences about the first difference.

    `base` is one process's run, `runs` are those of the ranks, `alone` those of one process on each share of that step.
    """
    step, kind = first_difference(found)
    keys = [key for key in found.wrong if key[:2] == (step, kind)]
    when = f"Step {step + 1}{' (earlier steps agree)' if step else ''}, {kind}"
    if kind not in REPLICATED:  # a single number
        return f"{when}, {_numbers(found, keys[0], base)}"
    peers = [key for key in found.limits if key[:2] == (step, kind)]
    later = ""
    users = [user for name, user in base.used_by.items() if Key(step, "gradient", name) in keys]
    if users and len(set(base.used_by.values())) > 1:  # a first optimizer's step changes what the others get
        keys, peers = ([key for key in these if base.used_by.get(key.name) == users[0]] for these in (keys, peers))
        when += f" used by {users[0]}"
        later = listed(user for user in users if user != users[0])
    names = listed(key.name for key in keys)
    some = f"{len(keys)} of {len(peers)} ({names}) differ" if len(keys) < len(peers) else f"all {len(keys)} differ"
    said = [f"{when}: {some if len(peers) > 1 else f'{names} differs'} from one process."]
    if unlike := [key.name for key in keys if _begun_unlike([run.start.get(key.name) for run in runs])]:
        said.append(f"The ranks began with different values of {listed(unlike)}.")
    said.append(_difference(found, keys, base, alone if kind in ("gradient", "buffer") else ()).cause())
    if kind == "parameter" and any(key.name in base.trained for key in keys):
        said.append("Their gradients agree: the optimizer's step differs, or what follows it.")
    also = {"gradient": ("buffer",), "parameter": ("buffer", "optimizer state")}.get(kind, ())
    for other in also:
        if unlike := [key.name for key in found.wrong if key[:2] == (step, other)]:
            said.append(f"The {other} differs too: {listed(unlike)}.")
    if later:
        said.append(f"Gradients used later differ, too: by {later}.")
    if kind == "gradient":
        said.append(_traffic(runs[0], base))
    return " ".join(said)


@dataclass(frozen=True)
class _Difference:
    """What is to be explained, as flat vectors: one process's, each rank's, and those of each share alone."""

    want: Tensor
    got: list[Tensor]
    shares: list[Tensor]
    slack: float
    base: Run
    kind: str

    def cause(self) -> str:
        """Name the simplest relation between what the ranks have and what one process has."""
        if not self.got:
            return "Their shapes differ."
        return self._unlike_replicas() or self._constant_factor() or self._weighted_shares()

    def _near(self, one: Tensor, other: Tensor) -> bool:
        return _norm(one - other) <= self._close * max(_norm(self.want), _norm(other))

    @cached_property
    def _mean(self) -> Tensor:
        return torch.stack(self.got).mean(0)

    @cached_property
    def _theirs(self) -> tuple[list[float], float]:
        """The fit of one process's gradient; none where there are so few elements that anything fits."""
        fits = self.kind == "gradient" and len(self.want) > len(self.shares) > 0
        return _fit(self.want, self.shares) if fits else ([], 1.0)

    @cached_property
    def _close(self) -> float:
        """How far off a factor may be: the fit shows how exact gradients are."""
        return max(_LEAST_SLACK, min(self.slack, 4 * self._theirs[1]))

    def _unlike_replicas(self) -> str:
        alike = [[rank for rank, value in enumerate(self.got) if _same(value, other)] for other in self.got]
        if len(alike[0]) == len(self.got):
            return ""
        if len(self.shares) == len(self.got) and all(map(self._near, self.got, self.shares)):
            return f"Not averaged: every rank has the {self.kind} of its own share."
        groups = "; ".join(dict.fromkeys(str(ranks)[1:-1] for ranks in alike if len(ranks) > 1))
        disagree = f"Replicas disagree (alike are {groups})" if groups else "Replicas disagree"
        said = f"{disagree}."
        if right := [str(rank) for rank, value in enumerate(self.got) if self._near(value, self.want)]:
            said += f" Rank {', '.join(right)} agrees with one process."
        for base, name in ((self.want, "one process"), (self.got[0], "rank 0: each scales the average by itself")):
            factors = [_factor(value, base) for value in self.got]
            if all(self._near(value, factor * base) for value, factor in zip(self.got, factors, strict=True)):
                return f"{said} By rank {', '.join(f'{factor:.4g}' for factor in factors)} times {name}."
        if self._near(self._mean, self.want):
            return f"{disagree}, but their mean is right: averaged in part, or before the last backward."
        return said

    def _constant_factor(self) -> str:
        factor = _factor(self._mean, self.want)
        if not self._near(self._mean, factor * self.want):
            return ""
        if self._near(self._mean, self.want):
            return self._rounded()
        return f"On all ranks {factor:.4g} times one process{_named(factor, len(self.got), self.base.backwards)}."

    def _rounded(self) -> str:
        apart = _norm(self._mean - self.want) / max(_norm(self.want), _TINY)
        said = f"All ranks have what one process has but for {apart:.1g} of its norm"
        return (
            f"{said}: is something rounded to fewer digits than a module's output? Then compare with dtype=None, and"
            " without a comm hook that rounds."
        )

    def _weighted_shares(self) -> str:
        theirs, theirs_left = self._theirs
        ours, ours_left = _fit(self._mean, self.shares) if theirs else ([], 1.0)
        if max(ours_left, theirs_left) <= self.slack:
            weights = f"{_spelt(ours)} of the shares' gradients, one process {_spelt(theirs)}"
            most = max(map(abs, ours))
            if missing := [str(rank) for rank, weight in enumerate(ours) if abs(weight) <= self.slack * most]:
                return f"The share of rank {', '.join(missing)} is missing ({weights})."
            if max(ours) - min(ours) <= self.slack * most and abs(sum(theirs) - 1) <= self.slack:
                said = "A mean of the ranks' means, though their shares weigh differently (tokens, samples?)"
                return f"{said}: {weights}."
            return f"Each share is scaled by itself before the average (clipped or weighted by rank): {weights}."
        digits = _DIGITS * self.want.abs() + _LEAST_SLACK * self.want.abs().max()
        if bool(((self._mean - self.want).abs() <= digits).all()):
            return self._rounded()
        if not theirs:
            norms = f"{_norm(self._mean):.4g}, one process's {_norm(self.want):.4g}"
            return f"Replicas agree; their norm is {norms}, the difference's {_norm(self._mean - self.want):.2g}."
        if theirs_left <= self.slack:
            return (
                "No weighted sum of the shares' gradients: other data, or each tensor is changed by itself, or a part"
                " of the loss has another divisor than the rest."
            )
        said = "In one process samples of different ranks act on each other, on the ranks they do not"
        if layers := listed(self.base.batch_norms):
            remedy = "use SyncBatchNorm, or declare local_batchnorm"
            return f"{said}: {layers} takes each rank's own statistics ({remedy})."
        return (
            f"{said}; or a share's labels or noise are not those of its rows in the whole batch; or a part of the "
            "loss is no mean over samples, as a penalty on weights is none; or gradients are changed before ranks "
            "average them, as by clipping."
        )


def _difference(found: Comparison, keys: Sequence[Key], base: Run, alone: Sequence[Run]) -> _Difference:
    pairs = {key: found.wrong[key] for key in keys}
    pairs = {key: (want, got) for key, (want, got) in pairs.items() if all(one.shape == want.shape for one in got)}
    most = max((len(got) for _, got in pairs.values()), default=0)  # ZeRO: some ranks hold no state
    pairs = {key: pair for key, pair in pairs.items() if len(pair[1]) == most}
    limit = _norm(_flat([found.limits[key].nan_to_num(posinf=0.0) for key in pairs]))
    wants = {key: want for key, (want, _) in pairs.items()}
    own = lambda run, key: value if isinstance(value := run.seen.get(key), Tensor) else torch.zeros_like(wants[key])  # noqa: E731
    want = _flat([*wants.values()])
    shares = [_flat([own(run, key) for key in wants]) for run in alone]
    got = [_flat([values[at] for _, values in pairs.values()]) for at in range(most)]
    slack = max(_LEAST_SLACK, min(_MOST_SLACK, limit / max(_norm(want), _TINY)))
    return _Difference(want, got, shares, slack, base, keys[0].kind)


def _numbers(found: Comparison, key: Key, base: Run) -> str:
    """Return a line about a quantity that is a single number."""
    got = found.seen.get(key, [])
    values, first = ", ".join(f"rank {rank} {_number(value)}" for rank, value in enumerate(got)), found.wrong[key][1][0]
    want, named = found.expected.get(key), ""
    if key.kind == "number":
        values += f" (mean {_number(first)})"
        factor = float(first / want) if isinstance(want, Tensor) else math.nan
        if said := _named(factor, len(got), base.backwards):
            named = f" The mean is {factor:.4g} times that{said}."
    elif key.kind == "gradient factor":
        said = _named(float(first), len(got), base.backwards)
        values += f" times one process (each gradient alone is within its tolerance){said}"
    return f"{key.name}: {values}; one process {_number(want)}.{named}"


def _traffic(first: Run, base: Run) -> str:
    """Say what rank 0 sent in step 1 beside what is trained, and point to a gather that no backward answers."""
    trained = sum(value.numel() for name in base.held if isinstance(value := base.start.get(name), Tensor))
    said = ", ".join(f"{name} {elements:,}" for name, elements in first.sent.items()) or "nothing"
    text = f"Elements sent in step 1: {said}; trained: {trained:,}."
    gathers = "all_gather" in " ".join(first.sent) and not any(isinstance(each, Part) for each in first.start.values())
    if gathers and not any(answer in name for name in first.sent for answer in _ANSWERS):
        text += " No backward answers the all_gather: does it lose the gradient?"
    return text


def _named(factor: float, ranks: int, backwards: int) -> str:
    names = {
        ranks: "the world size (summed instead of averaged, or the loss is multiplied by it)",
        1 / ranks: "one over the world size (divided twice, or a mean of sums, or only one rank gives something)",
        ranks**-0.5: "one over the root of the world size (clipped by a norm that counts each replica)",
        -1: "the sign",
    }
    if backwards > 1:
        names.setdefault(backwards, "the number of backwards in a step (accumulation)")
        names.setdefault(1 / backwards, "one over the backwards of a step")
    return next((f": {name}" for value, name in names.items() if abs(factor - value) <= 1e-3 * abs(value)), "")


def _begun_unlike(starts: Sequence[Value]) -> bool:
    values = [value for value in starts if isinstance(value, Tensor)]
    return any(not torch.equal(values[0], value) for value in values)


def _fit(target: Tensor, shares: Sequence[Tensor]) -> tuple[list[float], float]:
    """Return the weights with which the shares make up `target`, and the norm of what is left, relative to it."""
    basis = torch.stack(list(shares), 1)
    weights = torch.linalg.lstsq(basis, target[:, None], driver="gelsd").solution[:, 0]
    return weights.tolist(), _norm(basis @ weights - target) / max(_norm(target), _TINY)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.float64), *(tensor.double().reshape(-1) for tensor in tensors)])


def _same(one: Tensor, other: Tensor) -> bool:
    return _norm(one - other) <= _SAME * _norm(other)


def _factor(of: Tensor, base: Tensor) -> float:
    return float(of @ base) / max(_norm(base) ** 2, _TINY)


def _norm(tensor: Tensor) -> float:
    return float(tensor.norm())


def _spelt(weights: Sequence[float]) -> str:
    return " : ".join(f"{weight:.3g}" for weight in weights)


def _number(value: Value) -> str:
    return f"{float(value):.6g}" if isinstance(value, Tensor) and value.numel() == 1 else "none"
