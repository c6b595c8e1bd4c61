"""Mutants of chapter construction: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

import contextlib
import copy
import dataclasses
import fnmatch
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils._pytree import tree_map

from conformance.mutants.patches import Call, replaces
from ddp_impl import DistributedDataParallel as Ours
from ddp_impl.api import copied_state, distributed
from ddp_impl.buckets.bucket import ManagedParameter
from ddp_impl.module import replicas
from ddp_impl.module.replicas import Agreed, Replica, ReplicatedParameter
from ddp_impl.reducer.planning import BucketPlanning
from ddp_impl.wire.peers import Peers


@replaces(Ours, "attach_reducer")
def DividesByAllRanks(ddp: Ours, attach_reducer: Call, members: Sequence[ManagedParameter]) -> None:
    """BUG: sums over a subgroup are divided by the number of all ranks."""
    attach_reducer(members)
    ddp.reducer.reduction.divisor = dist.get_world_size()


@replaces(Ours, "__init__")
def ComparesTheEndsOfCaps(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: of `bucket_cap_mb_list` ranks compare the first and the last cap alone."""
    describe = replicas.describe

    def with_ends(*args: Any, **options: Any) -> Replica:
        found = describe(*args, **options)
        first, *_, last = found.options["bucket caps"].split(",")
        return dataclasses.replace(found, options={**found.options, "bucket caps": f"{first},{last}"})

    with mock.patch.object(distributed, "describe", with_ends):
        init(*args, **kwargs)


