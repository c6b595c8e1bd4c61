"""What graphs are given in place of a process group that is written in Python: their waits raise what has failed.

A graph waits in C++ code, which asks a work's `wait` alone. Of torch's own backends that raises whatever has failed. A
group of Python's may tell elsewhere, as `collectives.finished` knows.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from ddp_impl.wire.collectives import finished


def checked(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return `group`, or one that checks its works if it is written in Python. Not collective."""
    return group if type(group) is dist.ProcessGroup else CheckedGroup(group)


class CheckedGroup(dist.ProcessGroup):
    """Has `inner` reduce, and hands out works whose `wait` raises. Graphs that average use nothing else."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        """Stand for `inner`."""
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self._inner = inner
        self._unfinished: set[CheckedWork] = set()  # C++ code holds the C++ part of a work only

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the backend's name, which compilers ask for."""
        return str(self._inner.name())

    def allreduce(self, tensors: list[Tensor], *options: Any) -> CheckedWork:  # type: ignore[override]
        """Reduce in place."""
        return self._started(self._inner.allreduce(tensors, *options), tensors, "all_reduce")

    def allreduce_coalesced(self, tensors: list[Tensor], *options: Any) -> CheckedWork:
        """Reduce several tensors in place."""
        return self._started(self._inner.allreduce_coalesced(tensors, *options), tensors, "all_reduce_coalesced")

    def _started(self, work: dist.Work, tensors: list[Tensor], operation: str) -> CheckedWork:
        checked = CheckedWork(work, tensors, operation, self._unfinished)
        self._unfinished.add(checked)
        return checked


class CheckedWork(dist.Work):
    """A work of which it is enough to ask `wait`; until then it is one of `unfinished`."""

    def __init__(self, inner: dist.Work, tensors: list[Tensor], operation: str, unfinished: set[CheckedWork]) -> None:
        """Stand for `inner`, the `operation` that writes `tensors`."""
        super().__init__()
        self._inner, self._tensors, self._operation, self._unfinished = inner, tensors, operation, unfinished

    def wait(self, *timeout: Any) -> bool:
        """Wait; raises what `finished` raises."""
        self._unfinished.discard(self)
        finished(self._inner, self._operation, self._tensors)
        return True


class _Done(dist.Work):
    def wait(self, *timeout: Any) -> bool:
        return True


class Nobody(dist.ProcessGroup):
    """Stands for a group where nothing is to be averaged: of one rank, so that sums are what they were."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self._done = _Done()  # C++ code holds the C++ part of a work only

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return a name, which compilers ask for."""
        return "nobody"

    def allreduce(self, tensors: list[Tensor], *options: Any) -> dist.Work:  # type: ignore[override]
        """Return a work that is done."""
        return self._done

    def allreduce_coalesced(self, tensors: list[Tensor], *options: Any) -> dist.Work:
        """Return a work that is done."""
        return self._done
