"""Collectives that go on beside an operation: of another group, of the same one, or another thread's."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_NUMEL = 1000


def _op(index: int) -> Any:
    return dist.ReduceOp.MAX if index % 2 else dist.ReduceOp.SUM


class NeighbourError(Exception):
    """A collective beside the one that is tried came out wrong."""


class Neighbours:
    """A context manager: a number of all_reduces over `group`, by turns SUM and MAX, is under way in the block.

    At its end they must be right. Every rank of `group` must enter it.
    """

    def __init__(self, group: Any, device: torch.device, number: int, *, in_thread: bool) -> None:
        """Prepare the tensors; nothing is issued yet."""
        self._group, self._number = group, number
        self._tensors = [torch.full((_NUMEL,), float(index + 1), device=device) for index in range(number)]
        self._works: list[Any] = []
        self._thread = threading.Thread(target=self._issue_and_wait) if in_thread else None
        self._raised: Exception | None = None

    def __enter__(self) -> Neighbours:
        """Issue them, or start the thread that does."""
        if self._thread is not None:
            self._thread.start()
        else:
            self._issue()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for them, and raise `NeighbourError` if one is wrong; not where the block has raised."""
        if error is not None:
            return
        if self._thread is not None:
            self._thread.join()
        else:
            self._wait()
        if self._raised is not None:
            raise self._raised
        for index, tensor in enumerate(self._tensors):
            if wrong := self._wrong(index, tensor):
                raise NeighbourError(wrong)

    def _wrong(self, index: int, tensor: Tensor) -> str:
        expected = float(index + 1) * (self._group.size() if _op(index) == dist.ReduceOp.SUM else 1)
        number = int((tensor != expected).sum())
        if not number:
            return ""
        return (
            f"of the all_reduce beside it (number {index} of {self._number}) {number} of {_NUMEL} elements are wrong:"
            f" expected {expected:g}, got {float(tensor[tensor != expected][0]):g}"
        )

    def _issue(self) -> None:
        self._works = [
            dist.all_reduce(tensor, _op(index), group=self._group, async_op=True)
            for index, tensor in enumerate(self._tensors)
        ]

    def _wait(self) -> None:
        for work in self._works:
            work.wait()

    def _issue_and_wait(self) -> None:
        try:
            self._issue()
            self._wait()
        except Exception as error:
            self._raised = error
