"""Which parameters share a bucket, and in which order buckets are reduced: pure, no torch, used by eager and compiled.

Ranks launch buckets in index order. So a plan is made from one order of readiness that all ranks agree on, and a
bucket's place is that of its last gradient. While no order is known there is one bucket per kind of gradient, launched
after everything is ready: a guess that is wrong on one rank pairs an all-reduce with another collective
(pytorch/pytorch#72843). With `bucket_cap_mb="auto"` caps are chosen from what rank 0 has measured
(docs/decisions/auto_bucketing.md).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ddp_impl.base.options import BucketCaps


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """What planning knows of a parameter; gradients of one `kind` can share storage, `delayed` ones come last."""

    index: int
    name: str
    num_bytes: int
    kind: tuple[str, ...]  # (dtype, device)
    sparse: bool = False
    delayed: bool = False
    releases_delayed: bool = False


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Parameter indices of each bucket, in launch order."""

    buckets: tuple[tuple[int, ...], ...]

    def bucket_of(self, num_parameters: int) -> list[int]:
        """Return for each parameter the index of its bucket."""
        result = [-1] * num_parameters
        for bucket_index, indices in enumerate(self.buckets):
            for index in indices:
                result[index] = bucket_index
        return result


def plan_for_unknown_order(specs: Sequence[ParameterSpec]) -> BucketPlan:
    """Return one bucket per kind, the last kinds first; in order of registration, on which PowerSGD depends."""
    plan = _plan(specs, [spec.index for spec in reversed(specs)], caps=None)
    return BucketPlan(tuple(tuple(sorted(bucket)) for bucket in plan.buckets))


def plan_for_order(specs: Sequence[ParameterSpec], ready_order: Iterable[int], caps: BucketCaps) -> BucketPlan:
    """Return capped buckets for gradients that become ready in `ready_order`; unnamed parameters come last."""
    order = list(dict.fromkeys(ready_order))
    seen = set(order)
    if not seen <= set(range(len(specs))):
        raise ValueError(f"ready_order names parameters that do not exist: {sorted(seen - set(range(len(specs))))}")
    order += [spec.index for spec in reversed(specs) if spec.index not in seen]
    return _plan(specs, order, caps)


def _plan(specs: Sequence[ParameterSpec], order: Sequence[int], caps: BucketCaps | None) -> BucketPlan:
    place = {index: position for position, index in enumerate(order)}

    def ready(bucket: Iterable[int]) -> float:
        return max(place[index] for index in bucket)

    prompt = [index for index in order if not specs[index].delayed]
    delayed = [index for index in order if specs[index].delayed]
    release = next((index for index in prompt if specs[index].releases_delayed and caps is not None), None)
    # Delayed gradients that wait for this one alone must not wait for the rest of its bucket.
    ends_wait = bool(delayed) and release is not None and all(place[index] < place[release] for index in delayed)
    launched = [(ready(bucket), bucket) for bucket in _fill(specs, prompt, caps, release if ends_wait else None)]
    released = next((when for when, bucket in launched if release in bucket), len(order))
    launched += [(max(ready(bucket), released) + 0.5, bucket) for bucket in _fill(specs, delayed, None)]
    launched.sort()
    return BucketPlan(tuple(tuple(bucket) for _, bucket in launched))


def _fill(
    specs: Sequence[ParameterSpec], order: Sequence[int], caps: BucketCaps | None, closing: int | None = None
) -> list[list[int]]:
    """Return buckets that are closed when they have reached their caps, or behind the parameter `closing`."""
    closed: list[list[int]] = []
    open_buckets: dict[tuple[str, ...], list[int]] = {}
    filled_bytes: dict[tuple[str, ...], int] = {}
    num_closed_of_kind: dict[tuple[str, ...], int] = {}
    for index in order:
        spec = specs[index]
        if spec.sparse:
            closed.append([index])
            continue
        bucket = open_buckets.setdefault(spec.kind, [])
        bucket.append(index)
        filled_bytes[spec.kind] = filled_bytes.get(spec.kind, 0) + spec.num_bytes
        num_closed = num_closed_of_kind.get(spec.kind, 0)
        if index == closing or (caps is not None and filled_bytes[spec.kind] >= caps.cap_of(num_closed)):
            closed.append(open_buckets.pop(spec.kind))
            filled_bytes[spec.kind] = 0
            num_closed_of_kind[spec.kind] = num_closed + 1
    return closed + list(open_buckets.values())


