"""The constructor, fuzzed: a refusal names the argument, and where ranks disagree every one of them hears of it."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ddp_impl import DistributedDataParallel
from ddp_impl.tests.ranks import group_of_one, run_ranks

_NUMBERS = st.sampled_from([0, -1, 3, 1.5, float("inf"), float("nan"), 1e308, 2**70])
_JUNK = st.one_of(
    st.none(), st.booleans(), _NUMBERS, st.text(max_size=3), st.lists(_NUMBERS, max_size=2), st.just(object()),
    st.just([("weight", 0)]), st.just({"weight": 1}), st.just(torch.ones(2)), st.just(nn.Linear),
)  # fmt: skip
_ARGUMENTS = (
    "device_ids", "output_device", "broadcast_buffers", "init_sync", "process_group", "bucket_cap_mb",
    "find_unused_parameters", "gradient_as_bucket_view", "static_graph", "delay_all_reduce_named_params",
    "param_to_hook_all_reduce", "mixed_precision", "device_mesh", "skip_all_reduce_unused_params", "bucket_cap_mb_list",
    "forward_sync_buffers",
)  # fmt: skip


def test_a_refusal_names_the_argument() -> None:
    @settings(max_examples=400, deadline=None, database=None, derandomize=True)
    @given(st.sampled_from(_ARGUMENTS), _JUNK)
    def construct(name: str, value: Any) -> None:
        module = nn.Linear(2, 2)
        both = {"delay_all_reduce_named_params": [("bias", module.bias)], "param_to_hook_all_reduce": module.weight}
        options = {**(both if name in both else {}), name: value}
        try:
            DistributedDataParallel(module, **options)(torch.ones(1, 2)).sum().backward()
        except (TypeError, ValueError, RuntimeError) as error:
            if name not in str(error):
                pytest.fail(f"{name}={value!r}: {error!r}")

    with group_of_one(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        construct()


#: In what one of two ranks disagrees -> words by which an error may name it.
_DISAGREEMENTS = {
    "find_unused_parameters": "find_unused", "static_graph": "static_graph",
    "skip_all_reduce_unused_params": "skip_all", "bucket_cap_mb": "bucket", "forward_sync_buffers": "forward_sync",
    "buffer shape": "'mean'", "buffer dtype": "'mean'", "buffer more": "'more'", "buffer name": "",
    "buffers in order": "'mean'",
    "shape": "'1.weight'", "dtype": "'1.weight'", "frozen": "'1.weight'", "frozen shape": "'spare.weight'",
    "layer more": "'more.weight'",
    "ignored": "ignore", "ignored buffer": "ignore", "stride": "'1.weight'", "gradient_as_bucket_view": "",
}  # fmt: skip
_DRAWN = {"bucket_cap_mb": 0.5, "forward_sync_buffers": False, "init_sync": False}


def wrapped(kind: str, group: Any) -> DistributedDataParallel:
    """Construct what a rank that disagrees in `kind` does; without a kind, what the others do."""
    module = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 4, bias=False))
    module.add_module("spare", nn.Linear(3 if kind == "frozen shape" else 2, 4).requires_grad_(False))
    if kind in ("shape", "dtype", "stride"):
        held = torch.ones(4, 5 if kind == "shape" else 4, dtype=torch.float64 if kind == "dtype" else None)
        module[1].weight = nn.Parameter(held.t() if kind == "stride" else held)
    module[1].weight.requires_grad_(kind != "frozen")
    buffers = {"mean": torch.zeros(5 if kind == "buffer shape" else 3), "other": torch.zeros(3)}
    buffers |= {"mean": buffers["mean"].long()} if kind == "buffer dtype" else {}
    buffers |= {"more": torch.zeros(1)} if kind == "buffer more" else {}
    for name in reversed(buffers) if kind == "buffers in order" else buffers:
        module.register_buffer(f"its_{name}" if kind == "buffer name" else name, buffers[name])
    if kind == "layer more":
        module.add_module("more", nn.Linear(4, 4, bias=False))
    if kind.startswith("ignored"):
        module._ddp_params_and_buffers_to_ignore = ["mean" if kind == "ignored buffer" else "1.weight"]  # type: ignore[assignment]
    options: dict[str, Any] = {kind: _DRAWN.get(kind, True)} if kind.replace("_", "").isalpha() and "_" in kind else {}
    module.forward = lambda inputs: module[1](module[0](inputs))  # type: ignore[method-assign]
    return DistributedDataParallel(module, process_group=group, **options)


def tried(rank: int, draws: list[tuple[str, int]]) -> list[tuple[str, float, list[Tensor]]]:
    told = []
    for kind, who in draws:
        group = dist.new_group()
        dist.barrier()
        begin, error, state = time.monotonic(), "", []
        try:
            torch.manual_seed(rank)
            ddp = wrapped(kind if who == rank else "", group)
            ddp(torch.ones(1, 2) * (rank + 1)).sum().backward()
            state = [part.grad if part.grad is not None else part.detach() for part in ddp.parameters()]
        except RuntimeError as raised:
            error = str(raised)
        told.append((error, time.monotonic() - begin, state))
    return told


def test_where_ranks_disagree_every_one_of_them_hears_of_it(tmp_path: Path) -> None:
    @settings(max_examples=1, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.permutations([(kind, who) for kind in _DISAGREEMENTS for who in (0, 1)] * 2))  # each twice
    def disagree(draws: list[tuple[str, int]]) -> None:
        draws = draws[:60]
        first, second = run_ranks(tried, 2, tmp_path, draws)
        for (kind, who), one, other in zip(draws, first, second, strict=True):
            words = _DISAGREEMENTS[kind]
            if words and not (words in one[0] and words in other[0]):
                pytest.fail(f"rank {who} disagrees in {kind}: {one[0]!r}; {other[0]!r}")
            if not words:
                assert one[0] == other[0] == "", kind
                assert all(map(torch.equal, one[2], other[2])), kind
            assert max(one[1], other[1]) < 10, (kind, one[1], other[1])

    disagree()


def tried_once(rank: int, who: int) -> tuple[str, float, list[Tensor]]:
    return tried(rank, [("init_sync", who)])[0]


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_does_not_compare_and_one_that_waits_for_it_both_hear_of_it(tmp_path: Path, who: int) -> None:
    for error, seconds, _ in run_ranks(tried_once, 2, tmp_path, who):
        assert "expects the same init_sync on every rank" in error
        assert seconds < 10
