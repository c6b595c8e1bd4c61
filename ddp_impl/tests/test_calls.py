"""What a step costs in calls of Python functions beyond the bare model: a count, which has no noise.

The bounds are what was measured with torch 2.13, so that a change that adds a call to every step, bucket or parameter
is seen; who removes one lowers them. torch's own functions that are called on behalf of the wrapper count, too.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ddp_impl import DistributedDataParallel
from ddp_impl.tests.ranks import group_of_one

#: Of a step in steady state, by options: how many calls it adds, and each further bucket and parameter.
BOUNDS: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "default": ({}, 92, 21, 1),
    "views": ({"gradient_as_bucket_view": True}, 92, 21, 1),
    "unused": ({"find_unused_parameters": True}, 205, 25, 1),
    "static": ({"static_graph": True}, 98, 24, 1),
}


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """Let the test be the only rank and have the only wrapper: it waits for nobody, and calls as many functions."""
    gc.collect()
    with group_of_one():
        yield


def calls_of_a_step(model: Any, inputs: torch.Tensor) -> Counter[str]:
    """Return the Python functions that a step of training calls when buckets are planned and hooks are registered."""
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call":
            found[frame.f_code.co_qualname] += 1

    for last in [False] * 12 + [True]:
        if last:
            sys.setprofile(note)
        model(inputs).sum().backward()
        sys.setprofile(None)
        for parameter in model.parameters():
            parameter.grad = None
    return found


def added(num_layers: int, *, num_buckets: int = 1, **options: Any) -> Counter[str]:
    """Return what a wrapper adds to a step of `num_layers` linear layers, two parameters each, in so many buckets."""
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_layers)))
    inputs = torch.ones(2, 8)
    bare = calls_of_a_step(layers, inputs)
    bytes_each = 4 * (64 + 8) * num_layers // num_buckets
    ddp = DistributedDataParallel(layers, bucket_cap_mb_list=[bytes_each / 2**20], **options)
    found = calls_of_a_step(ddp, inputs)
    assert len(ddp.reducer.buckets) == num_buckets
    return found - bare


@pytest.mark.parametrize("way", list(BOUNDS))
def test_a_step_adds_no_more_calls_than_it_did(way: str) -> None:
    options, of_step, of_bucket, of_parameter = BOUNDS[way]
    one, wide, many = added(8, **options), added(16, **options), added(16, num_buckets=8, **options)
    parameter, rest = divmod(wide.total() - one.total(), 16)
    assert rest == 0, f"calls grow unevenly with parameters: {wide - one}"
    bucket = (many.total() - wide.total()) / 7
    fixed = one.total() - bucket - 16 * parameter
    assert (parameter, bucket, fixed) == (of_parameter, of_bucket, of_step), (
        f"calls of a step of {way}: {one.most_common()}"
    )
