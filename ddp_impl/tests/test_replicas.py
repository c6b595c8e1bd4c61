"""Ranks that would not average the same things are told the first difference; names alone are none."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from ddp_impl.base.options import BucketCaps, ReducerOptions
from ddp_impl.module.parameter_watch import managed_parameters
from ddp_impl.module.replicas import Replica, describe, first_difference, first_misplaced, first_reordered


def replica(module: nn.Module | None = None, ignored: tuple[str, ...] = (), **options: Any) -> Replica:
    module = module or nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 2))
    caps = options.pop("caps", BucketCaps(1, 2))
    synced = options.pop("forward_sync_buffers", True)
    members = managed_parameters(module, ignored)
    parameters: dict[str, torch.Tensor] = {**dict(module.named_parameters())}
    copied = {"parameters": parameters, "buffers": dict(module.named_buffers())}
    return describe(members, copied, ignored, ReducerOptions(caps, **options), forward_sync_buffers=synced)


def test_what_a_rank_sends_is_what_it_has() -> None:
    mine = replica(find_unused_parameters=True)
    assert Replica.decoded(json.loads(json.dumps(mine.encoded()))) == mine
    assert [len(each) for each in mine.digest] == [16] * 5, "ranks gather equal numbers of bytes"


def test_names_of_parameters_may_differ() -> None:
    one = replica(nn.ModuleDict({"a": nn.Linear(3, 2)}))
    other = replica(nn.ModuleDict({"b": nn.Linear(3, 2)}))
    assert one != other
    assert one.digest[0] == other.digest[0]
    assert first_reordered([one.digest, other.digest, one.digest]) is None


def test_the_first_name_at_another_place_is_told() -> None:
    names = {True: ("k", "q"), False: ("q", "k")}
    ours, theirs = (replica(nn.ModuleDict({name: nn.Linear(2, 2) for name in names[way]})) for way in (True, False))
    assert ours.digest[0] == theirs.digest[0]
    assert first_reordered([ours.digest, ours.digest, theirs.digest]) == (0, 2)
    told = first_misplaced({1: ours, 3: theirs})
    assert "of the same 4 names, that at place 0 is 'k.weight' on rank 1 and 'q.weight' on rank 3" in told


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (
            replica(nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2))),
            "'0.weight' has sparse True on rank 0, False on rank 2;",
        ),
        (
            replica(nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 5))),
            "'1.weight' has shape [2, 3] on rank 0, [5, 3] on rank 2;",
        ),
        (
            replica(nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 2).to(torch.float64))),
            "dtype torch.float32 on rank 0, torch.float64 on rank 2;",
        ),
        (
            replica(nn.Sequential(nn.Embedding(4, 3, sparse=True))),
            "rank 0 has 3 that require a gradient and rank 2 has 1: parameter '1.weight' of rank 0 has no counterpart",
        ),
        (replica(ignored=("1.bias",)), "only rank 0 ignores [] and only rank 2 ignores ['1.bias']"),
        (replica(static_graph=True), "static_graph=False on rank 0, True on rank 2"),
        (replica(find_unused_parameters=True), "find_unused_parameters=False on rank 0, True on rank 2"),
        (replica(skip_all_reduce_unused_params=True), "skip_all_reduce_unused_params=False on rank 0, True on rank 2"),
        (replica(reduce_dtype=torch.float16), "reduce dtype='None' on rank 0, 'torch.float16' on rank 2"),
        (replica(delayed=frozenset({"1.bias"})), "delayed parameters=[] on rank 0, ['1.bias'] on rank 2"),
        (replica(caps=BucketCaps(1, 3)), "bucket caps=[1, 2] on rank 0, [1, 3] on rank 2"),
        (replica(caps=BucketCaps(1, 2, measured=True)), "bucket_cap_mb='' on rank 0, 'auto' on rank 2"),
        (replica(forward_sync_buffers=False), "forward_sync_buffers=True on rank 0, False on rank 2"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)  # fmt: skip
def test_every_other_difference_is_named(other: Replica, difference: str) -> None:
    mine = replica()
    assert mine.digest[0] != other.digest[0]
    assert difference in first_difference(mine, other, 2)


def test_another_stride_is_a_difference() -> None:
    module = nn.Linear(3, 2, bias=False)
    mine = replica(module)
    module.weight = nn.Parameter(torch.zeros(3, 2).t())
    assert "stride [3, 1] on rank 0, [1, 2] on rank 1; build" in first_difference(mine, replica(module), 1)


def test_the_hint_for_sharded_parameters_is_about_the_mesh() -> None:
    mine = replica(nn.Linear(3, 2, bias=False))
    (parameter,) = mine.parameters
    spread = dataclasses.replace(mine, parameters=(dataclasses.replace(parameter, placement="in 2 parts"),))
    assert "device_mesh=mesh['dp']" in first_difference(mine, spread, 1)


def with_buffers(**buffers: torch.Tensor) -> nn.Sequential:
    module = nn.Sequential(nn.Linear(3, 3))
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer)
    return module


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (with_buffers(mean=torch.zeros(5)), "'mean' is [3] torch.float32 on cpu on rank 0, [5]"),
        (with_buffers(mean=torch.zeros(3).long()), "float32 on cpu on rank 0, [3] torch.int64"),
        (with_buffers(mean=TwoTensor(torch.zeros(3), torch.zeros(3))), "on cpu on rank 0, TwoTensor of"),
        (with_buffers(mean=torch.zeros(3), more=torch.zeros(1)), "'more' of rank 1 has no counterpart on rank 0"),
        (with_buffers(), "buffer 'mean' of rank 0 has no counterpart on rank 1"),
        (with_buffers(mean=torch.zeros(3)).append(nn.Linear(3, 4).requires_grad_(False)), "'1.weight' of rank 1"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)  # fmt: skip
def test_what_all_get_from_rank_0_is_compared(other: nn.Module, words: str) -> None:
    mine, theirs = replica(with_buffers(mean=torch.zeros(3))), replica(other)
    assert mine.digest[0] != theirs.digest[0]
    assert words in first_difference(mine, theirs, 1)
    assert replica(with_buffers(other=torch.zeros(3))).digest[0] == mine.digest[0]
