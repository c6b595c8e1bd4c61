"""The constructor, fuzzed: a refusal names the argument, and where ranks disagree every one of them hears of it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ddp_impl import DistributedDataParallel
from ddp_impl.module.mixed_precision import MixedPrecision
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


def test_what_mixed_precision_cannot_cast_is_named() -> None:
    module = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    with group_of_one(), pytest.raises(ValueError, match=r"param_dtype=torch.bfloat16.* module '1' is a "):
        DistributedDataParallel(module, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))


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
    "init_sync": "init_sync", "find_unused_parameters": "find_unused", "static_graph": "static_graph",
    "bucket_cap_mb": "bucket", "bucket_cap_mb_list": "bucket", "skip_all_reduce_unused_params": "skip_all",
    "forward_sync_buffers": "forward_sync", "broadcast_buffers": "forward_sync", "mixed_precision": "reduce dtype",
    "delay_all_reduce_named_params": "delayed", "gradient_as_bucket_view": None, "evaluation": None,
    "buffer shape": "'mean'", "buffer dtype": "'mean'", "buffer more": "'more'", "buffers in order": "'mean'",
    "buffer name": None, "ignored": "ignore", "ignored buffer": "ignore", "layer more": "'more.weight'",
    "shape": "'1.weight'", "dtype": "'1.weight'", "stride": "'1.weight'", "frozen": "'1.weight'",
    "frozen shape": "'spare.weight'", "device_ids": "device_ids", "meta": "meta device",
}  # fmt: skip
#: What it gives for the options that are not merely switched on.
_GIVEN = {
    "init_sync": st.just(False), "forward_sync_buffers": st.just(False), "broadcast_buffers": st.just(False),
    "bucket_cap_mb": st.sampled_from([1e-6, 0.5, 3, "auto"]), "bucket_cap_mb_list": st.sampled_from([[1e-6], [1, 2]]),
    "mixed_precision": st.sampled_from([torch.float16, torch.bfloat16]), "device_ids": st.just([0]),
}  # fmt: skip
_Call = tuple[str, int, Any]


def drawn() -> list[_Call]:
    """Return calls of the constructor: in what one of two ranks disagrees, which one, and what it gives."""
    calls: list[_Call] = []

    @settings(max_examples=60, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    @given(st.data(), st.sampled_from(sorted(_DISAGREEMENTS)), st.integers(0, 1))
    def draw(data: st.DataObject, kind: str, who: int) -> None:
        calls.append((kind, who, data.draw(_GIVEN.get(kind, st.just(True)))))

    draw()
    return calls


def built(kind: str) -> nn.Module:
    """Build what a rank that disagrees in `kind` wraps; without a kind, what the others do."""
    module = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 4, bias=False))
    module.add_module("spare", nn.Linear(3 if kind == "frozen shape" else 2, 4).requires_grad_(False))
    if kind in ("shape", "dtype", "stride"):
        held = torch.ones(4, 5 if kind == "shape" else 4, dtype=torch.float64 if kind == "dtype" else None)
        module[1].weight = nn.Parameter(held.t() if kind == "stride" else held)
    if kind == "expanded":
        module[1].weight = nn.Parameter(torch.ones(4, 1).expand(4, 4))
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
    module.forward = lambda inputs: module[1](module[0](inputs))  # type: ignore[method-assign]
    return module.train(kind != "evaluation").to("meta" if kind == "meta" else "cpu")


def options_of(kind: str, given: Any, module: Any) -> dict[str, Any]:
    if kind == "mixed_precision":
        return {kind: MixedPrecision(reduce_dtype=given)}
    if kind == "delay_all_reduce_named_params":
        return {kind: [("1.weight", module[1].weight)], "param_to_hook_all_reduce": module[0].weight}
    return {kind: given} if "_" in kind else {}


def step(module: nn.Module, rank: int) -> None:
    module(torch.ones(1, 2) * (rank + 1)).sum().backward()


def tried(rank: int, calls: list[_Call]) -> list[tuple[str, list[Tensor]]]:
    told: list[tuple[str, list[Tensor]]] = []
    for kind, who, given_instead in calls:
        torch.manual_seed(rank)
        module = built(kind if who == rank else "")
        options = options_of(kind, given_instead, module) if who == rank else {}
        group = dist.new_group(timeout=timedelta(seconds=10))  # an error of a wait would name nothing
        try:
            step(DistributedDataParallel(module, process_group=group, **options), rank)
            told.append(("", [part.detach() if part.grad is None else part.grad for part in module.parameters()]))
        except (RuntimeError, ValueError) as raised:
            told.append((str(raised), []))
    return told


def right() -> list[Tensor]:
    """Return what a rank has where ranks need not agree: rank 0's parameters, or the mean of their gradients."""
    torch.manual_seed(0)
    module = built("")
    for rank in range(2):
        step(module, rank)
    return [part.detach() if part.grad is None else part.grad / 2 for part in module.parameters()]


