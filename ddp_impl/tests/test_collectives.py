"""What ranks copy from one of them, with one rank; `conformance/chapters/scale` copies it between several."""

from __future__ import annotations

import pytest
import torch

from ddp_impl.buffers import broadcast_state
from ddp_impl.tests.ranks import group_of_one

#: gloo refuses to send these: "Invalid scalar type".
SELDOM = (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", SELDOM)
def test_state_of_dtypes_that_the_backend_does_not_know_is_sent_as_bytes(dtype: torch.dtype) -> None:
    alone, first, turned = torch.ones(()).to(dtype), torch.ones(3).to(dtype), torch.arange(6).view(2, 3).to(dtype).t()
    with group_of_one() as group:
        broadcast_state([alone], group, torch.device("cpu"))
        broadcast_state([first, turned], group, torch.device("cpu"))
    assert (alone.dtype, alone.float().item()) == (dtype, 1)
    assert turned.float().tolist() == [[0, 3], [1, 4], [2, 5]]
