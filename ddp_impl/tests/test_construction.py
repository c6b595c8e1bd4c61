"""The constructor, fuzzed: a refusal names the argument, and where ranks disagree every one of them hears of it."""

from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ddp_impl import DistributedDataParallel
from ddp_impl.base.errors import ReplicaMismatchError
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


#: In what one of two ranks disagrees -> words by which an error names it; None: ranks need not agree.
_DISAGREEMENTS = {
    "find_unused_parameters": "find_unused", "static_graph": "static_graph", "bucket_cap_mb": "bucket",
    "skip_all_reduce_unused_params": "skip_all", "forward_sync_buffers": "forward_sync",
    "gradient_as_bucket_view": None,
    "buffer shape": "'mean'", "buffer dtype": "'mean'", "buffer more": "'more'", "buffers in order": "'mean'",
    "buffer name": None, "ignored": "ignore", "ignored buffer": "ignore", "layer more": "'more.weight'",
    "shape": "'1.weight'", "dtype": "'1.weight'", "stride": "'1.weight'", "frozen": "'1.weight'",
    "frozen shape": "'spare.weight'",
}  # fmt: skip
_DRAWN = {"bucket_cap_mb": 0.5, "forward_sync_buffers": False}
_DRAWS = [(kind, who) for kind in _DISAGREEMENTS for who in (0, 1)]


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
    options: dict[str, Any] = {kind: _DRAWN.get(kind, True)} if "_" in kind else {}
    module.forward = lambda inputs: module[1](module[0](inputs))  # type: ignore[method-assign]
    return DistributedDataParallel(module, process_group=group, **options)


def tried(rank: int) -> list[tuple[str, list[Tensor]]]:
    told: list[tuple[str, list[Tensor]]] = []
    torch.manual_seed(rank)
    for kind, who in _DRAWS:
        try:
            ddp = wrapped(kind if who == rank else "", dist.new_group())
            ddp(torch.ones(1, 2) * (rank + 1)).sum().backward()
            told.append(("", [part.detach() if part.grad is None else part.grad for part in ddp.parameters()]))
        except RuntimeError as raised:
            told.append((str(raised), []))
    return told


def test_where_ranks_disagree_every_one_of_them_hears_of_it(tmp_path: Path) -> None:
    for draw, (one, its), (other, theirs) in zip(_DRAWS, *run_ranks(tried, 2, tmp_path), strict=True):
        words = _DISAGREEMENTS[draw[0]]
        assert all(words in text if words else not text for text in (one, other)), (draw, one, other)
        assert all(map(torch.equal, its, theirs)), draw


def compares_or_not(rank: int, who: int) -> str:
    try:
        ddp = DistributedDataParallel(nn.Linear(2, 2), init_sync=rank != who)
        ddp._peers._store().wait([ddp._peers.key_of("compares True")], timedelta(seconds=60))  # type: ignore[union-attr]
        ddp(torch.ones(1, 2))
    except ReplicaMismatchError as error:
        return str(error)
    return "went on"


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_does_not_compare_and_one_that_waits_for_it_both_hear_of_it(tmp_path: Path, who: int) -> None:
    for text in run_ranks(compares_or_not, 2, tmp_path, who):
        assert "expects the same init_sync on every rank" in text