def test_a_disagreement_of_ranks_is_raised_on_every_rank(tmp_path: Path) -> None:
    calls, expected = drawn(), right()
    assert len(calls) == 60
    assert {kind for kind, _, _ in calls} == set(_DISAGREEMENTS)
    for call, *both in zip(calls, *run_ranks(tried, 2, tmp_path, calls), strict=True):
        words = _DISAGREEMENTS[call[0]]
        for text, had in both:
            assert words in text if words else not text, (call, both)
            assert words or all(map(torch.equal, had, expected)), call


#: What the constructor refuses on one rank alone -> words by which every rank's error names it.
_LONE = {"device_ids": "device_ids", "expanded": "'1.weight'", "meta": "meta device", "bucket_cap_gb": "bucket_cap_gb"}
_Outcomes = tuple[list[str], list[Tensor]]


@contextlib.contextmanager
def begins(store: Any, other_has_begun: str, first: bool) -> Iterator[None]:
    """Run the block, a construction, when the other rank has ended its own, or waits for this rank in it."""
    all_gather = dist.all_gather

    def gather(*args: Any, **kwargs: Any) -> Any:
        work = all_gather(*args, **kwargs)
        store.set(other_has_begun, "")
        return work

    if not first:
        store.wait([other_has_begun], timedelta(seconds=60))
    with mock.patch.object(dist, "all_gather", gather if first else all_gather):
        yield
    if first:
        store.set(other_has_begun, "")


def refused_then_right(rank: int, odd: int, odd_begins: bool) -> list[_Outcomes]:
    """Wrap what is refused on rank `odd` alone, each kind in a group of its own and then all, and then train."""
    outcomes = []
    for kinds in [*([kind] for kind in _LONE), list(_LONE)]:
        group: Any = dist.new_group(timeout=timedelta(seconds=10))
        texts = []
        for place, kind in enumerate(kinds):
            module = built(kind if rank == odd else "")
            options: dict[str, Any] = {kind: [0]} if rank == odd and "_" in kind else {}
            with begins(group.get_group_store(), f"begun {place}", (rank == odd) is odd_begins):
                try:
                    DistributedDataParallel(module, process_group=group, **options)
                except (RuntimeError, TypeError, ValueError) as raised:
                    texts.append(str(raised))
        torch.manual_seed(rank)
        module = built("")
        ddp = DistributedDataParallel(module, process_group=group)
        for _ in range(3):
            ddp.zero_grad()
            step(ddp, rank)
        outcomes.append((texts, [part.detach() if part.grad is None else part.grad for part in module.parameters()]))
    return outcomes


@pytest.mark.parametrize(
    ("odd", "odd_begins"),
    [(1, True), (0, False), *(pytest.param(*one, marks=pytest.mark.nightly) for one in ((0, True), (1, False)))],
)
def test_a_group_serves_again_where_one_rank_was_refused(tmp_path: Path, odd: int, odd_begins: bool) -> None:
    words = [*([word] for word in _LONE.values()), list(_LONE.values())]
    for outcomes in run_ranks(refused_then_right, 2, tmp_path, odd, odd_begins):
        for expected, (texts, had) in zip(words, outcomes, strict=True):
            assert len(texts) == len(expected), texts
            assert all(word in text for word, text in zip(expected, texts, strict=True)), texts
            assert all(map(torch.equal, had, right())), expected
