"""DDPs that are wrong about construction, forward, buffers and copies, each in one way: `ddp_impl`, changed."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any, Self
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_impl import DistributedDataParallel, collectives, distributed, replicas
from ddp_impl.bucket import ManagedParameter
from ddp_impl.buffers import broadcast_state
from ddp_impl.replicas import Replica, ReplicatedParameter


class AlwaysSyncs(DistributedDataParallel):
    """BUG: `init_sync=False` is ignored."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "init_sync": True})


class ComparesNothing(DistributedDataParallel):
    """BUG: modules of the ranks are never compared, so that their bytes get mixed up."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with mock.patch.object(distributed, "verify_replicas"):
            super().__init__(*args, **kwargs)


class ComparesNumbersOnly(DistributedDataParallel):
    """BUG: of the ranks' parameters only their number is compared."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        describe = replicas.describe

        def count(*args: Any, **options: Any) -> Replica:
            described = describe(*args, **options)
            counted = tuple(ReplicatedParameter(each.name, "", "", "", False, "") for each in described.parameters)
            return dataclasses.replace(described, parameters=counted)

        with mock.patch.object(distributed, "describe", count):
            super().__init__(*args, **kwargs)


class ComparesNoOptions(DistributedDataParallel):
    """BUG: ranks with different options are not told so."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        describe = replicas.describe

        def without(*args: Any, **options: Any) -> Replica:
            return dataclasses.replace(describe(*args, **options), options={})

        with mock.patch.object(distributed, "describe", without):
            super().__init__(*args, **kwargs)


class ChecksNoArguments(DistributedDataParallel):
    """BUG: arguments that contradict each other are accepted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with mock.patch.object(distributed, "check_arguments"):
            super().__init__(*args, **kwargs)


class ComparesNoIgnoredNames(DistributedDataParallel):
    """BUG: ranks may ignore different parameters."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        describe = replicas.describe

        def without(*args: Any, **options: Any) -> Replica:
            return dataclasses.replace(describe(*args, **options), ignored=(), parameters=())

        with mock.patch.object(distributed, "describe", without):
            super().__init__(*args, **kwargs)


class TakesGroupAndMesh(DistributedDataParallel):
    """BUG: of a process group and a device mesh that are both given, the mesh is ignored."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("process_group") is not None:
            kwargs.pop("device_mesh", None)
        super().__init__(*args, **kwargs)


class TakesNegativeCaps(DistributedDataParallel):
    """BUG: a negative bucket cap is taken for its absolute value."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if isinstance(kwargs.get("bucket_cap_mb"), (int, float)):
            kwargs["bucket_cap_mb"] = abs(kwargs["bucket_cap_mb"])
        super().__init__(*args, **kwargs)


class SaysNothingOfLazyParameters(DistributedDataParallel):
    """BUG: that a parameter is uninitialised is told in the words of whatever stumbles over it first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().__init__(*args, **kwargs)
        except RuntimeError as error:
            if "uninitialized" in str(error):
                raise ValueError("cannot read the shape of a parameter") from None
            raise


class MixesDevices(DistributedDataParallel):
    """BUG: parameters on different types of devices are accepted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with (
            mock.patch.object(distributed, "device_type", return_value="cpu"),
            mock.patch.object(distributed, "verify_replicas"),
            mock.patch.object(distributed, "broadcast_state"),
        ):
            super().__init__(*args, **kwargs)


class LeavesScalarsLocal(DistributedDataParallel):
    """BUG: parameters without dimensions are not averaged."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        shaped = [member for member in members if member.parameter.dim()]
        renumbered = [dataclasses.replace(member, index=index) for index, member in enumerate(shaped)]
        super()._attach_reducer(renumbered)


class ForgetsItsOptions(DistributedDataParallel):
    """BUG: the attributes of options say what they are by default."""

    find_unused_parameters = False
    gradient_as_bucket_view = False


class TakesAnyDevice(DistributedDataParallel):
    """BUG: `device_ids` and `output_device` are accepted for a module on the CPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "device_ids": None, "output_device": None})


class TakesAnyName(DistributedDataParallel):
    """BUG: arguments of unknown names are swallowed."""

    def __init__(self, module: nn.Module, *args: Any, bucket_cap_mb: Any = None, **kwargs: Any) -> None:
        known = DistributedDataParallel.__init__.__code__.co_varnames
        super().__init__(module, *args, **{name: value for name, value in kwargs.items() if name in known})


class CopiesModule(DistributedDataParallel):
    """BUG: what is wrapped is a copy of the module that was passed in."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(copy.deepcopy(module), *args, **kwargs)


class EvaluatesItselfOnly(DistributedDataParallel):
    """BUG: `train` and `eval` change the wrapper's mode and not the module's."""

    def train(self, mode: bool = True) -> Self:
        """Set the wrapper's mode."""
        self.training = mode
        return self


