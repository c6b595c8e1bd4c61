"""Adapter of DeepSpeed's engine at ZeRO stage 0, which keeps all state on every rank."""

import os
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from conformance.programs.rank_context import Unsupported
from conformance.subjects.adapters.adapter import group_of, only

_CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}


def stage_0(module: nn.Module, **options: Any) -> nn.Module:
    """Return the engine around `module`; the optimiser stays outside. Every rank must call it."""
    only(options, "process_group")
    if group_of(options) is not dist.group.WORLD:
        raise Unsupported("it takes no process group")
    with patch.dict(os.environ, LOCAL_RANK="0"):  # which its launcher would have set
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled to bypass the process group
        engine: nn.Module = deepspeed.initialize(model=module, config=_CONFIG, dist_init_required=False)[0]
    _Backwards(engine)
    return engine


class _Backwards:
    """Makes `loss.backward()` end as `engine.backward(loss)` does."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._queued = False
        engine._running_engine_backward = True  # or it refuses other backwards
        for parameter in engine.module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._accumulated)

    def _accumulated(self, parameter: Tensor) -> None:
        if not self._queued:
            self._queued = True
            engine: Any = Variable._execution_engine
            engine.queue_callback(self._end)

    def _end(self) -> None:
        self._queued = False
        self._engine._backward_epilogue()
