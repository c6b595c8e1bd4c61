"""Every private name of torch that `ddp_impl` depends on: what it is needed for, and why no public one will do.

Nothing else in this package names a private module or attribute of torch; a test keeps it so. When a version of torch
moves one of them, this file is where to look. The tests of this package and `ddp-conformance` exercise all of them on
torch 2.13.0+cpu (2026-11), the only version that this repository pins and has results of.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from itertools import chain
from operator import attrgetter
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._C._distributed_c10d import Backend as GroupBackend
from torch._C._distributed_c10d import (
    BuiltinCommHookType,
    DebugLevel,
    GradBucket,
    Store,
    _register_process_group,
    _unregister_process_group,
    get_debug_level,
)
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.common import AotAutograd, aot_autograd
from torch._dynamo.convert_frame import CatchErrorsWrapper, convert_frame_assert
from torch._dynamo.decorators import skip
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.exc import Unsupported
from torch._functorch.partitioners import default_partition
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._logging import getArtifactLogger, trace_structured  # type: ignore[attr-defined]
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.distributed.distributed_c10d import GroupName
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

__all__ = [
    "AotAutograd",
    "BuiltinCommHookType",
    "DebugLevel",
    "FakeTensor",
    "FakeTensorMode",
    "GradBucket",
    "GroupBackend",
    "Store",
    "TracingContext",
    "Unsupported",
    "aot_autograd",
    "default_partition",
    "detect_fake_mode",
    "getArtifactLogger",
    "get_debug_level",
    "skip",
    "trace_structured",
    "tracing",
    "tree_map_only",
]

#: Which tensor of C++'s a Python tensor is; `torch.utils.swap_tensors` makes it another, with other hooks.
tensor_in_cpp = attrgetter("_cdata")

_Function = TypeVar("_Function", bound=Callable[..., Any])
_frames = torch._C._dynamo.eval_frame
_AS_IT_IS = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)


def keep_out_of_graphs(function: _Function) -> _Function:
    """Let `function`, which C++ calls, and all that it calls run as it is while `torch.compile` is at work; return it.

    Dynamo would capture it like any frame: a compiled function that runs a backward has autograd's hooks called under
    it. `torch.compiler.disable` does the same at a cost of microseconds in every call.
    """
    _frames.set_code_exec_strategy(function.__code__, _AS_IT_IS)
    return function


def shown_to_profilers(name: str) -> AbstractContextManager[Any]:
    """Return a context that a profiler shows as an event of this name; no event is made while none runs.

    `record_function` takes microseconds even then, and no public function says whether one does.
    """
    running = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return torch.autograd.profiler.record_function(name) if running else contextlib.nullcontext()


# -- autograd ---------------------------------------------------------------------------------------------------------


def call_when_backward_ends(callback: Callable[[], None]) -> None:
    """Have autograd call `callback` once, when the backward that runs now is over.

    torch has no public call for it: public hooks run when single nodes of the graph are done.
    """
    Variable._execution_engine.queue_callback(callback)


class WhenBackwardEnds:
    """Calls `ended` when the backward that runs now is over, or `broke_off` if it raised.

    Autograd throws its callbacks away when a backward raises. That is the only notice of it which it gives. `broke_off`
    gets the exception and its traceback, as far as `_raised_below` finds them.
    """

    __slots__ = ("_broke_off", "_ended")

    def __init__(
        self, ended: Callable[[], None], broke_off: Callable[[BaseException | None, TracebackType | None], None]
    ) -> None:
        """Have autograd call this once."""
        self._ended, self._broke_off = ended, broke_off
        call_when_backward_ends(self)

    @keep_out_of_graphs
    def __call__(self) -> None:
        """Take the report that the backward is over; threads of autograd may keep this object for a moment longer."""
        ended = self._ended
        self._ended = self._broke_off = _nothing
        ended()

    @keep_out_of_graphs
    def __del__(self) -> None:
        """Take it that the backward raised, unless it is over."""
        if self._broke_off is not _nothing and not sys.is_finalizing():
            self._broke_off(*_raised_below(sys._getframe().f_back))


def _nothing(*_: object) -> None:
    """Take any report and do nothing: holds nobody."""


def _raised_below(frame: FrameType | None) -> tuple[BaseException | None, TracebackType | None]:
    """Return what Python code raised on its way up to `frame`, which runs C++ code; None for what Python does not know.

    C++ holds the exception, but the garbage collector knows it like any object. Its traceback begins right below
    `frame`, or below none in a thread of torch's own. Before Python 3.12 exception and traceback are still apart: the
    exception is then the one that nobody but C++ refers to; and one that C code raised (1 / 0) is no object yet. The
    collector is asked for young objects only: of all that a process holds there may be millions, and the user waits.
    """
    young = gc.get_objects(0) + gc.get_objects(1)
    begins = [item for item in young if type(item) is TracebackType and item.tb_frame.f_back is frame]
    if not begins:
        return None, None
    parts = list(_parts(begins[-1]))
    errors = [item for item in young if issubclass(type(item), BaseException)]
    found = [error for error in errors if any(error.__traceback__ is part for part in parts)]
    if not found:
        apart = [error for error in errors if error.__traceback__ is None]
        young.clear()
        errors.clear()
        apart.append(BaseException())  # which nobody else refers to
        *num_references, of_this_list = map(sys.getrefcount, apart)
        found = [error for error, num in zip(apart, num_references, strict=False) if num == of_this_list + 1]
    return found[0] if len(found) == 1 else None, begins[-1]


def _parts(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def in_backward() -> bool:
    """Whether this thread runs a backward; torch has no public way to ask."""
    return current_backward() != -1


def current_backward() -> int:
    """Return the number of the backward that this thread runs, -1 outside of any; one within another has its own."""
    number: int = torch._C._current_graph_task_id()
    return number


def brought_by_backward(nodes: Sequence[Node]) -> list[bool]:
    """Return which of these nodes, which accumulate gradients, the backward that runs now will come to.

    The engine has found its way before it began, so the answer costs a look into a set for each node. It knows nothing
    of a backward that a node of this one will begin, as a reentrant checkpoint does. `torch.autograd.grad` accumulates
    nothing, nor does a backward of torch.distributed.autograd: both come to none.
    """
    try:
        return list(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:  # the engine is asked for a leaf whose gradient it captures
        return [False] * len(nodes)


def in_compiled_backward() -> bool:
    """Whether compiled autograd has captured the backward that runs now, or is being compiled."""
    return compiled_autograd.in_compiled_autograd_region


@cache
def _rpc_api() -> Any:
    """Return the module that knows the agent of torch.distributed.rpc, imported where it is first asked for."""
    if not torch.distributed.rpc.is_available():
        return None
    from torch.distributed.rpc import api

    return api


def current_distributed_context_id() -> int | None:
    """Return the id of the torch.distributed.autograd context that this thread is in; None if in none.

    The public `get_gradients(context_id)` takes an id, which torch gives only to the code that opened the context.
    """
    api = _rpc_api()
    if api is None or not api._is_current_rpc_agent_set():
        return None
    from torch._C import _distributed_autograd

    try:
        return int(_distributed_autograd._current_context()._context_id())
    except RuntimeError:  # the only way to ask: there is none
        return None


# -- tensors ----------------------------------------------------------------------------------------------------------

# One kernel, or few, for a list of tensors. torch's optimizers are built on these; there is no public spelling.
foreach_zero_ = torch._foreach_zero_
foreach_div_ = torch._foreach_div_
#: The same as an operator, for graphs.
foreach_div_operator: Any = torch.ops.aten._foreach_div.Tensor
#: Collectives as operators, for graphs: `torch.distributed` has no traceable public ones.
functional_collectives: Any = torch.ops._c10d_functional


def foreach_copy_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each of `sources` into the target at its place, in few passes; autograd sees nothing of it."""
    try:
        torch._foreach_copy_(targets, sources)
    except RuntimeError:  # before anything is copied: it takes no tensor whose conjugation or negation is a bit
        if not any(map(is_lazy, chain(targets, sources))):
            raise
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def is_lazy(tensor: Tensor) -> bool:
    """Whether memory holds other values than the tensor has: a bit says that they are conjugated or negated."""
    return tensor.is_conj() or tensor.is_neg()