#: Iterations that the reducer observes before it chooses caps; the last one counts, the others warm the machine up.
NUM_PROFILED = 3
#: Sizes of the all-reduces that the reducer times, in bytes.
PROBE_BYTES = (4 * 1024, 64 * 1024, 512 * 1024, 2 * 1024 * 1024)
#: The default stays unless the prediction for another choice is shorter by this share, communication included.
MIN_GAIN = 0.1
_MAX_BUCKETS = 16


@dataclass(frozen=True, slots=True)
class AllReduceCost:
    """An all-reduce of n bytes takes `latency_s + n * s_per_byte`, of which the caller itself spends `launch_s`."""

    latency_s: float
    s_per_byte: float
    launch_s: float = 0.0

    def seconds(self, num_bytes: int) -> float:
        """Return how long an all-reduce of `num_bytes` takes."""
        return self.latency_s + num_bytes * self.s_per_byte

    @staticmethod
    def fit(samples: Sequence[tuple[int, float, float]]) -> AllReduceCost:
        """Fit the model, never below 0, to (bytes, seconds, seconds until the call returned) by least squares."""
        sizes = [float(size) for size, _, _ in samples]
        times = [seconds for _, seconds, _ in samples]
        slope, _ = statistics.linear_regression(sizes, times)
        slope = max(0.0, slope)
        latency = max(0.0, statistics.fmean(times) - slope * statistics.fmean(sizes))
        return AllReduceCost(latency, slope, statistics.median(launch for _, _, launch in samples))


def choose_caps(
    specs: Sequence[ParameterSpec], ready_s: Mapping[int, float], cost: AllReduceCost, default: BucketCaps
) -> BucketCaps:
    """Return the caps with the shortest predicted backward; `default` unless shorter by `MIN_GAIN`."""
    candidates = [default, *_candidates(sum(spec.num_bytes for spec in specs), default)]
    predicted_s = [predict(plan_for_order(specs, ready_s, caps), specs, ready_s, cost) for caps in candidates]
    shortest_s = min(predicted_s)
    return default if shortest_s > (1 - MIN_GAIN) * predicted_s[0] else candidates[predicted_s.index(shortest_s)]


def predict(
    plan: BucketPlan, specs: Sequence[ParameterSpec], ready_s: Mapping[int, float], cost: AllReduceCost
) -> float:
    """Return when the last bucket is reduced, in seconds; they are reduced one by one, and launches cost time."""
    end_s = 0.0
    compute_end_s = max(ready_s.values(), default=0.0)
    for place, bucket in enumerate(plan.buckets):
        launched_s = max(ready_s.get(index, compute_end_s) for index in bucket) + (place + 1) * cost.launch_s
        end_s = max(launched_s, end_s) + cost.seconds(sum(specs[index].num_bytes for index in bucket))
    return end_s


def _candidates(total_bytes: int, default: BucketCaps) -> Iterator[BucketCaps]:
    """Yield even caps for 2, 3, ... buckets, coarse ones first, and those with a first bucket of half the size."""
    for num_buckets in range(2, _MAX_BUCKETS + 1):
        cap_bytes = min(-(-total_bytes // num_buckets), default.cap_bytes)
        yield BucketCaps(cap_bytes, cap_bytes)
        yield BucketCaps(max(1, cap_bytes // 2), cap_bytes)
