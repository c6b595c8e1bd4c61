"""Tensors in every layout, each in an arena whose other bytes must not change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.programs.operations.data import sentinel, written_over

#: Layouts of a tensor. `expanded` can only be read: its rows are one row. The tensors of a list are `backwards` if they
#: are in one piece, the last tensor first.
LAYOUTS = (
    "contiguous", "transposed", "strided", "channels_last", "expanded", "backwards",
    *(f"offset-{n}" for n in range(1, 16)),
)  # fmt: skip
#: Layouts of a list: in one piece, in order or backwards, or all but the last tensor in one piece.
OF_LISTS = ("backwards", "in-one-piece", "all-but-the-last")
#: The layout of inputs that are in one buffer with the outputs, before them.
WITH_OUTPUTS = "in-one-buffer-with-the-output"
#: The layout of a tensor that is its whole storage.
WHOLE = "whole-storage"
#: The number of elements before and after every other tensor.
_GUARD = 64


@dataclass(frozen=True, slots=True)
class Arena:
    """A tensor and the memory around it, in which other tensors may lie `beside` it."""

    tensor: Tensor
    memory: Tensor
    before: Tensor
    beside: tuple[Tensor, ...] = ()

    @staticmethod
    def of(shape: tuple[int, ...], dtype: torch.dtype, layout: str, device: torch.device) -> Arena:
        """Return a tensor of `shape` in `layout`, filled with the sentinel, in memory filled with other NaNs.

        A layout that the shape cannot have is contiguous.
        """
        strides, span = _strides(shape, layout)
        guard = 0 if layout == WHOLE else _GUARD
        start = guard + (int(layout.removeprefix("offset-")) if layout.startswith("offset-") else 0)
        # As bytes: a float8 cannot be filled.
        raw = torch.empty((start + span + guard) * dtype.itemsize, dtype=torch.uint8, device=device)
        made = Arena(raw.view(dtype).as_strided(shape, strides, start), raw, raw.clone())
        made.renew()
        return made

    @staticmethod
    def list_of(
        shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, layout: str, device: torch.device
    ) -> list[Arena]:
        """Return a tensor of each of `shapes`."""
        if layout not in OF_LISTS:
            return [Arena.of(shape, dtype, layout, device) for shape in shapes]
        if layout == "all-but-the-last":
            last = [Arena.of(shape, dtype, "contiguous", device) for shape in shapes[-1:]]
            return [*Arena.list_of(shapes[:-1], dtype, "in-one-piece", device), *last]
        order, lies = (-1, WHOLE) if layout == "backwards" else (1, "contiguous")
        whole = Arena.of((sum(map(math.prod, shapes)),), dtype, lies, device)
        pieces = whole.tensor.split([math.prod(shape) for shape in shapes[::order]])[::order] if shapes else ()
        tensors = tuple(piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True))
        return [Arena(tensor, whole.memory, whole.before, tensors) for tensor in tensors]

    def renew(self) -> None:
        """Fill it as at first."""
        dtype = self.tensor.dtype
        self.memory.fill_(sentinel(dtype))
        if dtype != torch.bool:
            self.memory.view(-1, dtype.itemsize)[:, 0] = sentinel(dtype) - 1  # the lowest byte: a NaN stays a NaN
            for one in (self.tensor, *self.beside):
                rows = one[:1] if one.dim() and one.stride(0) == 0 else one  # of an expanded tensor all rows are one
                _raw(rows).fill_(sentinel(dtype) if dtype.itemsize == 1 else -1)
        self.before.copy_(self.memory)

    def write_over(self) -> None:
        """Fill all of it with another value, for an operation that reads it too late."""
        self.memory.fill_(written_over(self.tensor.dtype))

    def fill(self, values: Tensor) -> None:
        """Copy `values`, of as many elements, into the tensor in logical order, as its state before the operation."""
        if self.tensor.dim() and self.tensor.numel() and self.tensor.stride(0) == 0 and self.tensor.shape[0] > 1:
            self.tensor[0].copy_(values.view(self.tensor.shape)[0])
        else:
            self.tensor.copy_(values.view(self.tensor.shape))
        self.before.copy_(self.memory)

    def touched(self) -> str:
        """Return which bytes outside of the tensor have changed, as a clause; empty if none has."""
        size = self.tensor.element_size()
        # A fast path: most are contiguous and alone, and megabytes of indices take longer than the operation.
        if self.tensor.is_contiguous() and not self.beside:
            start = self.tensor.storage_offset() * size
            end = start + self.tensor.numel() * size
            around = (slice(None, start), slice(end, None))
            if all(torch.equal(self.memory[part], self.before[part]) for part in around):
                return ""
        wrong = (self.memory != self.before).view(-1, size)
        for one in filter(Tensor.numel, (self.tensor, *self.beside)):  # whatever is in them may change
            place = (one.shape, one.stride(), one.storage_offset())
            wrong[torch.arange(len(wrong), device=wrong.device).as_strided(*place).reshape(-1)] = False
        found = wrong.view(-1).nonzero().flatten()
        if not len(found):
            return ""
        offset = int(found[0]) - self.tensor.storage_offset() * size
        return f"{len(found)} byte(s) outside of it changed, the first at byte {offset} from its start"

    def changed(self) -> str:
        """Return how many elements of the tensor changed, and the first of them, as a clause; empty if none did."""
        place = (self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset())
        if not self.tensor.numel():
            return ""
        now, then = (_raw(memory.view(self.tensor.dtype).as_strided(*place)) for memory in (self.memory, self.before))
        if torch.equal(now, then):
            return ""
        differs = now != then
        first = int(differs.reshape(self.tensor.numel(), -1).any(1).nonzero()[0])
        memories = (memory.view(self.tensor.dtype) for memory in (self.before, self.memory))
        old, new = (memory.as_strided(*place).reshape(-1)[first].item() for memory in memories)
        return (
            f"{int(differs.sum())} of {self.tensor.numel()} elements changed, the first, number {first}, from"
            f" {old} to {new}"
        )


def shaped(numel: int, layout: str) -> tuple[int, ...]:
    """Return a shape of about `numel` elements that can lie in `layout`."""
    if layout == "channels_last":
        return (2, 3, 1, max(1, numel // 6)) if numel else (0, 3, 2, 2)
    if layout in ("transposed", "strided", "expanded"):
        rows = next((rows for rows in (5, 4, 3, 2) if numel % rows == 0), 1)
        return (rows, numel // rows) if rows > 1 else (2, (numel + 1) // 2)
    return (numel,)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits, NaNs too."""
    return torch.equal(_raw(one), _raw(other))


def _raw(tensor: Tensor) -> Tensor:
    """Return `tensor` as integers of its width, which compare and copy bit by bit."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _strides(shape: tuple[int, ...], layout: str) -> tuple[tuple[int, ...], int]:
    order = list(range(len(shape)))
    if layout == "transposed":
        order.reverse()
    elif layout == "channels_last" and len(shape) == 4:
        order = [0, 2, 3, 1]
    strides = [0] * len(shape)
    step = 2 if layout == "strided" else 1
    for dimension in reversed(order):
        strides[dimension] = step
        step *= max(1, shape[dimension])
    if layout == "expanded" and len(shape) > 1:
        strides[0] = 0
    last = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True)) if math.prod(shape) else 0
    return tuple(strides), last + 1
