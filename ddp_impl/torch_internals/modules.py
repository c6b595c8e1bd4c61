"""The tables in which modules keep what belongs to them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

#: The base class of torch's batch normalisations.
BatchNorm = _BatchNorm


def parameter_table(module: nn.Module) -> dict[str, Any]:
    """Return the table in which a module keeps its own parameters; it may hold None, and for a while plain tensors.

    `named_parameters` gives a copy, leaves None out, and `setattr` accepts no plain tensor in a parameter's place.
    """
    return module._parameters


def saves_state() -> bool:
    """Whether the function that calls the present one is that in which a module reads itself for `state_dict()`."""
    return sys._getframe(2).f_code is nn.Module._save_to_state_dict.__code__


def set_parameter_table(module: nn.Module, table: dict[str, Any]) -> None:
    """Have a module keep its own parameters in `table`."""
    module.__dict__["_parameters"] = table


def drop_forward_hooks(module: nn.Module, drops: Callable[[Any], bool]) -> None:
    """Take away the forward hooks that `drops` names, before and after forward, from `module` and all modules in it."""
    for part in module.modules():
        for hooks, others in (
            (part._forward_pre_hooks, (part._forward_pre_hooks_with_kwargs,)),
            (part._forward_hooks, (part._forward_hooks_with_kwargs, part._forward_hooks_always_called)),
        ):
            for key in [key for key, hook in hooks.items() if drops(hook)]:
                del hooks[key]
                for other in others:
                    other.pop(key, None)


def child_table(module: nn.Module) -> dict[str, Any]:
    """Return the table in which a module keeps its children; `named_children` builds new tuples at every call."""
    return module._modules


def buffer_table(module: nn.Module) -> dict[str, Any]:
    """Return the table in which a module keeps its own buffers."""
    return module._buffers


def refresh_recurrent(module: nn.RNNBase) -> None:
    """Let a recurrent layer compute with what is in its table of parameters: it keeps a second list of them."""
    module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def ignored_names(module: nn.Module) -> Collection[str]:
    """Return the parameters and buffers that DDP must leave alone: the module's attribute that torch's DDP reads."""
    names: Collection[str] = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return names


def set_ignored_names(module: nn.Module, names: Collection[str]) -> None:
    """Have DDP leave these parameters and buffers of `module` alone."""
    module._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]