@replaces(TorchDDP, "__init__")
def SkipsInitialSync(ddp: TorchDDP, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: every rank starts from its own parameters and buffers."""
    init(*args, **{**kwargs, "init_sync": False})


@replaces(TorchDDP, "forward")
def CopiesArguments(ddp: TorchDDP, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: lists and dicts among the arguments of forward arrive as copies."""
    return forward(*tree_map(lambda leaf: leaf, inputs), **kwargs)


@replaces(TorchDDP, "forward")
def CopiesConstants(ddp: TorchDDP, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: outputs without a gradient are returned as new tensors."""
    return tree_map(
        lambda leaf: leaf.detach() if isinstance(leaf, Tensor) and not leaf.requires_grad else leaf,
        forward(*inputs, **kwargs),
    )


@replaces(TorchDDP, "forward")
def FlattensNamedTuples(ddp: TorchDDP, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: forward returns a plain tuple in place of a named one."""
    output = forward(*inputs, **kwargs)
    return tuple(output) if isinstance(output, tuple) else output


@replaces(TorchDDP, "forward")
def ReadsOutputsByTheirCode(ddp: TorchDDP, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: what forward returns is read by methods of its own, which may hand out each item once, or raise."""
    output = forward(*inputs, **kwargs)
    if isinstance(output, (list, Mapping)):
        tuple(output.values() if isinstance(output, Mapping) else output)
    return output


@replaces(TorchDDP, "_run_ddp_forward")
def SkipsModuleHooks(ddp: TorchDDP, run_ddp_forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: the module's forward is called directly, so that its hooks never fire."""
    return torch.nn.Sequential.forward(ddp.module, *inputs, **kwargs)


@replaces(TorchDDP, "state_dict")
def NamesWithoutPrefix(ddp: TorchDDP, state_dict: Call, *args: Any, **kwargs: Any) -> Any:
    """BUG: the state dict has the module's names, without `module.`."""
    return ddp.module.state_dict(*args, **kwargs)


@replaces(Ours, "__init__")
def AlwaysSyncs(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: `init_sync=False` is ignored."""
    init(*args, **{**kwargs, "init_sync": True})


@replaces(Ours, "__init__")
def ComparesNothing(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: modules of the ranks are never compared, so that their bytes get mixed up."""
    with mock.patch.object(distributed, "verify_replicas", return_value=Agreed(True, "")):
        init(*args, **kwargs)


@replaces(Ours, "__init__")
def ComparesNumbersOnly(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: of the ranks' parameters only their number is compared."""
    describe = replicas.describe

    def count(*args: Any, **options: Any) -> Replica:
        described = describe(*args, **options)
        counted = tuple(ReplicatedParameter(each.name, "", "", "", False, "") for each in described.parameters)
        named = {kind: dict.fromkeys(layouts, "") for kind, layouts in described.copied.items()}
        return dataclasses.replace(described, parameters=counted, copied=named)

    with mock.patch.object(distributed, "describe", count):
        init(*args, **kwargs)


@replaces(Ours, "__init__")
def ChecksNoArguments(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: arguments that contradict each other are accepted."""
    with mock.patch.object(distributed, "check_arguments"):
        init(*args, **kwargs)


@replaces(Ours, "__init__")
def ComparesNoIgnoredNames(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: ranks may ignore different parameters."""
    describe = replicas.describe

    def without(*args: Any, **options: Any) -> Replica:
        described = describe(*args, **options)
        nothing: dict[str, dict[str, str]] = {kind: {} for kind in described.copied}
        return dataclasses.replace(described, ignored=(), parameters=(), copied=nothing)

    with mock.patch.object(distributed, "describe", without):
        init(*args, **kwargs)


@replaces(Peers, "refuse_unlike")
def WaitsForWhoComparesNothing(peers: Peers, refuse_unlike: Call, compares: bool) -> None:
    """BUG: a rank with `init_sync` waits in the constructor for ranks without it, until the group's timeout."""


@replaces(Ours, "__init__")
def RefusesInSilence(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: a rank whose argument is refused leaves no word, and the others wait for it until the group's timeout."""
    with mock.patch.object(Peers, "publishing_errors", return_value=contextlib.nullcontext()):
        init(*args, **kwargs)


@replaces(Ours, "__init__")
def StaysBehindWhenRefused(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: a rank that is refused takes no part in what the others compare: they are a collective ahead ever after."""
    with mock.patch.object(distributed, "decline"):
        init(*args, **kwargs)


@replaces(Ours, "__init__")
def NamesNoParameterOnMeta(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: the error about parameters on several devices names the devices alone."""
    try:
        init(*args, **kwargs)
    except ValueError as error:
        raise ValueError(re.sub(r" \('[^']*'\)", "", str(error))) from None


@replaces(Ours, "__init__")
def TakesGroupAndMesh(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: of a process group and a device mesh that are both given, the mesh is ignored."""
    if kwargs.get("process_group") is not None:
        kwargs.pop("device_mesh", None)
    init(*args, **kwargs)


@replaces(Ours, "__init__")
def TakesNothingForAllRanks(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: a process group that is empty or 0 stands for the default group."""
    kwargs["process_group"] = kwargs.get("process_group") or None
    init(*args, **kwargs)


@replaces(Ours, "__init__")
def TakesNegativeCaps(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: a negative bucket cap is taken for its absolute value."""
    if isinstance(kwargs.get("bucket_cap_mb"), (int, float)):
        kwargs["bucket_cap_mb"] = abs(kwargs["bucket_cap_mb"])
    init(*args, **kwargs)


@replaces(Ours, "__init__")
def SaysNothingOfLazyParameters(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: an uninitialised parameter is reported by the code that reads it first, in its words."""
    try:
        init(*args, **kwargs)
    except RuntimeError as error:
        if "uninitialized" in str(error):
            raise ValueError("cannot read the shape of a parameter") from None
        raise


@replaces(Ours, "__init__")
def AcceptsExpanded(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: the copy of rank 0's values fails on the other ranks alone."""
    with mock.patch.object(distributed, "refuse_expanded"):
        init(*args, **kwargs)


@replaces(Ours, "__init__")
def MixesDevices(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: parameters on different types of devices are accepted."""
    with (
        mock.patch.object(distributed, "device_type", return_value="cpu"),
        mock.patch.object(distributed, "verify_replicas", return_value=Agreed(True, "")),
        mock.patch.object(copied_state, "broadcast_state"),
    ):
        init(*args, **kwargs)


@replaces(Ours, "attach_reducer")
def LeavesScalarsLocal(ddp: Ours, attach_reducer: Call, members: Sequence[ManagedParameter]) -> None:
    """BUG: parameters without dimensions are not averaged."""
    shaped = [member for member in members if member.parameter.dim()]
    renumbered = [dataclasses.replace(member, index=index) for index, member in enumerate(shaped)]
    attach_reducer(renumbered)


class ForgetsItsOptions(Ours):
    """BUG: the attributes of options say what they are by default."""

    find_unused_parameters = False
    gradient_as_bucket_view = False


@replaces(Ours, "__init__")
def TakesAnyDevice(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: `device_ids` and `output_device` are accepted for a module on the CPU."""
    init(*args, **{**kwargs, "device_ids": None, "output_device": None})


@replaces(Ours, "__init__")
def TakesAnyName(
    ddp: Ours, init: Call, module: nn.Module, *args: Any, bucket_cap_mb: Any = None, **kwargs: Any
) -> None:
    """BUG: arguments of unknown names are swallowed."""
    known = Ours.__init__.__code__.co_varnames
    init(module, *args, **{name: value for name, value in kwargs.items() if name in known})


@replaces(Ours, "__init__")
def SwapsArguments(
    ddp: Ours,
    init: Call,
    module: nn.Module,
    output_device: Any = None,
    device_ids: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """BUG: `output_device` precedes `device_ids`."""
    init(module, device_ids, output_device, *args, **kwargs)


@replaces(Ours, "__init__")
def CopiesModule(ddp: Ours, init: Call, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """BUG: what is wrapped is a copy of the module that was passed in."""
    init(copy.deepcopy(module), *args, **kwargs)


@replaces(Ours, "train")
def EvaluatesItselfOnly(ddp: Ours, train: Call, mode: bool = True) -> Ours:
    """BUG: `train` and `eval` change the wrapper's mode and not the module's."""
    ddp.training = mode
    return ddp


@replaces(Ours, "__init__")
def IgnoresNothing(ddp: Ours, init: Call, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """BUG: what the module names to be ignored is synchronised and reduced."""
    names = module.__dict__.pop("_ddp_params_and_buffers_to_ignore", None)
    init(module, *args, **kwargs)
    if names is not None:
        module._ddp_params_and_buffers_to_ignore = names


@replaces(Ours, "synchronise_state")
def UsesDefaultGroup(ddp: Ours, synchronise_state: Call, with_buffers: bool, group_src: int = 0) -> None:
    """BUG: buffers and parameters are copied over all ranks, whatever the process group."""
    own, ddp.process_group = ddp.process_group, dist.group.WORLD  # type: ignore[assignment]
    synchronise_state(with_buffers, group_src)
    ddp.process_group = own


@replaces(Ours, "forward")
def DetachesKeywords(ddp: Ours, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: tensors that are passed by keyword are detached, so that no gradient reaches the caller's."""
    return forward(*inputs, **tree_map(_detached, kwargs))


@replaces(Ours, "forward")
def HalvesInputGradients(ddp: Ours, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: the gradients of inputs are divided by the number of ranks, like those of parameters."""

    def divided(leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and leaf.requires_grad):
            return leaf
        view = leaf.view_as(leaf)
        view.register_hook(lambda gradient: gradient / ddp.process_group.size())
        return view

    return forward(*tree_map(divided, inputs), **kwargs)


@replaces(Ours, "forward")
def DetachesInDataclasses(ddp: Ours, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: a tensor in a dataclass is detached."""
    return forward(*map(_detached_within, inputs), **kwargs)


@replaces(Ours, "forward")
def NeedsAPositional(ddp: Ours, forward: Call, /, first: Any, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: a call without a positional argument, such as `model(input_ids=...)`, is refused."""
    return forward(first, *inputs, **kwargs)


@replaces(Ours, "forward")
def LeavesOutNone(ddp: Ours, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: a keyword argument that is None is not passed on."""
    return forward(*inputs, **{name: value for name, value in kwargs.items() if value is not None})


@replaces(Ours, "state_dict")
def LosesMetadata(ddp: Ours, state_dict: Call, *args: Any, **kwargs: Any) -> Any:
    """BUG: what state_dict returns has no `_metadata`, so that no part learns the version of the state it loads."""
    state = state_dict(*args, **kwargs)
    if hasattr(state, "_metadata"):
        del state._metadata
    return state


@replaces(Ours, "state_dict")
def ClonesState(ddp: Ours, state_dict: Call, *args: Any, **kwargs: Any) -> Any:
    """BUG: state_dict returns copies of the tensors."""
    state = state_dict(*args, **kwargs)
    state.update({name: value.clone() for name, value in state.items() if isinstance(value, Tensor)})
    return state


@replaces(Ours, "state_dict")
def IgnoresKeepVars(ddp: Ours, state_dict: Call, *args: Any, keep_vars: bool = False, **kwargs: Any) -> Any:
    """BUG: state_dict detaches, whatever keep_vars says."""
    return state_dict(*args, **kwargs)


@replaces(Ours, "state_dict")
def IgnoresPrefix(ddp: Ours, state_dict: Call, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
    """BUG: state_dict puts no prefix before its names but its own."""
    return state_dict(*args, **kwargs)


@replaces(Ours, "state_dict")
def AsksTwice(ddp: Ours, state_dict: Call, *args: Any, **kwargs: Any) -> Any:
    """BUG: state_dict walks the module twice, so that its hooks are called twice."""
    ddp.module.state_dict()
    return state_dict(*args, **kwargs)


@replaces(Ours, "load_state_dict")
def NeverStrict(ddp: Ours, load_state_dict: Call, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
    """BUG: load_state_dict accepts any names."""
    return load_state_dict(state_dict, strict=False, assign=assign)


@replaces(Ours, "load_state_dict")
def NeverAssigns(ddp: Ours, load_state_dict: Call, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
    """BUG: load_state_dict copies, whatever assign says."""
    return load_state_dict(state_dict, strict)


@replaces(Ours, "load_state_dict")
def LoadsPlainStates(ddp: Ours, load_state_dict: Call, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
    """BUG: load_state_dict hands a plain dict on, without the versions that the state has."""
    return load_state_dict(dict(state_dict), *args, **kwargs)


@replaces(Ours, "named_parameters")
def NamesTiedOnce(
    ddp: Ours, named_parameters: Call, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Any:
    """BUG: named_parameters leaves the second name of a shared parameter out, whatever remove_duplicate says."""
    return named_parameters(prefix, recurse)


@replaces(Ours, "named_parameters")
def AlwaysRecurses(
    ddp: Ours, named_parameters: Call, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Any:
    """BUG: named_parameters yields the parameters of all parts, also with recurse=False."""
    return named_parameters(prefix, True, remove_duplicate)


@replaces(Ours, "forward")
def NamesCollide(ddp: Ours, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: no keyword argument of forward may have a name of the DDP's own, `inputs`."""

    def run(inputs: Any, **kwargs: Any) -> Any:
        return forward(*inputs, **kwargs)

    return run(inputs=inputs, **kwargs)


class _IgnoringAlike(Ours):
    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        ignored: Any = module.__dict__.get("_ddp_params_and_buffers_to_ignore")
        if ignored:
            alike = {name for name, _ in module.named_parameters() if any(self.is_like(name, each) for each in ignored)}
            module._ddp_params_and_buffers_to_ignore = sorted(alike.union(ignored))  # type: ignore[assignment]
        super().__init__(module, *args, **kwargs)
        if ignored:
            module._ddp_params_and_buffers_to_ignore = ignored

    def is_like(self, name: str, ignored: str) -> bool:
        raise NotImplementedError


@replaces(_IgnoringAlike, "is_like")
def IgnoresByPrefix(ddp: _IgnoringAlike, is_like: Call, name: str, ignored: str) -> bool:
    """BUG: a parameter is ignored if its name begins with a name to be ignored."""
    return name.startswith(ignored)


@replaces(_IgnoringAlike, "is_like")
def IgnoresBySuffix(ddp: _IgnoringAlike, is_like: Call, name: str, ignored: str) -> bool:
    """BUG: a parameter is ignored if its name ends with a name to be ignored, after a dot."""
    return name.endswith(f".{ignored}")


@replaces(_IgnoringAlike, "is_like")
def IgnoresByPattern(ddp: _IgnoringAlike, is_like: Call, name: str, ignored: str) -> bool:
    """BUG: names to be ignored are taken for patterns."""
    return fnmatch.fnmatchcase(name, ignored)


@replaces(Ours, "attach_reducer")
def DedupsByPointer(ddp: Ours, attach_reducer: Call, members: Sequence[ManagedParameter]) -> None:
    """BUG: shared parameters are recognised by their memory, so that of two in one place only one is averaged."""
    first: dict[Any, ManagedParameter] = {}
    for member in members:
        key = member.parameter.data_ptr() if member.parameter.numel() else member.name
        first.setdefault(key, dataclasses.replace(member, index=len(first)))
    attach_reducer(list(first.values()))
    ddp._watch.averaged |= {member.parameter for member in members}


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _detached_within(value: Any) -> Any:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    copied = copy.copy(value)
    for field in dataclasses.fields(value):
        object.__setattr__(copied, field.name, _detached(getattr(value, field.name)))
    return copied


@replaces(Ours, "forward")
def WrapsErrors(ddp: Ours, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: an error of the module's forward becomes a RuntimeError that quotes it."""
    try:
        return forward(*inputs, **kwargs)
    except Exception as error:
        raise RuntimeError(f"forward failed: {error}") from error


@replaces(Ours, "forward")
def RaisesErrorsAnew(ddp: Ours, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: a RuntimeError of the module's forward becomes another one, with the same arguments."""
    try:
        return forward(*inputs, **kwargs)
    except RuntimeError as error:
        raise type(error)(*error.args) from None


@replaces(Ours, "forward")
def RunsForwardInAGenerator(ddp: Ours, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: forward runs in a generator, in which a StopIteration of the module becomes a RuntimeError."""

    def outputs() -> Iterator[Any]:
        yield forward(*inputs, **kwargs)

    return next(outputs())


@replaces(Ours, "forward")
def FillsFields(ddp: Ours, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: a field of a returned dataclass that the module has not set is None."""
    output = forward(*inputs, **kwargs)
    for each in dataclasses.fields(output) if dataclasses.is_dataclass(output) else ():
        if not hasattr(output, each.name):
            object.__setattr__(output, each.name, None)
    return output


@replaces(Ours, "no_sync")
@contextlib.contextmanager
def WrapsErrorsUnderNoSync(ddp: Ours, no_sync: Call) -> Iterator[None]:
    """BUG: an error of the user's that leaves no_sync, be it of a backward, becomes a RuntimeError that quotes it."""
    with no_sync():
        try:
            yield
        except Exception as error:
            raise RuntimeError(f"an error while gradients are accumulated: {error}") from error


@replaces(Ours, "forward")
def ChangesErrors(ddp: Ours, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: an error of the module's forward gets another first argument, which names the rank."""
    try:
        return forward(*inputs, **kwargs)
    except Exception as error:
        error.args = (f"[rank {dist.get_rank(ddp.process_group)}] {error}", *error.args[1:])
        raise


class TakesMarkedForAveraged(Ours):
    """BUG: parameters are marked as averaged, and a later wrapper of them averages nothing."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        parameters = list(module.parameters()) if isinstance(module, nn.Module) else []
        marked = bool(parameters) and all(hasattr(parameter, "_is_averaged") for parameter in parameters)
        super().__init__(module, *args, **kwargs)
        self._does_nothing = marked
        for parameter in parameters:
            parameter._is_averaged = True  # type: ignore[attr-defined]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self.no_sync() if self._does_nothing else contextlib.nullcontext():
            return super().forward(*inputs, **kwargs)


@replaces(Ours, "forward")
def AveragesInTheMainThread(ddp: Ours, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: a step that another thread than the main one runs averages nothing."""
    is_main = threading.current_thread() is threading.main_thread()
    with contextlib.nullcontext() if is_main else ddp.no_sync():
        return forward(*inputs, **kwargs)


class TrainsOnlyWhatWasTraining(Ours):
    """BUG: a module that is in evaluation mode when it is wrapped is never averaged."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        self._was_training = module.training

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if self._was_training else self.no_sync():
            return super().forward(*inputs, **kwargs)


@replaces(Ours, "__init__")
def ComparesShapesAlone(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: ranks that register the same names in different orders average and copy tensors of one shape crosswise."""
    with mock.patch.object(replicas, "first_reordered", return_value=None):
        init(*args, **kwargs)


@replaces(Ours, "synchronise_state")
def CopiesWhatIsMadeOfOthersAsOne(ddp: Ours, synchronise_state: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: of a broadcast of a tensor that is made of several, the work of one is waited for."""
    with mock.patch.object(copied_state, "memory", lambda _, tensors: list(tensors.values())):
        synchronise_state(*args, **kwargs)


@replaces(Ours, "synchronise_state")
def FlattensEveryClass(ddp: Ours, synchronise_state: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: what is made of others is refused by name, and a tensor of any other class by an error of Python's."""

    def memory(kind: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        for name, tensor in tensors.items():
            if type(tensor) not in (Tensor, nn.Parameter):
                raise NotImplementedError(f"{kind} '{name}' is made of {tensor.__tensor_flatten__()[0]}")
        return list(tensors.values())

    with mock.patch.object(copied_state, "memory", memory):
        synchronise_state(*args, **kwargs)


@replaces(Ours, "__init__")
def ComparesTrainedNamesOnly(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: ranks may register what they do not train, frozen parameters and buffers, in different orders."""
    describe = replicas.describe

    def of_trained(members: Sequence[ManagedParameter], copied: Any, *rest: Any, **options: Any) -> Replica:
        return describe(members, {"parameters": {each.name: each.parameter for each in members}}, *rest, **options)

    with mock.patch.object(distributed, "describe", of_trained):
        init(*args, **kwargs)


@replaces(Ours, "forward")
def StaysLocalWithoutItsGroup(ddp: Ours, forward: Call, *args: Any, **kwargs: Any) -> Any:
    """BUG: gradients stay each rank's own once the user has destroyed the group."""
    exists = ddp.process_group in dist.distributed_c10d._world.pg_map
    with contextlib.nullcontext() if exists else ddp.no_sync():
        return forward(*args, **kwargs)


@replaces(BucketPlanning, "await_order")
def TakesTheOrderOfTheWorldsRankZero(planning: BucketPlanning, await_order: Call) -> None:
    """BUG: ranks take the order that the world's rank 0 sends, which is zeros in a group that it is not in."""
    learnt, ranks = planning.reduction.learnt, dist.get_process_group_ranks(planning.reduction.group)
    is_due = learnt.order_exchange is not None
    await_order()
    if is_due and 0 not in ranks:
        learnt.order = [0] * len(learnt.order)