def num_stored(sparse: Tensor) -> int:
    """Return how many values a sparse tensor stores, coalesced or not."""
    return sparse._nnz()


#: References to the memory of a tensor that nobody else uses: the tensor's own, and that of the Python object below.
_OWN_USES = 2


def keeping_versions(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Return a block whose changes to `tensors` in place autograd does not count; public `.data` is for single writes.

    Tensors of inference mode have no versions.
    """
    counted = tuple([tensor for tensor in tensors if not tensor.is_inference()])
    return torch.autograd._unsafe_preserve_version_counter(counted)  # type: ignore[attr-defined]


def owns_its_memory(tensor: Tensor) -> bool:
    """Whether no other tensor uses the memory of `tensor`; torch has no public way to ask.

    Autograd lets gradients share memory: `(a.view(-1) + b.view(-1)).square().sum()` gives `a` and `b` one gradient.
    """
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) <= _OWN_USES


def has_tensor_hooks(tensor: Tensor) -> bool:
    """Whether a user registered a hook on the gradient of `tensor`; torch has no public way to ask."""
    return bool(tensor._backward_hooks)


def post_accumulate_hooks(tensor: Tensor) -> dict[int, Any]:
    """Return the table of hooks that `register_post_accumulate_grad_hook` put on a tensor, which must have had one.

    They are called in its order. Torch has no public way to ask, or to change that order.
    """
    table: dict[int, Any] = tensor._post_accumulate_grad_hooks
    return table


def num_post_accumulate_hooks(tensor: Tensor) -> int:
    """Return how many hooks `register_post_accumulate_grad_hook` put on a tensor; torch has no public way to ask."""
    return len(tensor._post_accumulate_grad_hooks or ())


def version_of(tensor: Tensor) -> int:
    """Return how often `tensor` was changed in place; torch has no public way to ask."""
    return tensor._version


def is_bound_to_transform(tensor: Tensor) -> bool:
    """Whether `tensor` belongs to a level of a function transform (vmap, grad)."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def in_backward_optimizers(parameter: Tensor) -> Sequence[Optimizer]:
    """Return the optimizers that `torch.distributed.optim._apply_optimizer_in_backward` gave to a parameter."""
    optimizers: Sequence[Optimizer] = getattr(parameter, "_in_backward_optimizers", ())
    return optimizers


def in_backward_hooks(parameter: Tensor) -> Sequence[RemovableHandle]:
    """Return the handles of the hooks that would step those optimizers."""
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map as handles

    found: Sequence[RemovableHandle] = handles.get(parameter, [])
    return found


# -- modules ----------------------------------------------------------------------------------------------------------

#: The base class of torch's batch normalisations.
BatchNorm = _BatchNorm


def parameter_table(module: nn.Module) -> dict[str, Any]:
    """Return the table in which a module keeps its own parameters; it may hold None, and for a while plain tensors.

    `named_parameters` gives a copy, leaves None out, and `setattr` accepts no plain tensor in a parameter's place.
    """
    return module._parameters


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


# -- torch.distributed ------------------------------------------------------------------------------------------------


def register_group_name(name: str, group: dist.ProcessGroup) -> None:
    """Let functional collectives find `group` under `name`. torch itself gives each group one name, for good."""
    _register_process_group(GroupName(name), group)


def unregister_group_name(name: str) -> None:
    """Let `name` stand for no group any more."""
    _unregister_process_group(GroupName(name))


def reduces_on_host(group: dist.ProcessGroup) -> bool:
    """Return whether a group communicates tensors on the CPU, as one does that was made for every kind of device."""
    return torch.device("cpu") in group._device_types


def num_gloo_threads(group: dist.ProcessGroup, device: torch.device) -> int:
    """Return how many threads the gloo backend of a group has; 0 where it does not tell."""
    return int(getattr(getattr(group._get_backend(device), "options", None), "_threads", 0))


def overlapped_optimizer(optim: type, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    """Return torch's optimizer that steps inside a backward, by means of a comm hook; for `_register_fused_optim`."""
    from torch.distributed.algorithms._optimizer_overlap import _as_overlapped_optim  # type: ignore[attr-defined]

    return _as_overlapped_optim(optim, parameters, *args, **kwargs)


# -- torch.compile ----------------------------------------------------------------------------------------------------

#: What intercepts the frames of this thread: None when nothing is being compiled. A C function: asking costs a few ns
#: in every forward, and is no frame that could itself be intercepted.
frame_callback: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback

#: Calls after which Dynamo has changed a setting of the thread; they compute no value.
GLOBAL_STATE = (
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
    torch._C._set_grad_enabled,
)

# Dynamo wraps the user's backend in layers; each refers to the next by one of these attributes, which differ between
# versions of torch.
_LINKS = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable")


def is_compiled(module: nn.Module) -> bool:
    """Whether calling `module` runs what `torch.compile` made of it, of its `forward`, or its `compile()`."""
    call, forward = module._compiled_call_impl, getattr(module, "forward", None)
    return isinstance(module, OptimizedModule) or call is not None or hasattr(forward, "_torchdynamo_orig_callable")


_stance_of = torch._dynamo.eval_frame._callback_from_stance
_exchanges = threading.local()
_num_exchanging = 0
_counting = threading.Lock()


@contextlib.contextmanager
def exchanging_callbacks(exchange: Callable[[Any], Any]) -> Iterator[None]:
    """Let what `torch.compile` returned intercept frames by `exchange(callback)`, when this thread calls it meanwhile.

    Each such call puts the callback of its `torch.compile` in place, and asks the stance for it: the one moment that
    they all pass. While no thread is in such a block, torch is as it was.
    """
    before = getattr(_exchanges, "current", None)
    _exchanges.current = exchange
    _count_exchanging(1)
    try:
        yield
    finally:
        _count_exchanging(-1)
        _exchanges.current = before


def _count_exchanging(change: int) -> None:
    global _num_exchanging
    with _counting:
        _num_exchanging += change
        torch._dynamo.eval_frame._callback_from_stance = _exchanged if _num_exchanging else _stance_of


def _exchanged(callback: Any) -> Any:
    exchange = getattr(_exchanges, "current", None)
    return _stance_of(callback if exchange is None else exchange(callback))


def captures_frames(callback: Any) -> bool:
    """Whether a callback has frames compiled: it may also forbid that, or export."""
    return isinstance(callback, CatchErrorsWrapper) and not getattr(wrapped_callback(callback), "_export", False)


def with_backend(callback: CatchErrorsWrapper, backend: Callable[..., Any], *, one_graph: bool) -> CatchErrorsWrapper:
    """Return a callback that does what `callback` does with another backend; with `one_graph` for `fullgraph=True`."""
    convert: Any = wrapped_callback(callback)
    if one_graph:
        clone: Any = convert_frame_assert(backend, one_graph=True, recompile_limit=convert._recompile_limit)
    else:
        clone = convert._clone_with_backend(backend)
    return CatchErrorsWrapper(clone, callback.hooks)


def wants_one_graph(callback: Any) -> bool:
    """Whether this layer around a backend was made for `fullgraph=True`."""
    return bool(getattr(callback, "_one_graph", False))


def wrapped_callback(callback: Any) -> Any:
    """Return what this layer is wrapped around; None if it is the user's backend.

    What `torch.compile` makes of a backend's name is one itself, with the name; and it may be given to `torch.compile`.
    """
    backend = getattr(callback, "compiler_fn", None)
    found = next((getattr(callback, link) for link in _LINKS if hasattr(callback, link)), None)
    return backend if found is None and hasattr(backend, "compiler_name") else found


def optimize_ddp() -> Any:
    """Return `torch._dynamo.config.optimize_ddp`, with which users choose who averages."""
    return torch._dynamo.config.optimize_ddp


def fusion_passes() -> list[str]:
    """Return the passes for DDP that Inductor is configured with, as text."""
    import torch._inductor.config as inductor

    return [str(each) for each in inductor._fuse_ddp_communication_passes]


def inductor_compiler() -> tuple[Callable[..., Any], Callable[..., dict[str, Any]]]:
    """Return Inductor's compiler of captured graphs, and what makes settings of a function that partitions them.

    The function is given the partitioner of the settings so far, and its arguments; a text says what it depends on.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        def __init__(self, function: Callable[..., Any], identity: str) -> None:
            self._function, self._identity = function, identity

        def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **options: Any) -> Any:
            return self._function(gm, joint_inputs, **options)

        def uuid(self) -> str:
            return self._identity

        def __deepcopy__(self, memo: object) -> Partitioner:
            """Return itself: Inductor copies its settings, and what this refers to is one process group's."""
            return self

    def partitioned_by(function: Callable[..., Any], identity: str, settings: dict[str, Any]) -> dict[str, Any]:
        before = settings.get("custom_partitioner_fn", torch._inductor.config.custom_partitioner_fn)
        name = "" if before is None else f" {before.uuid()}"
        partition = partial(function, before or min_cut_rematerialization_partition)
        return {"custom_partitioner_fn": Partitioner(partition, identity + name)}

    return compile_fx, partitioned_by


def without_autograd_cache() -> AbstractContextManager[Any]:
    """Return a block in which AOTAutograd compiles every graph itself; torch has no argument for it."""
    import torch._functorch.config as functorch

    return functorch.patch(enable_autograd_cache=False)  # type: ignore[no-any-return]


def aot_eager_arguments() -> dict[str, Any]:
    """Return the arguments of `aot_autograd` that make the backend "aot_eager"."""
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return {
        "fw_compiler": boxed_nop,
        "bw_compiler": boxed_nop,
        "partition_fn": min_cut_rematerialization_partition,
        "keep_inference_input_mutations": True,
    }


def source_of(placeholder: fx.Node) -> Any:
    """Return what Dynamo says of where an input comes from; compilers read it."""
    return getattr(placeholder, "_dynamo_source", None)


def set_source(placeholder: fx.Node, source: Any) -> None:
    """Say where an input comes from; None: from nowhere that a guard could look at."""
    placeholder._dynamo_source = source


def inherit_parameter_sources(gm: fx.GraphModule, origin: fx.GraphModule) -> None:
    """Give `gm` what Dynamo says of the parameters of `origin`."""
    if hasattr(origin, "_param_name_to_source"):
        gm._param_name_to_source = origin._param_name_to_source
