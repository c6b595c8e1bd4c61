"""Mutants of chapter scale: DDPs that are right up to some number, size, length or precision, and wrong beyond it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.mutants.bases import Reducing
from ddp_impl import DistributedDataParallel, collectives
from ddp_impl.bucket import Bucket
from ddp_impl.buffers import broadcast_state
from ddp_impl.parameter_usage import ParameterUsage
from ddp_impl.reducer import Reducer


class MasksSixtyFourParameters(Reducing):
    """BUG: a mask of 64 bits says which parameters have a gradient; those from the 65th on get zeros."""

    class OwnReducer(Reducer):
        """Hands out what is in the mask."""

        def _hand_out(self, bucket: Bucket, buffer: Tensor, used: Sequence[bool] | None) -> None:
            for member, view in zip(bucket.members, bucket.views, strict=False):
                if member.index >= 64:
                    view.zero_()
            super()._hand_out(bucket, buffer, used)


class TellsTheUseOfSixtyFour(Reducing):
    """BUG: ranks tell each other of 64 parameters whether they use them; all others count as used."""

    class OwnUsage(ParameterUsage):
        """Exchanges one word."""

        def _used(self, used_before: Collection[int] = ()) -> list[bool]:
            return [used or index >= 64 for index, used in enumerate(super()._used(used_before))]


class CountsBucketsInAByte(Reducing):
    """BUG: sums in the 256th bucket and those behind it are not divided."""

    class OwnReducer(Reducer):
        """Knows 255 buckets."""

        def _hand_out(self, bucket: Bucket, buffer: Tensor, used: Sequence[bool] | None) -> None:
            if bucket.index >= 255:
                buffer.mul_(self.divisor)
            super()._hand_out(bucket, buffer, used)


class SendsOneMebibyte(Reducing):
    """BUG: of a bucket of more than 1 MiB, only so much is sent."""

    class OwnReducer(Reducer):
        """Sends what fits."""

        def _start(self, bucket: Bucket, buffer: Tensor) -> None:
            fits = 2**20 // buffer.element_size()
            super()._start(bucket, buffer if self.comm_hook is not None or bucket.sparse else buffer[:fits])


class CountsStepsInAByte(Reducing):
    """BUG: the counter of steps overflows after 127, and from then on sums are not divided."""

    class OwnReducer(Reducer):
        """Counts in eight bits with a sign."""

        _num_steps = 0

        def _hand_out(self, bucket: Bucket, buffer: Tensor, used: Sequence[bool] | None) -> None:
            self._num_steps += bucket.index == 0
            if self._num_steps > 127:
                buffer.mul_(self.divisor)
            super()._hand_out(bucket, buffer, used)


class IsWrongInEveryHundredthStep(Reducing):
    """BUG: in every hundredth step, in which it measures times, sums are not divided."""

    class OwnReducer(Reducer):
        """Measures now and then."""

        _num_steps = 0

        def _hand_out(self, bucket: Bucket, buffer: Tensor, used: Sequence[bool] | None) -> None:
            self._num_steps += bucket.index == 0
            if self._num_steps % 100 == 0:
                buffer.mul_(self.divisor)
            super()._hand_out(bucket, buffer, used)


class TiresOfBuffers(DistributedDataParallel):
    """BUG: buffers are copied before the first 256 forwards only."""

    _num_copies = 0

    def _sync_buffers(self, authoritative: bool = True) -> None:
        self._num_copies += 1
        if self._num_copies <= 256:
            super()._sync_buffers(authoritative)


class SendsTwentyThreeBits(Reducing):
    """BUG: gradients travel without the last bit of their mantissas."""

    class OwnReducer(Reducer):
        """Rounds towards zero."""

        def _start(self, bucket: Bucket, buffer: Tensor) -> None:
            if not bucket.sparse and buffer.dtype is torch.float32:
                buffer.view(torch.int32).bitwise_and_(-2)
            super()._start(bucket, buffer)


class TakesSmallAveragesForNoise(Reducing):
    """BUG: averages below 1e-8 come out as zero."""

    class OwnReducer(Reducer):
        """Cleans up."""

        def _hand_out(self, bucket: Bucket, buffer: Tensor, used: Sequence[bool] | None) -> None:
            if not bucket.sparse and buffer.is_floating_point():
                buffer[buffer.abs() < 1e-8] = 0
            super()._hand_out(bucket, buffer, used)


class CopiesSixteenBuffers(DistributedDataParallel):
    """BUG: only the first 16 buffers are copied."""

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """Return the first of them."""
        return dict(list(super().named_module_buffers.items())[:16])


class CopiesSmallBuffers(DistributedDataParallel):
    """BUG: buffers of more than 64 KiB are not copied."""

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """Return the small ones."""
        return {name: value for name, value in super().named_module_buffers.items() if value.nbytes <= 2**16}


class CopiesTheStateOfSixtyFour(DistributedDataParallel):
    """BUG: of all parameters and buffers together, the first 64 are copied at construction."""

    def _synchronise_state(self, with_buffers: bool, group_src: int = 0) -> None:
        def broadcast_some(tensors: Sequence[Tensor], *rest: Any) -> None:
            broadcast_state(tensors[:64], *rest)

        with mock.patch("ddp_impl.distributed.broadcast_state", broadcast_some):
            super()._synchronise_state(with_buffers, group_src)


class SendsTheFirstChunk(DistributedDataParallel):
    """BUG: of what does not fit into one broadcast, only the first one is sent."""

    def _synchronise_state(self, with_buffers: bool, group_src: int = 0) -> None:
        with mock.patch("ddp_impl.collectives._chunks", _first_chunks):
            super()._synchronise_state(with_buffers, group_src)

    def _sync_buffers(self, authoritative: bool = True) -> None:
        with mock.patch("ddp_impl.collectives._chunks", _first_chunks):
            super()._sync_buffers(authoritative)


class SendsEveryDtypeAsItIs(DistributedDataParallel):
    """BUG: state goes to the backend in its own dtype, also where the backend does not know that."""

    def _synchronise_state(self, with_buffers: bool, group_src: int = 0) -> None:
        def broadcast(tensor: Tensor, group: dist.ProcessGroup, group_src: int) -> None:
            dist.broadcast(tensor, group=group, group_src=group_src)

        with mock.patch("ddp_impl.collectives.broadcast_from", broadcast):
            super()._synchronise_state(with_buffers, group_src)


_all_chunks = collectives._chunks


def _first_chunks(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    known: set[torch.dtype] = set()
    for chunk in _all_chunks(tensors):
        if chunk[0].dtype not in known:
            known.add(chunk[0].dtype)
            yield chunk
