"""Mutants of chapter construction: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import fnmatch
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Self
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils._pytree import tree_map

from ddp_impl import DistributedDataParallel, distributed, replicas
from ddp_impl.bucket import ManagedParameter
from ddp_impl.replicas import Replica, ReplicatedParameter


class DividesByAllRanks(DistributedDataParallel):
    """BUG: sums over a subgroup are divided by the number of all ranks."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        super()._attach_reducer(members)
        self.reducer.divisor = dist.get_world_size()


class SkipsInitialSync(TorchDDP):
    """BUG: every rank starts from its own parameters and buffers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "init_sync": False})


class CopiesArguments(TorchDDP):
    """BUG: lists and dicts among the arguments of forward arrive as copies."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on copies."""
        return super().forward(*tree_map(lambda leaf: leaf, inputs), **kwargs)


class FlattensNamedTuples(TorchDDP):
    """BUG: a named tuple comes out of forward as a plain tuple."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module and lose the names."""
        output = super().forward(*inputs, **kwargs)
        return tuple(output) if isinstance(output, tuple) else output


class SkipsModuleHooks(TorchDDP):
    """BUG: the module's forward is called directly, so that its hooks never fire."""

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return torch.nn.Sequential.forward(self.module, *inputs, **kwargs)


class NamesWithoutPrefix(TorchDDP):
    """BUG: the state dict has the module's names, without `module.`."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state dict."""
        return self.module.state_dict(*args, **kwargs)


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


class AcceptsExpanded(DistributedDataParallel):
    """BUG: the copy of rank 0's values fails on the other ranks alone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with mock.patch.object(distributed, "refuse_expanded"):
            super().__init__(*args, **kwargs)


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


class SwapsArguments(DistributedDataParallel):
    """BUG: `output_device` comes before `device_ids`."""

    def __init__(self, module: nn.Module, output_device: Any = None, device_ids: Any = None, *args: Any, **kwargs: Any):
        super().__init__(module, device_ids, output_device, *args, **kwargs)


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


class DetachesKeywords(DistributedDataParallel):
    """BUG: tensors that come by keyword are detached, so that no gradient reaches the caller's."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on detached tensors."""
        return super().forward(*inputs, **tree_map(_detached, kwargs))


class HalvesInputGradients(DistributedDataParallel):
    """BUG: the gradients of inputs are divided by the number of ranks, like those of parameters."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on views whose gradients are divided."""
        return super().forward(*tree_map(self._divided, inputs), **kwargs)

    def _divided(self, leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and leaf.requires_grad):
            return leaf
        view = leaf.view_as(leaf)
        view.register_hook(lambda gradient: gradient / self.process_group.size())
        return view


class DetachesInDataclasses(DistributedDataParallel):
    """BUG: a tensor in a dataclass is detached."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on copies of the dataclasses."""
        return super().forward(*map(_detached_within, inputs), **kwargs)


