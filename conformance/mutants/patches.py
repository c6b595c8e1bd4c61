"""DDPs that are a DDP with one mistake, each a function of a few lines: what `mutants.py` of the chapters hold.

    @replaces(Reduction, "launch")
    def SumsInViews(reduction: Reduction, launch: Call, bucket: Bucket) -> None:
        '''BUG: with `gradient_as_bucket_view` gradients are summed and never divided.'''
        if reduction.options.gradient_as_bucket_view:
            reduction.divisor = 1
        launch(bucket)

The function stands for the methods named, and gets the one that it stands for behind the object that was called. It
becomes a class, the DDP that has the mistake, and is named like one: `--ddp module:SumsInViews`. What it replaces is a
method of a DDP, of `ddp_impl` or of torch, or of a part of `ddp_impl`'s. A part with several methods of its own is
written as a class, below `as_part`. What takes a user's keywords has a `/` behind the two, as they may be called alike.

Nothing that is shared changes: each mutant is a class of its own, and its objects alone have parts of another class.
"""

import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

from torch import nn

from ddp_impl import DistributedDataParallel as Ours
from ddp_impl.api import distributed
from ddp_impl.api.distributed import InGraphBackwards
from ddp_impl.autograd.hooks import AutogradHooks, GraphSearch
from ddp_impl.autograd.marks import Anchor
from ddp_impl.buckets.bucket import ManagedParameter
from ddp_impl.buckets.gradients import EarlyMoves
from ddp_impl.compile.compiled_calls import CompiledCalls
from ddp_impl.module.mixed_precision import Casts, PrecisionCaster
from ddp_impl.module.parameter_watch import ParameterWatch
from ddp_impl.reducer import expectations, reducer, reduction
from ddp_impl.reducer.company import Order
from ddp_impl.reducer.expectations import AllUsed, FindUnused, StaticGraph
from ddp_impl.reducer.planning import BucketPlanning
from ddp_impl.reducer.reducer import Reducer
from ddp_impl.reducer.reduction import Reduction
from ddp_impl.wire.peers import Peers

#: The method for which a mutant stands, bound to its object.
Call = Callable[..., Any]

#: Where a wrapper has its parts: they become the mutant's as soon as the reducer is attached.
_PLACES: dict[type, str] = {
    Reducer: "reducer",
    Reduction: "reducer.reduction",
    BucketPlanning: "reducer.planning",
    Anchor: "reducer.anchor",
    GraphSearch: "reducer.reduction.graph",
    Peers: "_peers",
    ParameterWatch: "_watch",
    InGraphBackwards: "_in_graph_backwards",
    CompiledCalls: "_compiled_calls",
    Casts: "_caster._casts",
}
#: Parts that act while they are made, or that are made anew, and the module that makes them.
_MADE_IN: dict[type, ModuleType] = {
    PrecisionCaster: distributed, AutogradHooks: reducer, EarlyMoves: reducer, Order: reduction, AllUsed: expectations,
    FindUnused: expectations, StaticGraph: expectations,
}  # fmt: skip


def replaces(owner: type[Any], *methods: str) -> Callable[[Call], Any]:
    """Return a decorator that makes a mutant of a function, see above; `methods` may be properties of `owner`, too."""

    def made(bug: Call) -> Any:
        kind = _derived(owner, bug, {method: _through(owner, method, bug) for method in methods})
        return kind if issubclass(owner, nn.Module) else as_part(kind)

    return made


def as_part(part: type[Any]) -> Any:
    """Return the mutant of `ddp_impl` that has a part of this class where that has one of its base."""
    kind = next(base for base in part.__mro__ if base in _PLACES or base in _MADE_IN)

    def construct(_: Ours, init: Call, *args: Any, **options: Any) -> None:
        with mock.patch.object(_MADE_IN[kind], kind.__name__, part):
            init(*args, **options)

    def attach(ddp: Ours, attach_reducer: Call, members: Sequence[ManagedParameter]) -> None:
        attach_reducer(members)
        held: Any = ddp
        for name in _PLACES[kind].split("."):
            held = getattr(held, name)
            if held is None:  # without mixed precision nothing is cast
                return
        held.__class__ = part

    method, bug = ("__init__", construct) if kind in _MADE_IN else ("attach_reducer", attach)
    return _derived(Ours, part, {method: _through(Ours, method, bug)})


def _derived(base: type[Any], bug: Any, body: dict[str, Any]) -> type[Any]:
    """Return a class that derives from `base` and has the name and the words of `bug`."""
    said = {name: getattr(bug, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(bug.__name__, (base,), {**body, **said})


def _through(owner: type[Any], name: str, bug: Call) -> Any:
    """Return a method that calls `bug` in the place of the one that `owner` has by this name."""
    found: Any = inspect.getattr_static(owner, name)
    if isinstance(found, property):
        return property(lambda self: bug(self, lambda: found.__get__(self)), doc=found.__doc__)

    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return bug(self, found.__get__(self), *args, **kwargs)

    method.__name__, method.__qualname__, method.__doc__ = name, f"{bug.__name__}.{name}", found.__doc__
    return method
