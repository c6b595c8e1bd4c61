"""Attributes and methods of torch's DDP that are not documented, but that torch itself, frameworks and tests use.

Names and meaning are those of `torch.nn.parallel.DistributedDataParallel` (torch 2.13).
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import attrgetter
from types import CodeType, SimpleNamespace
from typing import Any, NoReturn, ParamSpec

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from ddp_impl.base.messages import manual_too_late
from ddp_impl.base.nested_tensors import move
from ddp_impl.base.options import ReducerOptions
from ddp_impl.base.telemetry import environment
from ddp_impl.compile.compiled_calls import CompiledCalls
from ddp_impl.module.parameter_watch import managed_parameters
from ddp_impl.reducer.iteration import Progress
from ddp_impl.reducer.reducer import Reducer
from ddp_impl.torch_internals.distributed import num_gloo_threads, overlapped_optimizer
from ddp_impl.torch_internals.tensors import ignored_names, set_ignored_names
from ddp_impl.wire.collectives import backend_of, rank_in, size_of

#: torch's class, whatever its name stands for later.
TORCH_DDP = nn.parallel.DistributedDataParallel
#: Methods that torch's class calls, and that this one has for users to call and does not call itself.
_NOT_CALLED = {"_build_params_for_reducer", "_build_debug_param_to_name_mapping", "_default_broadcast_coalesced"}

_STORE_ATTR = dis.opmap["STORE_ATTR"]

_P = ParamSpec("_P")


def refuse_unsupported_overrides(cls: type, ours: type) -> None:
    """Raise `TypeError` if `cls` overrides a method that torch's class calls and ours does not (docs/drop_in.md)."""
    overridden = {name: base for base in cls.__mro__[: cls.__mro__.index(ours)] for name in vars(base)}
    for name, base in overridden.items():
        torchs = getattr(vars(nn.parallel.DistributedDataParallel).get(name), "__get__", None) is not None
        if name.startswith("__") or not torchs or (hasattr(ours, name) and name not in _NOT_CALLED):
            continue
        raise TypeError(
            f"{base.__qualname__} overrides {name}, which torch's DistributedDataParallel calls and that of ddp_impl "
            "does not, so that nothing would come of it. Override forward, _pre_forward, _run_ddp_forward or "
            "_post_forward, register a comm hook, or leave this class to torch's DistributedDataParallel"
        )


def with_named_arguments_only(init: Callable[_P, None]) -> Callable[_P, None]:
    """Hide the last parameter of `init`, a `**` for `refuse_unknown`, from who asks what arguments there are."""
    signature = inspect.signature(init)
    init.__signature__ = signature.replace(parameters=[*signature.parameters.values()][:-1])  # type: ignore[attr-defined]
    return init


def refuse_unknown(names: Iterable[str]) -> None:
    """Raise `TypeError` for an argument that the constructor has not; the installed torch may have it."""
    for name in names:
        known = f". {_absence(name)}" if name in inspect.signature(TORCH_DDP).parameters else ""
        raise TypeError(f"DistributedDataParallel.__init__() got an unexpected keyword argument '{name}'{known}")


@functools.cache
def refuse_absent(ours: type, theirs: type = TORCH_DDP) -> frozenset[str]:
    """Have objects of `ours` refuse public attributes that only `theirs` has: a switch of a newer torch, say."""
    own = {*dir(ours), *dir(torch.Tensor)}.union(*map(_public_names, ours.__mro__[:-1]))  # some are set on tensors
    absent = frozenset(_public_names(theirs) - own)
    for name in absent:
        setattr(ours, name, _Absent(name))
    return absent


def _public_names(cls: type) -> set[str]:
    """Return what a class defines, and what its methods assign to objects."""
    functions = [inspect.unwrap(value) for value in vars(cls).values() if inspect.isfunction(value)]
    assigned = {name for function in functions for name in _assigned_by(function.__code__)}
    return {name for name in assigned.union(vars(cls)) if name[0] != "_"}


def _assigned_by(code: CodeType) -> Iterator[str]:
    """Return the attributes that `code` assigns; `dis.get_instructions` would take 80 ms for the two classes."""
    extension = 0
    for operation, operand in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        operand |= extension
        extension = operand << 8 if operation == dis.EXTENDED_ARG else 0
        if operation == _STORE_ATTR:
            yield code.co_names[operand]


