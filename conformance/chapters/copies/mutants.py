"""Mutants of chapter copies: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

import dataclasses
import warnings
from typing import Any

import torch.distributed as dist
from torch import nn

from conformance.mutants.patches import Call, replaces
from ddp_impl import DistributedDataParallel as Ours
from ddp_impl.buckets.comm_hooks import BufferHookLocation
from ddp_impl.wire.peers import Peers


@replaces(Ours, "__getstate__")
def CopyTakesOver(ddp: Ours, getstate: Call) -> Any:
    """BUG: the original of a copy averages nothing any more."""
    state = getstate()
    ddp.reducer.remove_hooks()
    return state


@replaces(Ours, "__setstate__")
def CopyIsLocal(ddp: Ours, setstate: Call, state: dict[str, Any]) -> None:
    """BUG: a copy never averages anything."""
    setstate(state)
    ddp.reducer.remove_hooks()


class CopySharesParameters(Ours):
    """BUG: a deep copy trains the parameters of the original."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = type(self).__new__(type(self))
        copied.__setstate__(self.__getstate__())
        return copied


@replaces(Ours, "__setstate__")
def CopyForgetsOptions(ddp: Ours, setstate: Call, state: dict[str, Any]) -> None:
    """BUG: a copy ignores no parameters and buffers."""
    setstate({**state, "parameters_to_ignore": set()})


@replaces(Ours, "__setstate__")
def CopySyncs(ddp: Ours, setstate: Call, state: dict[str, Any]) -> None:
    """BUG: a copy is synchronised like a new wrapper, although only some ranks may make one."""
    setstate(state)
    ddp.synchronise_state(True)


@replaces(Ours, "__getstate__")
def CopiesAnyGroup(ddp: Ours, getstate: Call) -> Any:
    """BUG: a wrapper of a subgroup can be copied, and its copy averages over all ranks."""
    own, ddp.process_group = ddp.process_group, dist.group.WORLD  # type: ignore[assignment]
    try:
        return getstate()
    finally:
        ddp.process_group = own


@replaces(Ours, "__setstate__")
def CopyForgetsHook(ddp: Ours, setstate: Call, state: dict[str, Any]) -> None:
    """BUG: a copy averages without a hook where the original has a comm hook."""
    setstate({**state, "_comm_hook": None})


@replaces(Ours, "__setstate__")
def CopyMovesHook(ddp: Ours, setstate: Call, state: dict[str, Any]) -> None:
    """BUG: a copy calls a hook for buffers behind forward, whenever the original does."""
    hook = state["_buffer_hook"]
    moved = hook and dataclasses.replace(hook, location=BufferHookLocation.POST_FORWARD)
    setstate({**state, "_buffer_hook": moved})


@replaces(Ours, "__setstate__")
def CopyStaysInNoSync(ddp: Ours, setstate: Call, state: dict[str, Any]) -> None:
    """BUG: a copy that was made inside `no_sync` never synchronises."""
    setstate(state)
    ddp.require_backward_grad_sync = state["require_backward_grad_sync"]


@replaces(Ours, "__getstate__")
def CopiesJoinedInSilence(ddp: Ours, getstate: Call) -> Any:
    """BUG: no warning says that a copy made inside a join context is outside of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getstate()


@replaces(Peers, "key_of")
def CopiesHearEachOther(peers: Peers, key: Call, rank: int) -> str:
    """BUG: all copies report under one key, so that one takes the reports of another's ranks for its own's."""
    return f"ddp_impl/copy/{rank}" if "@" in peers.copied_now.rpartition("@")[0] else str(key(rank))


class IsNoTorchDDP(nn.Module):
    """BUG: averages like a DDP, but is no instance of torch's class, by which libraries find what they unwrap."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module = module
        self._inner = [Ours(module, **options)]  # in a list, it is no submodule

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self._inner[0](*inputs, **kwargs)
