"""Bucket caps chosen from what was measured: when gradients become ready, and how long an all-reduce takes.

Pure. One rank's measurements go in, caps come out; the reducer takes rank 0's choice for all ranks.
`docs/decisions/auto_bucketing.md` says how good the choice is, and what compilers do instead.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ddp_impl.base.options import BucketCaps
from ddp_impl.buckets.plan import BucketPlan, ParameterSpec, plan_for_order

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
        """Fit the model to samples of (bytes, seconds, seconds until the call returned), by least squares.

        Latency and time per byte are never negative, whatever noise says.
        """
        sizes = [float(size) for size, _, _ in samples]
        times = [seconds for _, seconds, _ in samples]
        slope, _ = statistics.linear_regression(sizes, times)
        slope = max(0.0, slope)
        latency = max(0.0, statistics.fmean(times) - slope * statistics.fmean(sizes))
        return AllReduceCost(latency, slope, statistics.median(launch for _, _, launch in samples))


@dataclass(frozen=True, slots=True)
class Choice:
    """The caps to use, and how long a backward with its communication was predicted to take, with the default too."""

    caps: BucketCaps
    predicted_s: float
    default_s: float


def choose_caps(
    specs: Sequence[ParameterSpec], ready_s: Mapping[int, float], cost: AllReduceCost, default: BucketCaps
) -> Choice:
    """Return the caps with the shortest predicted backward; `default` unless that is shorter by `MIN_GAIN`.

    `ready_s` tells, in the order of arrival, when the gradient of each parameter (index) was ready, in seconds; those
    that it lacks came last.
    """
    default_s = predict(plan_for_order(specs, ready_s, default), specs, ready_s, cost)
    best = Choice(default, default_s, default_s)
    for caps in _candidates(sum(spec.num_bytes for spec in specs), default):
        predicted_s = predict(plan_for_order(specs, ready_s, caps), specs, ready_s, cost)
        if predicted_s < best.predicted_s:
            best = replace(best, caps=caps, predicted_s=predicted_s)
    if best.predicted_s > (1 - MIN_GAIN) * default_s:
        return Choice(default, default_s, default_s)
    return best


def predict(
    plan: BucketPlan, specs: Sequence[ParameterSpec], ready_s: Mapping[int, float], cost: AllReduceCost
) -> float:
    """Return when the last bucket of `plan` is reduced, in seconds.

    Buckets are reduced one at a time, in order, each as soon as its gradients are ready. A launch takes its time from
    the backward: what comes after it becomes ready later.
    """
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