class _Absent:
    """An attribute that there is not: reading it is an error of the usual kind, and setting it says why."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, _: object, owner: type) -> Any:
        raise AttributeError(_absence(self._name))

    def __set__(self, _: object, value: object) -> None:
        raise AttributeError(_absence(self._name))


def _absence(name: str) -> str:
    return (
        f"DistributedDataParallel of torch {torch.__version__} has {name}, and that of ddp_impl has nothing that "
        "does the same. Leave it out, or wrap the module in torch's"
    )


def _option(name: str, doc: str, read: Callable[[ReducerOptions], Any] | None = None) -> Any:
    """Return the property of a wrapper that shows one of its options, and changes it as `_set_option` allows."""
    read = attrgetter(name) if read is None else read
    return property(lambda ddp: read(ddp._options), lambda ddp, value: ddp._set_option(name, value), doc=doc)


class TorchSurface(nn.Module):
    """The wrapper as torch's code and frameworks see it, with the attributes that its constructor sets."""

    # Switches of torch's that subclasses with a forward of their own read: they decide nothing here.
    _delay_all_reduce_all_params = False
    _use_python_reducer = False
    _ddp_sink_clone = False
    _static_graph_delay_allreduce_enqueued = True
    use_side_stream_for_tensor_copies = False

    module: nn.Module
    parameters_to_ignore: set[str]
    process_group: dist.ProcessGroup
    reducer: Reducer
    device: torch.device
    device_type: str
    device_ids: list[int] | None
    output_device: int | None
    is_multi_device_module: bool
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    require_backward_grad_sync: bool
    dim: int
    _options: ReducerOptions
    _compiled_calls: CompiledCalls

    # -- arguments and outputs, for frameworks that move them themselves -----------------------------------------------

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> tuple[tuple[Any], tuple[Any]]:
        """Return `inputs` and `kwargs`, each in a tuple of one, with all tensors on device `device_id` of our type."""
        device = torch.device(self.device_type, device_id)
        return (move(inputs, device),), (move(kwargs, device),)

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[int | torch.device]) -> Any:
        """Split tensors along dimension `dim` over `device_ids`, of which a process of ours has one."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def gather(self, outputs: Any, output_device: int | torch.device) -> Any:
        """Concatenate outputs along dimension `dim` on `output_device`."""
        return gather(outputs, output_device, dim=self.dim)

    # -- parts of a forward, for subclasses that write their own -------------------------------------------------------

    @property
    def logger(self) -> Any:
        """What users call of torch's `ddp.logger`. Statistics are always up to date here."""
        return SimpleNamespace(
            set_runtime_stats_and_log=lambda: None,
            set_error_and_log=lambda error: self.reducer.telemetry.logged(RuntimeError(error)),
            _get_ddp_logging_data=self._get_ddp_logging_data,
        )

    def _get_ddp_logging_data(self) -> dict[str, int | str]:
        """Return what this rank knows about its configuration, buckets and times (ns), under torch's keys."""
        return logging_data(self)

    def _clear_grad_buffer(self) -> None:
        """Do nothing: delayed gradients have buckets like all others."""

    @contextlib.contextmanager
    def _inside_ddp_forward(self) -> Iterator[None]:
        """Do nothing: compilation is not told by a mark on the class."""
        yield

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> NoReturn:
        raise self.reducer.telemetry.logged(err_type(err_msg))

    # -- which parameters ---------------------------------------------------------------------------------------------

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, names: Collection[str]) -> None:
        """Leave the named parameters and buffers of `module` alone when it is wrapped; the same set on every rank."""
        set_ignored_names(module, names)

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        """Yield the parameters that a wrapped module averages, or all of a bare one; with `named_params`, names too."""
        bare = module.module if isinstance(module, TorchSurface) else module
        ignored = getattr(module, "parameters_to_ignore", ignored_names(bare))
        for name, parameter in bare.named_parameters():
            if name not in ignored:
                yield (name, parameter) if named_params else parameter

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """Return the parameters to average as the module is now, and which of them have sparse gradients. Local."""
        members = managed_parameters(self.module, self.parameters_to_ignore)
        return [member.parameter for member in members], [member.sparse for member in members]

    def _build_debug_param_to_name_mapping(self, parameters: Sequence[nn.Parameter]) -> dict[int, str]:
        """Return the names of `parameters` by place; `ValueError` unless these are what would be averaged. Local."""
        members = managed_parameters(self.module, self.parameters_to_ignore)
        name_of = {member.parameter: member.name for member in members}
        absent = name_of.keys() - set(parameters)
        if absent:
            names = ", ".join(sorted(name_of[parameter] for parameter in absent))
            error = f"Param with name {names} is averaged, but is not among the {len(parameters)} parameters given"
            raise self.reducer.telemetry.logged(ValueError(error))
        strangers = [place for place, parameter in enumerate(parameters) if parameter not in name_of]
        if strangers:
            error = (
                f"Expected param to name mapping of parameters that are averaged; those in places {strangers} are not"
            )
            raise self.reducer.telemetry.logged(ValueError(error))
        return {place: name_of[parameter] for place, parameter in enumerate(parameters)}

    # -- options: those of the reducer --------------------------------------------------------------------------------

    find_unused_parameters = _option("find_unused_parameters", "Whether parameters may lack a gradient.")
    static_graph = _option("static_graph", "Whether every iteration uses the same parameters in the same way.")
    gradient_as_bucket_view = _option("gradient_as_bucket_view", "Whether gradients live in the buckets.")
    skip_all_reduce_unused_params = _option(
        "skip_all_reduce_unused_params", "Whether buckets that no rank used are not communicated."
    )
    lazy_bucket_allocation = _option(
        "lazy_bucket_allocation", "Whether buckets have storage only while gradients are in them."
    )
    bucket_bytes_cap = _option("bucket_bytes_cap", "Bytes of gradients per all-reduce.", attrgetter("caps.cap_bytes"))
    bucket_bytes_cap_list = _option(
        "bucket_bytes_cap_list",
        "Bytes of gradients of the first, second, ... all-reduce; empty if one cap serves all.",
        lambda options: list(options.caps.per_bucket_bytes),
    )

    def _set_option(self, name: str, value: Any) -> None:
        """Change an option before the first forward, on every rank; raises `AttributeError` later."""
        if value == getattr(self, name):
            return
        of_buckets = name in ("gradient_as_bucket_view", "lazy_bucket_allocation")
        is_changeable = hasattr(self._options, name) and not of_buckets
        if not is_changeable or self.reducer.telemetry.num_iterations:
            when = "once training has begun" if is_changeable else "after construction"
            raise AttributeError(
                f"[rank {rank_in(self.process_group)}] {name} is {getattr(self, name)} and cannot be changed {when}: "
                "every rank relies on it. Wrap the module anew on every rank, with argument "
                f"{name.replace('bytes_cap', 'cap_mb')}"
            )
        changed: Any = {name: type(getattr(self._options, name))(value)}
        self._options = dataclasses.replace(self._options, **changed)
        self.reducer.choose_options(self._options)

    # -- finalization by hand: torch 2.15 has it, on every torch it is here -------------------------------------------

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether a backward leaves its gradients to `finalize_backward`; equal on every rank, set before a forward."""
        return self._options.finalizes_by_hand

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if bool(required) is self._options.finalizes_by_hand:
            return
        if self.reducer.reduction.iteration.progress is not Progress.IDLE:
            raise self.reducer.telemetry.logged(RuntimeError(manual_too_late(rank_in(self.process_group))))
        self._options = dataclasses.replace(self._options, finalizes_by_hand=bool(required))
        self.reducer.choose_options(self._options)

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether `finalize_backward` has to wait for the return of backward: always, if it is to be called."""
        return self._options.finalizes_by_hand

    def finalize_backward(self) -> None:
        """Put the averages into `.grad`, on every rank; `ReductionError` if a backward has left none to this call."""
        self.reducer.finalize_by_hand()

    # -- the reducer --------------------------------------------------------------------------------------------------

    def _set_static_graph(self) -> None:
        """Promise a static graph after construction, before the first iteration; every rank must call it."""
        if self.static_graph:
            warnings.warn("You've set static_graph to be True already.", stacklevel=2)
            return
        if self.reducer.telemetry.num_iterations:
            error = "_set_static_graph() should be called before training loop starts, not after iterations"
            raise self.reducer.telemetry.logged(RuntimeError(error))
        self.static_graph = True

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Average times over every `sample_rate`-th iteration (the first ten always); raises `ValueError` below 1."""
        if sample_rate < 1:
            raise ValueError("DDP runtime logging sampling rate should be equal or greater than 1")
        self.reducer.telemetry.sample_rate = sample_rate

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        """Step `optim` in the backward; raises `RuntimeError` if torch has no functional form of it."""
        overlapped = overlapped_optimizer(optim, optim_params, *args, **kwargs)
        try:
            overlapped.register_ddp(self)
        except NotImplementedError as error:
            raise RuntimeError(f"{optim} does not support overlapped DDP: it has no functional form") from error

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Accept torch's switch, which has no effect: outputs are never cloned, and may be changed in place."""

    def _check_reducer_finalized(self) -> None:
        """Raise when a backward has begun whose gradients are not all averaged; may be called on any rank."""
        self.reducer.check_finished()

    def _remove_autograd_hooks(self) -> None:
        """Stop averaging: backwards of later forwards leave local gradients. Every rank must call it."""
        self.reducer.remove_hooks()

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Average over a group whose ranks all call it and have equal parameters; forget an unfinished backward."""
        outside: bool = new_process_group is dist.GroupMember.NON_GROUP_MEMBER  # type: ignore[comparison-overlap]
        if not outside and not isinstance(new_process_group, dist.ProcessGroup):
            raise TypeError(
                "_update_process_group takes a process group (or GroupMember.NON_GROUP_MEMBER on a rank "
                f"that is no longer in it); got {new_process_group!r}"
            )
        self.process_group = new_process_group
        self.reducer.reset(new_process_group)
        self._compiled_calls.forget_answer()
        self.require_forward_param_sync = True  # which ranks may know differently, whose last forwards differ

    @classmethod
    def _get_active_ddp_module(cls) -> None:
        """Tell Dynamo that no forward wants its graphs split by torch's optimizer; ours are split by our own."""
        return

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self.reducer.reduction.learnt.has_rebuilt_buckets

    @property
    def _distributed_rank(self) -> int:
        return rank_in(self.process_group)


