"""Caps follow from measurements, ranks agree on them, and averages are what they are with any caps."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ddp_impl import DistributedDataParallel
from ddp_impl.base.options import BucketCaps
from ddp_impl.buckets.plan import (
    MIN_GAIN,
    NUM_PROFILED,
    AllReduceCost,
    ParameterSpec,
    choose_caps,
    plan_for_order,
    predict,
)
from ddp_impl.reducer import planning as bucket_planning
from ddp_impl.tests.ranks import run_ranks

DEFAULT = BucketCaps.from_mb(None, None)
KIND = ("float32", "cpu")
seconds = st.floats(0, 1, allow_nan=False)


def specs_of(sizes: list[int]) -> list[ParameterSpec]:
    return [ParameterSpec(index, f"p{index}", size, KIND) for index, size in enumerate(sizes)]


def predicted(specs: list[ParameterSpec], ready_s: dict[int, float], cost: AllReduceCost, caps: BucketCaps) -> float:
    return predict(plan_for_order(specs, ready_s, caps), specs, ready_s, cost)


@st.composite
def measurements(draw: st.DrawFn) -> tuple[list[ParameterSpec], dict[int, float], AllReduceCost]:
    specs = specs_of(draw(st.lists(st.integers(1, 10**7), min_size=1, max_size=30)))
    order = draw(st.permutations(range(len(specs))))[: draw(st.integers(0, len(specs)))]
    times = sorted(draw(st.lists(seconds, min_size=len(order), max_size=len(order))))
    cost = AllReduceCost(draw(seconds), draw(st.floats(0, 1e-6)), draw(seconds))
    return specs, dict(zip(order, times, strict=True)), cost


@given(measurements())
def test_a_choice_is_the_default_or_predicted_to_be_clearly_faster(
    measured: tuple[list[ParameterSpec], dict[int, float], AllReduceCost],
) -> None:
    specs, ready_s, cost = measured
    chosen = choose_caps(specs, ready_s, cost, DEFAULT)
    if chosen != DEFAULT:
        default_s, chosen_s = (predicted(specs, ready_s, cost, caps) for caps in (DEFAULT, chosen))
        assert chosen_s <= (1 - MIN_GAIN) * default_s
        assert 0 < chosen.first_bytes <= chosen.cap_bytes <= DEFAULT.cap_bytes


@given(measurements())
def test_no_prediction_is_shorter_than_computing_or_communicating_alone(
    measured: tuple[list[ParameterSpec], dict[int, float], AllReduceCost],
) -> None:
    specs, ready_s, cost = measured
    predicted_s = predicted(specs, ready_s, cost, DEFAULT)
    assert predicted_s >= max(ready_s.values(), default=0.0)
    assert predicted_s >= sum(spec.num_bytes for spec in specs) * cost.s_per_byte * (1 - 1e-9)


def test_buckets_overlap_where_that_pays() -> None:
    specs = specs_of([100_000] * 8)
    ready_s = {index: 0.01 * (index + 1) for index in range(8)}
    slow = AllReduceCost(latency_s=1e-4, s_per_byte=1e-7)
    chosen = choose_caps(specs, ready_s, slow, DEFAULT)
    assert len(plan_for_order(specs, ready_s, chosen).buckets) > 1
    # In one bucket: 0.08 s of computing, then 0.08 s of communication. Overlapped, little more than the computing.
    assert predicted(specs, ready_s, slow, DEFAULT) == pytest.approx(0.1601)
    assert predicted(specs, ready_s, slow, chosen) < 0.1


@pytest.mark.parametrize("cost", [AllReduceCost(0.1, 1e-7), AllReduceCost(1e-4, 1e-12), AllReduceCost(1e-4, 1e-7, 0.1)])
def test_buckets_stay_together_where_latency_launches_or_nothing_costs(cost: AllReduceCost) -> None:
    specs = specs_of([100_000] * 8)
    ready_s = {index: 0.01 * (index + 1) for index in range(8)}
    assert choose_caps(specs, ready_s, cost, DEFAULT) == DEFAULT


@given(seconds, st.floats(0, 1e-6), seconds)
def test_costs_are_found_again(latency_s: float, s_per_byte: float, launch_s: float) -> None:
    sizes = (4096, 65536, 1 << 20)
    samples = [(size, latency_s + size * s_per_byte, launch_s) for size in sizes]
    cost = AllReduceCost.fit(samples)
    assert cost.launch_s == launch_s
    for size in sizes:
        assert cost.seconds(size) == pytest.approx(latency_s + size * s_per_byte, abs=1e-9)


def test_costs_are_never_negative() -> None:
    cost = AllReduceCost.fit([(1, 3.0, 0.0), (2, 2.0, 0.0), (3, 1.0, 0.0)])
    assert (cost.latency_s, cost.s_per_byte) == (2.0, 0.0)


def _train(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    given: list[dict[int, float]] = []

    def choose_differently(
        specs: Any, ready_s: dict[int, float], cost: AllReduceCost, default: BucketCaps
    ) -> BucketCaps:
        given.append(ready_s)
        return BucketCaps(3000, 6000) if rank == 0 else default

    vars(bucket_planning)["choose_caps"] = choose_differently
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)])
    ddp = DistributedDataParallel(model, **options)
    gradients = []
    for step in range(NUM_PROFILED + 2):
        x = torch.randint(-2, 3, (4, 32), generator=torch.Generator().manual_seed(10 * step + rank)).float()
        ddp(x).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    data = ddp._get_ddp_logging_data()
    caps = data.get("auto_bucket_caps")
    return {
        "gradients": gradients,
        "caps": caps,
        "cap": data["bucket_cap_bytes"],
        "sizes": data["bucket_sizes"],
        "given": given,
    }


FEATURES: tuple[dict[str, Any], ...] = ({}, {"static_graph": True}, {"find_unused_parameters": True})


def _train_each(rank: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(_train(rank, features), _train(rank, {"bucket_cap_mb": "auto", **features})) for features in FEATURES]


@pytest.mark.nightly
def test_ranks_whose_measurements_differ_agree_and_average_right(tmp_path: Path) -> None:
    for of_rank in run_ranks(_train_each, 2, tmp_path):
        for plain, auto in of_rank:
            assert (auto["caps"], auto["cap"]) == ("3000, 6000", 6000)  # rank 0's choice
            assert auto["sizes"] == "4224, 8448, 8448, 8448, 4224"
            (ready_s,) = auto["given"]
            assert list(ready_s) == list(range(15, -1, -1))
            assert 0 < ready_s[15] <= ready_s[0] < 60
            assert (plain["caps"], plain["given"]) == (None, [])
            assert plain["sizes"].count(",") == 0
            for mine, other in zip(auto["gradients"], plain["gradients"], strict=True):
                assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


def _learn_again(rank: int) -> tuple[float, float]:
    given: list[dict[int, float]] = []

    def choose_the_default(
        specs: Any, ready_s: dict[int, float], cost: AllReduceCost, default: BucketCaps
    ) -> BucketCaps:
        given.append(ready_s)
        return default

    vars(bucket_planning)["choose_caps"] = choose_the_default
    ddp = DistributedDataParallel(nn.Linear(4, 4), bucket_cap_mb="auto")
    begin_s = 0.0

    def train(num_steps: int) -> None:
        nonlocal begin_s
        for _ in range(num_steps):
            begin_s = time.perf_counter()
            ddp(torch.ones(1, 4)).sum().backward()

    train(20)  # more than are all sampled for the logging data
    ddp._update_process_group(ddp.process_group)
    train(NUM_PROFILED)
    last_s = time.perf_counter() - begin_s
    train(1)
    return max(given[-1].values()), last_s


def test_times_are_those_of_the_iteration_that_is_learnt_from(tmp_path: Path) -> None:
    for ready_s, last_s in run_ranks(_learn_again, 1, tmp_path):
        assert 0 < ready_s < last_s


def test_auto_and_a_list_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="leave one out"):
        BucketCaps.from_mb("auto", [1.0])
    with pytest.raises(TypeError, match='a number or "auto"'):
        BucketCaps.from_mb("many", None)  # type: ignore[arg-type]
    assert not dist.is_initialized()
