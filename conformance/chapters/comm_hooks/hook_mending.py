"""Works around bugs in torch's ready-made comm hooks from outside, so that programs can run a DDP with them."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.futures import Future


@contextlib.contextmanager
def orthogonalising_single_matrices() -> Iterator[None]:
    """Make torch's batched PowerSGD run: torch 2.13 passes one matrix to a function that takes a batch of matrices."""
    of_batch = power_sgd._orthogonalize

    def orthogonalize(matrices: Tensor, epsilon: float = 0) -> None:
        of_batch(matrices.unsqueeze(0) if matrices.dim() == 2 else matrices, epsilon)

    with mock.patch.object(power_sgd, "_orthogonalize", orthogonalize):
        yield


@contextlib.contextmanager
def any_backend() -> Iterator[None]:
    """Allow torch's `hook_with_zero_step` over gloo, which torch rejects because similar hooks may hang there.

    This hook does not hang: it waits and broadcasts inside the hook, in the same order on every rank.
    """
    with mock.patch.object(dist, "get_backend", return_value="any"):
        yield


class StackingGroup(dist.ProcessGroup):
    """Delegates all_gather to a group and returns futures of NCCL's form.

    torch's quantisation hooks read the gathered tensor as `future.wait()[0]`. That works for NCCL, whose futures hold
    one tensor with the ranks in its first dimension; gloo's futures hold one tensor per rank.
    """

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner = inner

    def allgather(self, *args: Any, **kwargs: Any) -> Any:
        return _StackingWork(self.inner.allgather(*args, **kwargs), self.inner.size())


class _StackingWork:
    def __init__(self, work: dist.Work, num_ranks: int) -> None:
        self.work = work
        self.num_ranks = num_ranks

    def get_future(self) -> Future[Any]:
        return self.work.get_future().then(self._stacked)

    def _stacked(self, future: Future[Any]) -> list[Tensor]:
        tensors = future.value()
        return [torch.stack(tensors)] if len(tensors) == self.num_ranks else tensors