def logging_data(ddp: TorchSurface) -> dict[str, int | str]:
    """Describe configuration, buckets and times of `ddp`; local, any rank may ask."""
    reducer, learnt = ddp.reducer, ddp.reducer.reduction.learnt
    parameters = [member.parameter for member in reducer.members]
    sizes = ", ".join(str(bucket.num_bytes) for bucket in reducer.buckets)
    indices = " ".join("".join(f"{member.index} " for member in bucket.members).strip() for bucket in reducer.buckets)
    variables = environment()
    data: dict[str, int | str] = {
        "world_size": size_of(ddp.process_group),
        "rank": rank_in(ddp.process_group),
        "module_name": type(ddp.module).__name__,
        "device_ids": ", ".join(str(index) for index in ddp.device_ids or ()),
        "output_device": -1 if ddp.output_device is None else ddp.output_device,
        "backend_name": backend_of(ddp.process_group),
        "broadcast_buffers": int(ddp.forward_sync_buffers),
        "bucket_cap_bytes": ddp.bucket_bytes_cap,
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
        "static_graph": int(ddp.static_graph),
        "is_multi_device_module": int(ddp.is_multi_device_module),
        "has_sync_bn": int(any(isinstance(layer, nn.SyncBatchNorm) for layer in ddp.module.modules())),
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "dtypes": ", ".join(dict.fromkeys(_dtype_name(p.dtype) for p in parameters)),
        "has_rebuilt_buckets": int(learnt.has_rebuilt_buckets),
        "bucket_sizes": sizes,
        "join_uneven_inputs": int(reducer.telemetry.joined_uneven_inputs),
        "unused_parameter_size": sum(reducer.planning.specs[index].num_bytes for index in learnt.last_unused or ()),
        "prev_iteration_grad_ready_order_indices": ", ".join(map(str, reducer.arrivals.order)),
        "num_buckets_reduced": reducer.telemetry.num_buckets_reduced,
        "can_set_static_graph": int(learnt.looks_static),
    }
    if learnt.caps.measured:
        data["auto_bucket_caps"] = f"{learnt.caps.first_bytes}, {learnt.caps.cap_bytes}"
        data["bucket_cap_bytes"] = learnt.caps.cap_bytes
    if learnt.has_rebuilt_buckets:
        data["rebuilt_bucket_sizes"] = sizes
        data["rebuilt_per_bucket_param_indices"] = indices
    backend = str(data["backend_name"])
    for name, value in variables.items():
        if _concerns(name, backend):
            data.setdefault(name.lower(), value)  # RANK and WORLD_SIZE are the group's here, not the environment's
    if data["backend_name"] == "gloo":
        data["gloo_num_threads"] = num_gloo_threads(ddp.process_group, ddp.device)
    return data | reducer.telemetry.logging_data()


def _concerns(variable: str, backend: str) -> bool:
    return backend in variable.lower() or not any(name in variable for name in ("NCCL", "GLOO"))


def _dtype_name(dtype: object) -> str:
    name = str(dtype).removeprefix("torch.")
    return {"float32": "float", "float64": "double", "float16": "c10::Half", "bfloat16": "c10::BFloat16"}.get(
        name, name
    )