class NeedsAPositional(DistributedDataParallel):
    """BUG: a call without a positional argument, such as `model(input_ids=...)`, is refused."""

    def forward(self, first: Any, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return super().forward(first, *inputs, **kwargs)


class LeavesOutNone(DistributedDataParallel):
    """BUG: a keyword argument that is None is not passed on."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on what is there."""
        return super().forward(*inputs, **{name: value for name, value in kwargs.items() if value is not None})


class LosesMetadata(DistributedDataParallel):
    """BUG: what state_dict returns has no `_metadata`, so that no part learns the version of the state it loads."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state alone."""
        state = super().state_dict(*args, **kwargs)
        if hasattr(state, "_metadata"):
            del state._metadata
        return state


class ClonesState(DistributedDataParallel):
    """BUG: state_dict returns copies of the tensors."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return a state of its own."""
        state = super().state_dict(*args, **kwargs)
        state.update({name: value.clone() for name, value in state.items() if isinstance(value, Tensor)})
        return state


class IgnoresKeepVars(DistributedDataParallel):
    """BUG: state_dict detaches, whatever keep_vars says."""

    def state_dict(self, *args: Any, keep_vars: bool = False, **kwargs: Any) -> Any:
        """Return the state without autograd."""
        return super().state_dict(*args, **kwargs)


class IgnoresPrefix(DistributedDataParallel):
    """BUG: state_dict puts no prefix before its names but its own."""

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        """Return the state under the names that it has without a prefix."""
        return super().state_dict(*args, **kwargs)


class AsksTwice(DistributedDataParallel):
    """BUG: state_dict walks the module twice, so that its hooks are called twice."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state after a look at it."""
        self.module.state_dict()
        return super().state_dict(*args, **kwargs)


class NeverStrict(DistributedDataParallel):
    """BUG: load_state_dict accepts whatever names there are."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load what fits."""
        return super().load_state_dict(state_dict, strict=False, assign=assign)


class NeverAssigns(DistributedDataParallel):
    """BUG: load_state_dict copies, whatever assign says."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Fill the tensors that are there."""
        return super().load_state_dict(state_dict, strict)


class LoadsPlainStates(DistributedDataParallel):
    """BUG: load_state_dict hands a plain dict on, without the versions that the state has."""

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Load the tensors."""
        return super().load_state_dict(dict(state_dict), *args, **kwargs)


class NamesTiedOnce(DistributedDataParallel):
    """BUG: named_parameters leaves the second name of a shared parameter out, whatever remove_duplicate says."""

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        """Yield each parameter once."""
        return super().named_parameters(prefix, recurse)


class AlwaysRecurses(DistributedDataParallel):
    """BUG: named_parameters yields the parameters of all parts, also with recurse=False."""

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        """Yield all parameters."""
        return super().named_parameters(prefix, True, remove_duplicate)


class NamesCollide(DistributedDataParallel):
    """BUG: no keyword argument of forward may have a name of the DDP's own, `inputs`."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self._run(inputs=inputs, **kwargs)

    def _run(self, inputs: Any, **kwargs: Any) -> Any:
        return super().forward(*inputs, **kwargs)


class _IgnoringAlike(DistributedDataParallel):
    """Ignores parameters whose names are alike."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        ignored: Any = module.__dict__.get("_ddp_params_and_buffers_to_ignore")
        if ignored:
            alike = {name for name, _ in module.named_parameters() if any(self.is_like(name, each) for each in ignored)}
            module._ddp_params_and_buffers_to_ignore = sorted(alike.union(ignored))  # type: ignore[assignment]
        super().__init__(module, *args, **kwargs)
        if ignored:
            module._ddp_params_and_buffers_to_ignore = ignored

    def is_like(self, name: str, ignored: str) -> bool:
        """Whether `name` is ignored."""
        raise NotImplementedError


class IgnoresByPrefix(_IgnoringAlike):
    """BUG: a parameter is ignored if its name begins with a name to be ignored."""

    def is_like(self, name: str, ignored: str) -> bool:
        """Whether `name` is ignored."""
        return name.startswith(ignored)


class IgnoresBySuffix(_IgnoringAlike):
    """BUG: a parameter is ignored if its name ends with a name to be ignored, after a dot."""

    def is_like(self, name: str, ignored: str) -> bool:
        """Whether `name` is ignored."""
        return name.endswith(f".{ignored}")


class IgnoresByPattern(_IgnoringAlike):
    """BUG: names to be ignored are taken for patterns."""

    def is_like(self, name: str, ignored: str) -> bool:
        """Whether `name` is ignored."""
        return fnmatch.fnmatchcase(name, ignored)


class DedupsByPointer(DistributedDataParallel):
    """BUG: shared parameters are recognised by their memory, so that of two in one place only one is averaged."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        first: dict[Any, ManagedParameter] = {}
        for member in members:
            key = member.parameter.data_ptr() if member.parameter.numel() else member.name
            first.setdefault(key, dataclasses.replace(member, index=len(first)))
        super()._attach_reducer(list(first.values()))
        self._watch._averaged |= {member.parameter for member in members}


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _detached_within(value: Any) -> Any:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    copied = copy.copy(value)
    for field in dataclasses.fields(value):
        object.__setattr__(copied, field.name, _detached(getattr(value, field.name)))
    return copied


class WrapsErrors(DistributedDataParallel):
    """BUG: an error of the module's forward comes as a RuntimeError that quotes it."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        try:
            return super().forward(*inputs, **kwargs)
        except Exception as error:
            raise RuntimeError(f"forward failed: {error}") from error


class RaisesErrorsAnew(DistributedDataParallel):
    """BUG: a RuntimeError of the module's forward comes as another one, with the same arguments."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        try:
            return super().forward(*inputs, **kwargs)
        except RuntimeError as error:
            raise type(error)(*error.args) from None


class RunsForwardInAGenerator(DistributedDataParallel):
    """BUG: forward runs in a generator, in which a StopIteration of the module becomes a RuntimeError."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""

        def outputs() -> Iterator[Any]:
            yield super(RunsForwardInAGenerator, self).forward(*inputs, **kwargs)

        return next(outputs())


class WrapsErrorsUnderNoSync(DistributedDataParallel):
    """BUG: an error of the user's that leaves no_sync, be it of a backward, comes as a RuntimeError that quotes it."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate locally."""
        with super().no_sync():
            try:
                yield
            except Exception as error:
                raise RuntimeError(f"an error while gradients are accumulated: {error}") from error


class ChangesErrors(DistributedDataParallel):
    """BUG: an error of the module's forward gets another first argument, which names the rank."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        try:
            return super().forward(*inputs, **kwargs)
        except Exception as error:
            error.args = (f"[rank {dist.get_rank(self.process_group)}] {error}", *error.args[1:])
            raise


class TakesMarkedForAveraged(DistributedDataParallel):
    """BUG: parameters are marked as averaged, and whoever wraps them after that wrapper is gone averages nothing."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        parameters = list(module.parameters()) if isinstance(module, nn.Module) else []
        marked = bool(parameters) and all(hasattr(parameter, "_is_averaged") for parameter in parameters)
        super().__init__(module, *args, **kwargs)
        self._does_nothing = marked
        for parameter in parameters:
            parameter._is_averaged = True  # type: ignore[attr-defined]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        with self.no_sync() if self._does_nothing else contextlib.nullcontext():
            return super().forward(*inputs, **kwargs)


class AveragesInTheMainThread(DistributedDataParallel):
    """BUG: a step that another thread than the main one runs averages nothing."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        is_main = threading.current_thread() is threading.main_thread()
        with contextlib.nullcontext() if is_main else self.no_sync():
            return super().forward(*inputs, **kwargs)


class TrainsOnlyWhatWasTraining(DistributedDataParallel):
    """BUG: a module that is in evaluation mode when it is wrapped is never averaged."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        self._was_training = module.training

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        with contextlib.nullcontext() if self._was_training else self.no_sync():
            return super().forward(*inputs, **kwargs)
