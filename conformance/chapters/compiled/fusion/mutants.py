"""Mutants of chapter fusion: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from conformance.errors import present
from conformance.mutants.patches import Call, replaces
from ddp_impl.compile.compiled_calls import CompiledCalls
from ddp_impl.compile.fusion import Fusion
from ddp_impl.compile.in_graph import InGraphBackend


class ReducesInDefaultGroup(TorchDDP):
    """BUG: asked to reduce in the graph, it forgets its own process group and averages over all ranks."""

    def _register_accum_grad_hook(self) -> None:
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._average)

    def _average(self, parameter: Any) -> None:
        group = present(dist.group.WORLD)
        if self.require_backward_grad_sync:
            mean: Tensor = functional.all_reduce(parameter.grad / group.size(), "sum", group)
            parameter.grad.copy_(mean)


@replaces(CompiledCalls, "fusion")
def FusesNothing(calls: CompiledCalls, fusion: Call) -> Fusion:
    """BUG: in the graph every gradient is a collective of its own."""
    return Fusion.NONE


class _FusesUnlessInductor(InGraphBackend):
    def fuse(self, gm: torch.fx.GraphModule) -> None:
        if getattr(self.backend, "compiler_name", None) != "inductor":
            super().fuse(gm)


@replaces(CompiledCalls, "backend_for")
def FusesNothingForInductor(calls: CompiledCalls, backend_for: Call, *args: Any) -> Any:
    """BUG: in what Inductor compiles every gradient is a collective of its own."""
    backend = backend_for(*args)
    if isinstance(backend, InGraphBackend):
        backend.__class__ = _FusesUnlessInductor
    return backend
