"""The dtypes of buffers: all that torch has, less those that cannot be carried."""

import contextlib
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conformance.models.buffer_values import BUFFERS, DTYPES, LEFT_OUT, buffer_value

CARRIED = {name for name in DTYPES if not LEFT_OUT.fullmatch(name)}


@pytest.fixture(scope="module")
def group() -> Any:
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=30))  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted(set(DTYPES) - {"complex32"}))
def test_a_dtype_is_left_out_if_and_only_if_gloo_refuses_it(name: str, group: Any) -> None:
    options = dist.BroadcastOptions()
    refused = contextlib.nullcontext() if name in CARRIED else pytest.raises(RuntimeError)
    with warnings.catch_warnings(), refused:
        warnings.simplefilter("ignore")  # quantised tensors are deprecated
        group.broadcast([torch.empty(2, dtype=DTYPES[name])], options).wait()


def test_complex32_is_left_out_because_torch_warns_of_it() -> None:
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.empty(2, dtype=torch.complex32)
    finally:
        torch.set_warn_always(always)
    assert any("experimental" in str(each.message) for each in caught)
    assert "complex32" not in CARRIED


def test_every_carried_dtype_is_a_buffer_whose_values_tell_the_rank() -> None:
    assert {f"of_{name}" for name in CARRIED} <= set(BUFFERS)
    for name in BUFFERS:
        mine, other = buffer_value(name, 0), buffer_value(name, 1)
        assert mine.dtype is BUFFERS[name][1]
        assert not mine.numel() or not torch.equal(mine, other), name
