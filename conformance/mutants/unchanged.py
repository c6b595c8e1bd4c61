"""DDPs and a backend that are made as mutants are, without a bug: a scenario that detects one is a false alarm.

They are the controls of every run of mutants, and show that the requirements judge a DDP by calling it.
"""

# No `from __future__ import annotations`: torch compares the annotations of a comm hook with types.

import dataclasses
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from conformance.backends.gloo import GLOO
from conformance.mutants.bases import with_options
from conformance.mutants.patches import Call, as_part, replaces
from conformance.mutants.relay import Relay
from ddp_impl import DistributedDataParallel as Ours
from ddp_impl.reducer.reducer import Reducer

#: The same classes by another name, in another module.
ReexportedTorch = TorchDDP
Reexported = Ours


class _SameReducer(Reducer):
    """Changes nothing."""


@replaces(as_part(_SameReducer), "__init__")
def Subclass(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """Hands everything on."""
    init(*args, **kwargs)


@replaces(Ours, "__init__")
def TreatsAllAsLarge(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """Treats every gradient as it treats large ones, which few of the suite's models have."""
    with with_options(large_numel=1):
        init(*args, **kwargs)


@replaces(TorchDDP, "__init__")
def SubclassOfTorch(ddp: TorchDDP, init: Call, *args: Any, **kwargs: Any) -> None:
    """Hands everything on."""
    init(*args, **kwargs)


class Composed(nn.Module):
    """Holds a DDP that does all the work, and shows whatever it shows."""

    Inner: type[nn.Module] = Ours

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        inner = self.Inner(*args, **kwargs)
        self.__dict__ = inner.__dict__  # one state with two classes
        self.__dict__["inner"] = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the DDP."""
        return self.inner.forward(*args, **kwargs)

    def __reduce__(self) -> Any:
        """Copy the DDP, and hold the copy as it is held itself."""
        return _composed_of, (type(self), self.__dict__["inner"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__dict__":
            object.__setattr__(self, name, value)
        else:
            setattr(self.__dict__["inner"], name, value)


def _composed_of(kind: type[Composed], inner: nn.Module) -> Composed:
    composed = kind.__new__(kind)
    composed.__dict__ = inner.__dict__
    composed.__dict__["inner"] = inner
    return composed


class ComposedOfTorch(Composed):
    """Holds torch's DDP."""

    Inner = TorchDDP


def called(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Call ddp_impl's DDP in a function of its own."""
    return Ours(module, *args, **kwargs)


def called_torch(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Call torch's DDP in a function of its own."""
    return TorchDDP(module, *args, **kwargs)


#: By base, as `mutants.toml` names it.
UNCHANGED = {
    "ddp_impl": ("Subclass", "Composed", "called", "Reexported", "TreatsAllAsLarge"),
    "torch": ("SubclassOfTorch", "ComposedOfTorch", "called_torch", "ReexportedTorch"),
}

#: gloo behind the group in Python from which backends that are wrong are made.
RELAYED = dataclasses.replace(GLOO, name="relayed", create=Relay)
