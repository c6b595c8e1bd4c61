"""`DistributedDataParallel`: the module that wraps a module, with torch 2.13's arguments, attributes and methods."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_impl.bucket import ManagedParameter
from ddp_impl.buffers import broadcast_state, synchronised_buffers, verify_replicas
from ddp_impl.options import BucketCaps, ReducerOptions
from ddp_impl.reducer import Reducer
from ddp_impl.unused_parameters import find_tensors


class DistributedDataParallel(nn.Module):
    """Averages a module's gradients over a process group during backward.

    Construction, forward in training and backward are collective: every rank of the group must go through them in the
    same order. Arguments have the names, order and meaning of `torch.nn.parallel.DistributedDataParallel` (torch 2.13).

    Args:
        module: what to train; all its parameters on one kind of device.
        device_ids: for a module on one accelerator, its index in a list of one; inputs are then moved there.
        output_device: where a single-accelerator module's outputs lie; only checked, as in torch.
        dim: the dimension that torch's `scatter` would split; kept for compatibility.
        broadcast_buffers: deprecated form of `forward_sync_buffers`; False also keeps buffers out of `init_sync`.
        init_sync: compare the modules of all ranks and copy rank 0's parameters and buffers to all.
        process_group: whose ranks to average over; the default group if None.
        bucket_cap_mb: MiB of gradients per all-reduce; 25, with a first bucket of 1, if None.
        find_unused_parameters: allow parameters without a gradient, which may differ between ranks and steps.
        check_reduction: deprecated, has no effect.
        gradient_as_bucket_view: let gradients live in the communication buckets.
        static_graph: promise that every iteration uses the same parameters in the same way.
        delay_all_reduce_named_params: not supported yet.
        param_to_hook_all_reduce: not supported yet.
        mixed_precision: not supported yet.
        device_mesh: a 1-D mesh, instead of `process_group`.
        skip_all_reduce_unused_params: with `find_unused_parameters`, do not communicate buckets that no rank used.
        bucket_cap_mb_list: MiB per bucket in launch order, the last for all further ones.
        batched_grad_copy: accepted; copies between gradients and buckets are always batched here.
        forward_sync_buffers: copy rank 0's buffers to all ranks before each forward that follows a synchronised one.

    Raises:
        RuntimeError: no parameter requires a gradient; a parameter is uninitialised; ranks wrap different modules
            (on every rank, naming the parameter); no default process group.
        ValueError: arguments that contradict each other or the module's devices.
        TypeError: `module` is not an `nn.Module`.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        super().__init__()
        _check_arguments(module, device_ids, delay_all_reduce_named_params, param_to_hook_all_reduce, mixed_precision)
        caps = BucketCaps.from_mb(bucket_cap_mb, bucket_cap_mb_list)
        if check_reduction:
            warnings.warn("check_reduction has no effect and will go away; leave it out", FutureWarning, stacklevel=2)
        self.process_group = _resolve_group(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        members = _managed_parameters(module, self.parameters_to_ignore)
        self.device_type = _device_type(module, self.parameters_to_ignore)
        self.device = members[0].parameter.device
        self.is_multi_device_module = len({member.parameter.device for member in members}) > 1
        self.device_ids, self.output_device = self._resolve_devices(members, device_ids, output_device)

        self.module = module
        self.dim = dim
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.static_graph = static_graph
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.mixed_precision = mixed_precision
        self.bucket_bytes_cap = caps.cap_bytes
        self.bucket_bytes_cap_list = list(caps.per_bucket_bytes)
        self.bucket_bytes_cap_default = bucket_cap_mb is None and not bucket_cap_mb_list
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.forward_sync_buffers, init_sync_buffers = _buffer_policy(broadcast_buffers, forward_sync_buffers)

        if init_sync:
            self._verify_replicas(members, caps)
            self._synchronise_state(init_sync_buffers)
        options = ReducerOptions(
            caps=caps,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
        )
        self.reducer = Reducer(members, self.process_group, self.device, options)
        # The hooks on the parameters must not outlive the wrapper: whoever keeps the bare module trains locally again.
        weakref.finalize(self, self.reducer.remove_hooks)

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the wrapped module; its outputs are returned as they are. Collective while gradients are synchronised."""
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(inputs, kwargs)
            output = self.module(*inputs, **kwargs)
            self._post_forward(output)
            return output

    def _pre_forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.reducer.prepare_for_forward()
        if self.will_sync_module_buffers():
            self._sync_buffers()
        if self.device_ids:
            return _move(inputs, self.device), _move(kwargs, self.device)
        return inputs, kwargs

    def _post_forward(self, output: Any) -> None:
        synchronise = torch.is_grad_enabled() and self.require_backward_grad_sync
        self.require_forward_param_sync = synchronise
        if synchronise:
            self.reducer.prepare_for_backward(find_tensors(output))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: forwards run inside are not synchronised, whenever their backward runs.

        The next forward and backward outside average everything that was accumulated. Re-entrant; restored when the
        block raises. Every rank must use it for the same forwards.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward will copy rank 0's buffers to all ranks."""
        return (
            self.require_forward_param_sync
            and self.forward_sync_buffers
            and bool(synchronised_buffers(self.module, self.parameters_to_ignore))
        )

    def train(self, mode: bool = True) -> DistributedDataParallel:
        """Set the training mode of the wrapper and of the wrapped module."""
        super().train(mode)
        return self

    # -- torch's smaller surface --------------------------------------------------------------------------------------

    @property
    def broadcast_buffers(self) -> bool:
        """Deprecated name of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def modules_buffers(self) -> list[Tensor]:
        """The buffers that are copied before forward."""
        return list(synchronised_buffers(self.module, self.parameters_to_ignore).values())

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The buffers that are copied before forward, by name."""
        return synchronised_buffers(self.module, self.parameters_to_ignore)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, names: Collection[str]) -> None:
        """Leave the named parameters and buffers of `module` alone when it is wrapped; the same set on every rank."""
        module._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]

    def _check_reducer_finalized(self) -> None:
        """Raise when a backward has begun whose gradients are not all averaged; may be called on any rank."""
        self.reducer.check_finished()

    def _remove_autograd_hooks(self) -> None:
        """Stop averaging: backward leaves local gradients from now on. Every rank must call it."""
        self.reducer.remove_hooks()

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Average over `new_process_group` from now on, forgetting an unfinished backward; all its ranks must call it."""
        self.process_group = new_process_group
        self.reducer.reset(new_process_group)

    # -- construction -------------------------------------------------------------------------------------------------

    def _resolve_devices(
        self, members: Sequence[ManagedParameter], device_ids: Any, output_device: Any
    ) -> tuple[list[int] | None, int | None]:
        if not device_ids or self.device_type == "cpu" or self.is_multi_device_module:
            if device_ids or output_device:
                devices = sorted({str(member.parameter.device) for member in members})
                raise ValueError(
                    "device_ids and output_device are for modules on a single accelerator; got "
                    f"device_ids={device_ids}, output_device={output_device} and parameters on {', '.join(devices)}"
                )
            return None, None
        index = _device_index(device_ids[0])
        return [index], index if output_device is None else _device_index(output_device)

    def _verify_replicas(self, members: Sequence[ManagedParameter], caps: BucketCaps) -> None:
        description = {
            "parameters": [
                [
                    member.name,
                    list(member.parameter.shape),
                    list(member.parameter.stride()),
                    str(member.parameter.dtype),
                    member.sparse,
                ]
                for member in members
            ],
            "ignored": sorted(self.parameters_to_ignore),
            "options": {
                "bucket caps": [caps.first_bytes, caps.cap_bytes, *caps.per_bucket_bytes],
                "find_unused_parameters": self.find_unused_parameters,
                "static_graph": self.static_graph,
                "skip_all_reduce_unused_params": self.skip_all_reduce_unused_params,
                "forward_sync_buffers": self.forward_sync_buffers,
            },
        }
        verify_replicas(description, self.process_group, self.device)

    def _synchronise_state(self, with_buffers: bool) -> None:
        tensors: list[Tensor] = [
            parameter.detach()
            for name, parameter in self.module.named_parameters()
            if name not in self.parameters_to_ignore
        ]
        if with_buffers:
            tensors += [buffer.detach() for buffer in self.modules_buffers]
        broadcast_state(tensors, self.process_group, self.device)

    def _sync_buffers(self) -> None:
        broadcast_state(self.modules_buffers, self.process_group, self.device)


def _check_arguments(module: Any, device_ids: Any, delayed: Any, delay_hook: Any, mixed_precision: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"DistributedDataParallel wraps an nn.Module; got {type(module).__name__}")
    if (delayed is None) != (delay_hook is None):
        raise ValueError("delay_all_reduce_named_params and param_to_hook_all_reduce must be given together")
    if delayed is not None:
        raise NotImplementedError("delay_all_reduce_named_params is not supported yet")
    if mixed_precision is not None:
        raise NotImplementedError("mixed_precision is not supported yet")
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(f"device_ids holds at most one device: one process drives one device; got {device_ids}")


def _resolve_group(process_group: dist.ProcessGroup | None, device_mesh: Any) -> dist.ProcessGroup:
    if process_group is not None and device_mesh is not None:
        raise RuntimeError("give either process_group or device_mesh; got both")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise RuntimeError(f"device_mesh must have one dimension, that of data parallelism; got {device_mesh}")
        return device_mesh.get_group(mesh_dim=0)  # type: ignore[no-any-return]
    if process_group is not None:
        return process_group
    if not dist.is_initialized():
        raise RuntimeError(
            "Default process group has not been initialized: call torch.distributed.init_process_group before "
            "wrapping a module, or pass process_group"
        )
    group = dist.group.WORLD
    assert group is not None
    return group


def _managed_parameters(module: nn.Module, ignored: Collection[str]) -> list[ManagedParameter]:
    members: list[ManagedParameter] = []
    seen: set[nn.Parameter] = set()
    for module_name, owner in module.named_modules():
        sparse = isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and owner.sparse
        for own_name, parameter in owner.named_parameters(recurse=False):
            name = f"{module_name}.{own_name}" if module_name else own_name
            if name in ignored or parameter in seen:
                continue
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise RuntimeError(
                    f"parameter '{name}' is uninitialised; run one forward of the bare module (a dummy input will do) "
                    "before wrapping it"
                )
            if parameter.requires_grad:
                seen.add(parameter)
                members.append(ManagedParameter(len(members), name, parameter, sparse))
    if not members:
        raise RuntimeError(
            "DistributedDataParallel is not needed for a module in which no parameter requires a gradient; "
            "use the module itself"
        )
    return members


def _device_type(module: nn.Module, ignored: Collection[str]) -> str:
    types = {p.device.type for name, p in module.named_parameters() if name not in ignored}
    if len(types) != 1:
        raise ValueError(f"all parameters must be on one type of device; got {', '.join(sorted(types))}")
    return types.pop()


def _device_index(device: int | str | torch.device) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def _buffer_policy(broadcast: bool | None, forward_sync: bool | None) -> tuple[bool, bool]:
    """Return (copy before forward, copy at construction)."""
    if broadcast is not None:
        detail = (
            "broadcast_buffers is ignored, because forward_sync_buffers is given too"
            if forward_sync is not None
            else "broadcast_buffers is deprecated; use forward_sync_buffers (which, unlike broadcast_buffers=False, "
            "still copies buffers at construction)"
        )
        warnings.warn(detail, FutureWarning, stacklevel=3)
    if forward_sync is not None:
        return forward_sync, True
    effective = True if broadcast is None else broadcast
    return effective, effective


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_move(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_move(item, device) for item in value)
    if isinstance(value, dict):
        return type(value)((key, _move(item, device)) for key, item in value.items())
    return value
