"""Operations in flight beside a cell's: of another group, of the same group, or of another thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

_NUMEL = 1000
#: How long to wait for them after the cell has raised.
_PATIENCE_S = 3.0

#: Waits for operations in flight; returns what is wrong with them, as a clause, empty if nothing is.
End = Callable[[], str]
#: Issues operations.
Begin = Callable[[], End]


class Neighbours:
    """A context manager: the operations of `begin` are in flight in the block, and `wrong` judges them at its end.

    A rank with a wrong result goes on, because the others would wait for it.
    """

    def __init__(self, begin: Begin, *, in_thread: bool = False) -> None:
        """Issue nothing yet; `in_thread`: a thread issues them and waits for them."""
        self.wrong = ""
        self._begin, self._end = begin, nothing()
        self._thread = threading.Thread(target=self._begin_and_end, daemon=True) if in_thread else None
        self._raised: Exception | None = None

    def __enter__(self) -> Neighbours:
        if self._thread is not None:
            self._thread.start()
        else:
            self._end = self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for them and judge them; if the block has raised, only wait, so that they end before the next cell."""
        if error is not None:
            if self._thread is None:
                self._thread = threading.Thread(target=self._end_quietly, daemon=True)
                self._thread.start()
            self._thread.join(_PATIENCE_S)
            return
        if self._thread is None:
            self.wrong = self._end()
            return
        self._thread.join()
        if self._raised is not None:
            raise self._raised

    def _end_quietly(self) -> None:
        with contextlib.suppress(Exception):
            self._end()

    def _begin_and_end(self) -> None:
        try:
            self.wrong = self._begin()()
        except Exception as error:
            self._raised = error


def nothing() -> End:
    """Issue nothing."""
    return lambda: ""


def all_reduces(group: Any, device: torch.device, number: int) -> Begin:
    """Return a function that issues all_reduces over `group`, alternately SUM and MAX. All its ranks must call it."""

    def begin() -> End:
        tensors = [torch.full((_NUMEL,), float(index + 1), device=device) for index in range(number)]
        works = [
            dist.all_reduce(tensor, _op(index), group=group, async_op=True) for index, tensor in enumerate(tensors)
        ]

        def end() -> str:
            for work in works:
                work.wait()
            return next(filter(None, (wrong(index, tensor) for index, tensor in enumerate(tensors))), "")

        return end

    def wrong(index: int, tensor: torch.Tensor) -> str:
        expected = float(index + 1) * (group.size() if _op(index) == dist.ReduceOp.SUM else 1)
        count = int((tensor != expected).sum())
        if not count:
            return ""
        return (
            f"of the all_reduce beside it (number {index} of {number}) {count} of {_NUMEL} elements are wrong:"
            f" expected {expected:g}, got {float(tensor[tensor != expected][0]):g}"
        )

    return begin


def _op(index: int) -> Any:
    return dist.ReduceOp.MAX if index % 2 else dist.ReduceOp.SUM
