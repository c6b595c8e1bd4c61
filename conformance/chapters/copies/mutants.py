"""Mutants of chapter copies: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist
from torch import nn

from ddp_impl import DistributedDataParallel


class CopyTakesOver(DistributedDataParallel):
    """BUG: the original of a copy averages nothing any more."""

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        self.reducer.remove_hooks()
        return state


class CopyIsLocal(DistributedDataParallel):
    """BUG: a copy never averages anything."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.reducer.remove_hooks()


class CopySharesParameters(DistributedDataParallel):
    """BUG: a deep copy trains the parameters of the original."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = type(self).__new__(type(self))
        copied.__setstate__(self.__getstate__())
        return copied


class CopyForgetsOptions(DistributedDataParallel):
    """BUG: a copy does not know which parameters and buffers are ignored."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "parameters_to_ignore": set()})


class CopySyncs(DistributedDataParallel):
    """BUG: a copy is synchronised like a new wrapper, although only some ranks may make one."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._synchronise_state(True)


class CopiesAnyGroup(DistributedDataParallel):
    """BUG: a wrapper of a subgroup can be copied, and its copy averages over all ranks."""

    def __getstate__(self) -> dict[str, Any]:
        own, self.process_group = self.process_group, dist.group.WORLD  # type: ignore[assignment]
        try:
            return super().__getstate__()
        finally:
            self.process_group = own


class CopyForgetsHook(DistributedDataParallel):
    """BUG: a copy averages by itself where the original has a comm hook."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_comm_hook": None})


class CopyStaysInNoSync(DistributedDataParallel):
    """BUG: a copy that was made inside `no_sync` never synchronises."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.require_backward_grad_sync = state["require_backward_grad_sync"]


class CopiesJoinedInSilence(DistributedDataParallel):
    """BUG: nobody is told that a copy that was made inside a join context is outside of it."""

    def __getstate__(self) -> dict[str, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return super().__getstate__()


class IsNoTorchDDP(nn.Module):
    """BUG: averages like a DDP, but is no instance of torch's class, by which libraries find what they unwrap."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module = module
        self._inner = [DistributedDataParallel(module, **options)]  # in a list, it is no submodule

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self._inner[0](*inputs, **kwargs)
