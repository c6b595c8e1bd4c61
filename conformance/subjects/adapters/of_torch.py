"""Adapters of torch's other data parallelism: `replicate`, and its successor on FSDP2."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from conformance.subjects.adapters.adapter import InPlace, group_of, only


def replicate(module: nn.Module, **options: Any) -> nn.Module:
    """Return `module` after `torch.distributed._composable.replicate`, which takes the options of torch's DDP."""
    from torch.distributed._composable.replicate import replicate

    replicated: Any = replicate(module, **options)
    return InPlace(module, replicated.set_requires_gradient_sync)


def replicate_with_fsdp(module: nn.Module, **options: Any) -> nn.Module:
    """Return `module` after `replicate` of `torch.distributed._composable.replicate_with_fsdp`.

    Its parameters and gradients become DTensors that are replicated over the group.
    """
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import DeviceMesh

    only(options, "process_group")
    device_type = next((parameter.device.type for parameter in module.parameters()), "cpu")
    mesh = DeviceMesh.from_group(group_of(options), device_type, mesh_dim_names=("replicate",))
    hooks = {name: list((parameter._backward_hooks or {}).values()) for name, parameter in module.named_parameters()}
    replicated: Any = replicate(module, mesh=mesh)
    module.register_forward_pre_hook(_CarriedOver(hooks))
    return InPlace(module, replicated.set_requires_gradient_sync)


class _CarriedOver:
    """A pre-forward hook that registers the hooks of parameters on the tensors with which FSDP2 computes.

    Fixtures round gradients in hooks on parameters, to make means exact.
    """

    def __init__(self, hooks: Mapping[str, Sequence[Callable[[Tensor], Tensor | None]]]) -> None:
        self._hooks = hooks
        self._done: dict[str, Tensor] = {}

    def __call__(self, module: nn.Module, args: Any) -> None:
        for name, hooks in self._hooks.items():
            parameter = module.get_parameter(name)
            if self._done.get(name) is not parameter and parameter.requires_grad:
                self._done[name] = parameter
                for hook in hooks:
                    parameter.register_hook(hook)
