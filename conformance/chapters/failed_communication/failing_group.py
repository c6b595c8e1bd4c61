"""A process group that leaves the work to another one, and of whose collectives one fails in a given way."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

#: How a collective fails -> what that is like.
FAILURES = {
    "wait": "its wait raises, and its future holds no error",
    "gone": "its wait raises and its future holds the error, as gloo reports a peer that is gone",
    "future": "its future holds an error, and its wait returns True",
    "false": "its wait returns False, and its future holds no error",
    "told": "its exception() and is_success() report an error, and nothing else does",
    "size": "its future holds tensors of another size",
    "call": "the call raises before there is a work",
    "late": "the last rank raises in the call, and the others wait for it until the timeout",
}

#: The name by which an error of ours is known.
ERROR = "this collective has failed"
_MOST_LATE = timedelta(seconds=0.2)

#: Methods of `ProcessGroup` -> torch's public name of the collective.
_COLLECTIVES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
}


class FailingGroup(dist.ProcessGroup):
    """Hands every collective to `inner`, and lets one fail on all ranks, which keep what they had.

    The collective itself runs on copies, except where ranks do not issue it, so that the ranks stay in step: whatever
    follows meets its like. `issued` describes the collectives since `begin`.
    """

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner = inner
        self._name = ""
        self._works: list[dist.Work] = []  # C++ code that waits for one holds its C++ part only
        self.begin()
        for kind in inner._device_types:
            self._register_backend(kind, dist.ProcessGroup.BackendType.CUSTOM, inner._get_backend(kind))
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)

    def begin(self, position: int = -1, failure: str = "") -> None:
        """Restart the count, and let the collective in this `position`, from 0, fail as `FAILURES` says; -1: none."""
        self._position, self._failure = position, failure
        self.issued: list[str] = []

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "failing"

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def get_group_store(self) -> Any:
        return self.inner.get_group_store()

    def _issue(self, method: str, outputs: Any, rest: Sequence[Any], options: dict[str, Any]) -> Any:
        tensors = list(_flat(outputs))
        number, operation = len(self.issued), _COLLECTIVES[method]
        sizes = ", ".join(f"{tensor.numel()} x {str(tensor.dtype)[6:]}" for tensor in tensors)
        self.issued.append(f"{operation} #{number} ({sizes})")
        issue: Callable[..., Any] = getattr(self.inner, method)
        if number != self._position:
            return issue(outputs, *rest, **options)
        if self._failure == "call" or (self._failure == "late" and self.rank() == self.size() - 1):
            raise RuntimeError(ERROR)
        if self._failure == "late":
            for given in rest:
                if hasattr(given, "timeout"):
                    given.timeout = _MOST_LATE
            return issue(outputs, *rest, **options)
        issue(_copied(outputs), *rest, **options).wait()
        if "gather" in operation:
            for tensor in tensors:  # else it holds what was in memory, by chance the right values
                tensor.copy_(next(iter(_flat(rest[0]))).view_as(tensor) if operation == "all_gather" else tensor * 0)
        self._works.append(FailedWork(self._failure, tensors))
        return self._works[-1]


class FailedWork(dist.Work):
    """The work of a collective that has failed, and says so where `failure` has it."""

    def __init__(self, failure: str, outputs: Sequence[Tensor]) -> None:
        """Fail; `outputs` are what the collective should have written."""
        super().__init__()
        self._failure = failure
        self._outputs = list(outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._failure in ("wait", "gone"):
            raise RuntimeError(ERROR)
        return self._failure != "false"

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        if self._failure in ("future", "gone"):
            future.set_exception(RuntimeError(ERROR))
        elif self._failure == "size":
            future.set_result([torch.zeros(each.numel() + 1, dtype=each.dtype) for each in self._outputs])
        else:
            future.set_result(self._outputs)
        return future

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return self._failure != "told"

    def exception(self) -> Any:
        return RuntimeError(ERROR) if self._failure == "told" else None

    def result(self) -> list[Tensor]:
        return self._outputs


def _collective(method: str) -> Callable[..., Any]:
    def issue(self: FailingGroup, outputs: Any, *rest: Any, **options: Any) -> Any:
        return self._issue(method, outputs, rest, options)

    issue.__name__ = method
    issue.__doc__ = f"Issue {_COLLECTIVES[method]}, or let it fail."
    return issue


for _method in _COLLECTIVES:
    if hasattr(dist.ProcessGroup, _method):  # torch >= 2.12 has new names for some
        setattr(FailingGroup, _method, _collective(_method))


def _flat(value: Any) -> Sequence[Tensor]:
    return [value] if isinstance(value, Tensor) else [tensor for item in value for tensor in _flat(item)]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else [_copied(item) for item in value]
