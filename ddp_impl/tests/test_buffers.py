"""Buffers of dtypes that no backend has a number for are copied all the same."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_impl import DistributedDataParallel
from ddp_impl.tests.ranks import group_of_one, run_ranks
from ddp_impl.torch_internals.tensors import foreach_copy_
from ddp_impl.wire import collectives

DTYPES = (
    torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.bits8,
)  # fmt: skip


def values(rank: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(16, dtype=torch.uint8) + 100 * rank).view(dtype)


def bytes_after_wrapping(rank: int) -> list[list[int]]:
    module = nn.Linear(2, 2)
    for index, dtype in enumerate(DTYPES):
        module.register_buffer(f"alone{index}", values(rank, dtype))
        module.register_buffer(f"scalar{index}", values(rank, dtype)[0])
    module.register_buffer("neighbour", values(rank, torch.int16))
    module.register_buffer("transposed", values(rank, torch.int16).view(2, 4).t())
    DistributedDataParallel(module)
    return [
        buffer.reshape(-1).view(torch.uint8).tolist()
        if buffer.dim() < 2
        else buffer.t().flatten().view(torch.uint8).tolist()
        for _, buffer in module.named_buffers()
    ]


def bytes_after_wrapping_in_rounds(rank: int) -> list[list[int]]:
    with mock.patch.object(collectives, "BROADCAST_CHUNK_BYTES", 20):
        return bytes_after_wrapping(rank)


@pytest.mark.parametrize("wrapping", [bytes_after_wrapping, bytes_after_wrapping_in_rounds])
def test_buffers_travel_as_bytes_where_no_backend_knows_their_dtype(
    tmp_path: Path, wrapping: Callable[[int], list[list[int]]]
) -> None:
    first, second = run_ranks(wrapping, 2, tmp_path)
    everything = [list(range(16))] * (len(DTYPES) + 2)
    scalars = [list(range(dtype.itemsize)) for dtype in DTYPES]
    assert first == second
    assert sorted(first) == sorted([*everything, *scalars])


def test_a_sparse_buffer_is_refused_by_name_unless_it_need_not_be_copied() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("graph", torch.eye(2).to_sparse())
    with group_of_one():
        with pytest.raises(RuntimeError, match=r"buffer 'graph' has layout torch\.sparse_coo.*to_dense"):
            DistributedDataParallel(module)
        with pytest.warns(FutureWarning):
            ddp = DistributedDataParallel(module, broadcast_buffers=False)
        ddp(torch.ones(1, 2)).sum().backward()
        late = DistributedDataParallel(nn.Linear(2, 2))
        late.module.register_buffer("graph", torch.eye(2).to_sparse())
        late._has_buffers = True
        with pytest.raises(RuntimeError, match="buffer 'graph'"):
            late(torch.ones(1, 2))


def test_a_device_without_kernels_for_lists_copies_one_tensor_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_kernel(targets: list[Tensor], sources: list[Tensor]) -> None:
        raise RuntimeError('"foreach_tensor_copy" not implemented')

    monkeypatch.setattr(torch, "_foreach_copy_", no_kernel)
    targets = [torch.zeros(2), torch.zeros(3)]
    foreach_copy_(targets, [torch.ones(2), torch.full((3,), 2.0)])
    assert [target.tolist() for target in targets] == [[1.0, 1.0], [2.0, 2.0, 2.0]]


#: How ranks 0 and 1 change a buffer, and what each of them says of it.
_CHANGES = (
    (("dtype", "dtype"), ("trained with tensor([0., 0.], dtype",) * 2),
    (("shape", "shape"), ("trained with tensor([0., 0., 0., 0.])",) * 2),
    (("gone", "gone"), ("trained with None",) * 2),
    (("dtype", "shape"), ("'mean' is [2] torch.float64 on cpu on rank 0, [3] torch.float32",) * 2),
    (("shape", "gone"), ("'mean' of rank 0 has no counterpart on rank 1",) * 2),
    (("", "dtype"), ("rank 1 raised ReplicaMismatchError", "'mean' is [2] torch.float32 on cpu on rank 0, [2]")),
    (("", "at first"), ("'mean' is [2] torch.float32 on cpu on rank 0, [3]",) * 2),
    (("gone", ""), ("'mean' of rank 1 has no counterpart on rank 0", "rank 0 raised ReplicaMismatchError")),
)


def changes_a_buffer(rank: int, changes: tuple[str, str]) -> str:
    module = nn.Linear(2, 2)
    module.register_buffer("mean", torch.zeros(3 if changes[rank] == "at first" else 2))
    group = dist.new_group(timeout=timedelta(seconds=60 if all(changes) else 3))
    ddp = DistributedDataParallel(module, process_group=group, init_sync="at first" not in changes)
    for step in range(4):
        change = changes[rank] if step in (1, 2) and "at first" not in changes else ""
        if change:
            size, dtype = (2, torch.float64) if change == "dtype" else (2 + step, torch.float32)
            module.register_buffer("mean", None if change == "gone" else torch.full((size,), float(rank), dtype=dtype))
        try:
            ddp(torch.ones(3, 2)).sum().backward()
        except RuntimeError as error:
            return "\n".join((str(error), *getattr(error, "__notes__", ())))
    return f"trained with {module.mean}"


def changes_buffers(rank: int) -> list[str]:
    return [changes_a_buffer(rank, changes) for changes, _ in _CHANGES]


def test_ranks_compare_buffers_that_have_changed(tmp_path: Path) -> None:
    for (_, words), *told in zip(_CHANGES, *run_ranks(changes_buffers, 2, tmp_path), strict=True):
        assert all(expected in text for expected, text in zip(words, told, strict=True)), (words, told)
