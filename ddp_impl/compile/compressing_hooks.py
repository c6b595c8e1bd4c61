"""Which comm hooks a graph can do by itself: those that cast gradients, sum them and cast them back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ddp_impl.torch_internals.distributed import BuiltinCommHookType

_WIRE_DTYPES = {
    default_hooks.allreduce_hook: None,
    default_hooks.fp16_compress_hook: torch.float16,
    default_hooks.bf16_compress_hook: torch.bfloat16,
}
_BUILTIN_WIRE_DTYPES = {
    BuiltinCommHookType.ALLREDUCE: None,
    BuiltinCommHookType.FP16_COMPRESS: torch.float16,
}


@dataclass(frozen=True, slots=True)
class WireFormat:
    """What gradients are cast to while they travel; None for their own dtype."""

    dtype: torch.dtype | None = None


def wire_format(registered: tuple[Any, Any] | None, group: dist.ProcessGroup) -> WireFormat | None:
    """Return what a graph has to do in place of a comm hook, None if it cannot do what the hook does.

    `registered` is (state, hook) as `register_comm_hook` was given them, (type, None) for a built-in hook, None if no
    hook is registered. A hook that reduces over another group than `group` is none of ours.
    """
    if registered is None:
        return WireFormat()
    state, hook = registered
    if hook is None:
        return WireFormat(_BUILTIN_WIRE_DTYPES[state]) if state in _BUILTIN_WIRE_DTYPES else None
    if hook in _WIRE_DTYPES and (state is None or state is group):
        return WireFormat(_WIRE_DTYPES[hook])
    return None
