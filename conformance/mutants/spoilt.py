"""Backends that are gloo with one mistake, each a function of a few lines: what `mutants.py` of the chapters hold.

    @spoils("allreduce")
    def leaves_out_rank_1(group, call, tensors, *options):
        '''BUG: rank 1's tensor is not in the sum.'''
        if group.rank() == 1:
            tensors[0].zero_()
        return call(tensors, *options)

The function stands for the methods named; `call` is gloo's method of that name, and `group` the relay. Below
`spoils_work` it stands for a method of the Works that collectives give. What needs several methods is a class: a
`Relay` below `of_class`, or a `WorkAround` below `gives`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from conformance.backends.backend import Backend
from conformance.backends.gloo import GLOO
from conformance.errors import certain
from conformance.mutants.relay import Relay

#: Names under which torch calls one method, by the version of torch.
_ALIASES = {
    "all_gather_single": ("all_gather_single", "_allgather_base"),
    "reduce_scatter_single": ("reduce_scatter_single", "_reduce_scatter_base"),
    "all_to_all_single": ("all_to_all_single", "alltoall_base"),
    "all_gather_single_coalesced": ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    "reduce_scatter_single_coalesced": ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
}
Spoil = Callable[..., Any]


def spoils(*methods: str) -> Callable[[Spoil], Backend]:
    """Return a decorator that makes a backend of a function, see above; it is called like the function."""

    def made(spoil: Spoil) -> Backend:
        body: dict[str, Any] = {name: _through(spoil, name) for method in methods for name in _names(method)}
        kind = type(spoil.__name__, (Relay,), {**body, "__doc__": spoil.__doc__})
        return dataclasses.replace(GLOO, name=spoil.__name__, create=kind)

    return made


def of_class(kind: type[Relay]) -> Backend:
    """Return the backend whose groups are of a class: a class decorator, for what no single method makes."""
    return made_from(GLOO)(kind)


def made_from(base: Backend) -> Callable[[type[Relay]], Backend]:
    """Return a decorator like `of_class`, for a backend that declares what `base` does."""
    return lambda kind: dataclasses.replace(base, name=kind.__name__, create=kind)


def finished(work: Any) -> Any:
    """Wait for what gloo does, so that its result can be spoilt, and return its Work."""
    work.wait()
    return work


def reduction(options: tuple[Any, ...]) -> str:
    """Return the reduction that a call asks for, such as SUM."""
    if not options or not hasattr(options[0], "reduceOp"):
        return "SUM"
    op = options[0].reduceOp
    return str(getattr(op, "op", op)).rpartition(".")[2]


def with_reduction(options: tuple[Any, ...], op: Any) -> tuple[Any, ...]:
    """Return the options with another reduction."""
    if options and hasattr(options[0], "reduceOp"):
        options[0].reduceOp = op
    return options


class WorkAround(dist.Work):
    """A Work that asks gloo's for everything: subclasses spoil one method. `tensors` are what it is to write."""

    def __init__(self, inner: Any, tensors: Any = ()) -> None:
        super().__init__()
        self.inner, self.tensors = inner, tensors

    def wait(self, *timeout: Any) -> bool:
        """Wait as gloo does."""
        return bool(self.inner.wait(*timeout))

    def is_completed(self) -> bool:
        """Ask gloo."""
        return bool(self.inner.is_completed())

    def is_success(self) -> bool:
        """Ask gloo."""
        return bool(self.inner.is_success())

    def exception(self) -> Any:
        """Ask gloo."""
        return self.inner.exception()

    def result(self) -> Any:
        """Ask gloo."""
        return self.inner.result()

    def get_future(self) -> Any:
        """Ask gloo."""
        return self.inner.get_future()

    def _source_rank(self) -> int:
        return int(self.inner._source_rank())


class WorkDone(WorkAround):
    """Is done, whatever has come of the operation."""

    def __init__(self) -> None:
        super().__init__(None)

    def wait(self, *timeout: Any) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Be done."""
        return True


def gives(*methods: str) -> Callable[[type[WorkAround]], Backend]:
    """Return a decorator that makes a backend, whose `methods` give Works of a class, of that class."""

    def made(kind: type[WorkAround]) -> Backend:
        def spoil(group: Any, call: Any, *given: Any) -> Any:
            return kind(call(*given), *given[:1])

        spoil.__name__, spoil.__doc__ = kind.__name__, kind.__doc__
        return spoils(*methods)(spoil)

    return made


def spoils_work(name: str, *methods: str) -> Callable[[Spoil], Backend]:
    """Return a decorator like `spoils`, for the method `name` of the Works that the backend's `methods` give."""
    original = getattr(WorkAround, name)

    def made(spoil: Spoil) -> Backend:
        def called(work: WorkAround, *args: Any) -> Any:
            return spoil(work, functools.partial(original, work), *args)

        return gives(*methods)(type(spoil.__name__, (WorkAround,), {name: called, "__doc__": spoil.__doc__}))

    return made


SUM, MAX, MIN, BOR = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.BOR


def _names(method: str) -> list[str]:
    """Return the names that this torch has for a method of a backend."""
    names = [name for name in _ALIASES.get(method, (method,)) if hasattr(Relay, name)]
    certain(bool(names), f"a backend has no {method}")
    return names


def _through(spoil: Spoil, name: str) -> Callable[..., Any]:
    def issue(self: Relay, *args: Any, **kwargs: Any) -> Any:
        return spoil(self, getattr(self.inner, name), *args, *kwargs.values())

    issue.__name__ = name
    return issue