class IgnoresNothing(DistributedDataParallel):
    """BUG: what the module names to be ignored is synchronised and reduced."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        names = module.__dict__.pop("_ddp_params_and_buffers_to_ignore", None)
        super().__init__(module, *args, **kwargs)
        if names is not None:
            module._ddp_params_and_buffers_to_ignore = names


class UsesDefaultGroup(DistributedDataParallel):
    """BUG: buffers and parameters are copied over all ranks, whatever the process group."""

    def _synchronise_state(self, with_buffers: bool, group_src: int = 0) -> None:
        own, self.process_group = self.process_group, dist.group.WORLD  # type: ignore[assignment]
        super()._synchronise_state(with_buffers, group_src)
        self.process_group = own


class LeavesDelayedParametersAlone(DistributedDataParallel):
    """BUG: delayed parameters are not copied from rank 0 at construction."""

    @property
    def _module_parameters(self) -> list[nn.Parameter]:
        return [parameter for name, parameter in self.module.named_parameters() if name not in self._options.delayed]


class ViewsOfOutputs(DistributedDataParallel):
    """BUG: outputs come through a function of autograd that gives views, which nobody may change in place."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module and give views of a lone output."""
        output = super().forward(*inputs, **kwargs)
        return _Views.apply(output)[0] if isinstance(output, Tensor) and output.requires_grad else output


class _Views(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return output.view_as(output), output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class WatchesNoParameters(DistributedDataParallel):
    """BUG: nobody notices that a parameter was replaced after wrapping."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        super()._attach_reducer(members)
        self._watch = mock.Mock()


class NeverUnfinished(DistributedDataParallel):
    """BUG: `_check_reducer_finalized` is always content."""

    def _check_reducer_finalized(self) -> None:
        pass


class NoSyncDropsGradients(DistributedDataParallel):
    """BUG: the first synchronised forward throws away what was accumulated under `no_sync`."""

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.require_backward_grad_sync and not self.require_forward_param_sync:
            self.module.zero_grad()
        return super()._pre_forward(*inputs, **kwargs)


class BuffersOfLastRank(DistributedDataParallel):
    """BUG: buffers come from the last rank."""

    def _sync_buffers(self, authoritative: bool = True) -> None:
        broadcast_state(self.modules_buffers, self.process_group, self.device, self.process_group.size() - 1)


class MeanOfBuffers(DistributedDataParallel):
    """BUG: floating-point buffers are averaged before forward, so that those of rank 0 change too."""

    def _sync_buffers(self, authoritative: bool = True) -> None:
        super()._sync_buffers(authoritative)
        for buffer in self.modules_buffers:
            if buffer.is_floating_point():
                buffer.data.add_(self.process_group.rank())
                collectives.all_reduce_now(buffer.data, self.process_group)
                buffer.data.div_(self.process_group.size())


class PersistentBuffersOnly(DistributedDataParallel):
    """BUG: buffers that the state dict leaves out are not synchronised."""

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The buffers of the state dict."""
        kept = self.module.state_dict()
        return {name: buffer for name, buffer in super().named_module_buffers.items() if name in kept}


class SyncsBuffersThoughTold(DistributedDataParallel):
    """BUG: `forward_sync_buffers=False` and `broadcast_buffers=False` are ignored."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.forward_sync_buffers = True


class InitSyncsAllBuffers(DistributedDataParallel):
    """BUG: `broadcast_buffers=False` does not keep buffers out of the synchronisation at construction."""

    def _synchronise_state(self, with_buffers: bool, group_src: int = 0) -> None:
        super()._synchronise_state(True, group_src)


class DeprecatesInSilence(DistributedDataParallel):
    """BUG: deprecated arguments do not warn."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            super().__init__(*args, **kwargs)


class SyncsIgnoredBuffers(DistributedDataParallel):
    """BUG: ignored buffers are synchronised."""

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """All buffers."""
        return dict(self.module.named_buffers())


class SyncsNoBuffers(DistributedDataParallel):
    """BUG: a collective precedes every synchronised forward, also where there is no buffer."""

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            collectives.broadcast_from(torch.zeros(1), self.process_group, 0)
        return super()._pre_forward(*inputs, **kwargs)


class SyncsBuffersInTrainingOnly(DistributedDataParallel):
    """BUG: in eval mode buffers are each rank's own."""

    def _sync_buffers(self, authoritative: bool = True) -> None:
        if self.training:
            super()._sync_buffers(authoritative)


class StopsSyncingBuffers(DistributedDataParallel):
    """BUG: after `_update_process_group` buffers are not synchronised any more."""

    def _update_process_group(self, new_process_group: Any) -> None:
        super()._update_process_group(new_process_group)
        self.forward_sync_buffers = False


class ArgumentsWithoutTuples(DistributedDataParallel):
    """BUG: `to_kwargs` gives inputs and keywords as they are, not each in a tuple of one."""

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        """Return both."""
        return inputs, kwargs


class PreparesOnce(DistributedDataParallel):
    """BUG: preparing for backward a second time switches averaging off."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        super()._attach_reducer(members)
        prepare = self.reducer.prepare_for_backward

        def prepare_once(outputs: Any) -> None:
            if self.reducer.state.phase.value == "armed":
                self.reducer.remove_hooks()
            prepare(outputs)

        self.reducer.prepare_for_backward = prepare_once  # type: ignore[method-assign]


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
