"""What `torch.compile` intercepts, captures and hands to compilers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ddp_impl.torch_internals.names import COMPILE, needed_for, required

# Without one of these nothing is compiled, and all else works.
AotAutograd = needed_for(COMPILE, "torch._dynamo.backends.common.AotAutograd")
aot_autograd = needed_for(COMPILE, "torch._dynamo.backends.common.aot_autograd")
_CatchErrorsWrapper = needed_for(COMPILE, "torch._dynamo.convert_frame.CatchErrorsWrapper")
_convert_frame_assert = needed_for(COMPILE, "torch._dynamo.convert_frame.convert_frame_assert")
skip: Callable[[Callable[..., Any]], Callable[..., Any]] = needed_for(
    COMPILE, "torch._dynamo.decorators.skip", instead=torch.compiler.disable
)
_OptimizedModule = needed_for(COMPILE, "torch._dynamo.eval_frame.OptimizedModule")
Unsupported = needed_for(COMPILE, "torch._dynamo.exc.Unsupported")
default_partition = needed_for(COMPILE, "torch._functorch.partitioners.default_partition")
TracingContext = needed_for(COMPILE, "torch._guards.TracingContext")
detect_fake_mode = needed_for(COMPILE, "torch._guards.detect_fake_mode")
tracing = needed_for(COMPILE, "torch._guards.tracing")
getArtifactLogger: Callable[[str, str], logging.Logger] = needed_for(  # noqa: N816
    COMPILE, "torch._logging.getArtifactLogger", instead=lambda module, artifact: logging.getLogger(module)
)
trace_structured = needed_for(COMPILE, "torch._logging.trace_structured")

__all__ = ["FakeTensor", "FakeTensorMode"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_frames = torch._C._dynamo.eval_frame
_AS_IT_IS = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)


def keep_out_of_graphs(function: _Function) -> _Function:
    """Let `function`, which C++ calls, run as it is under `torch.compile`; `disable` costs microseconds a call."""
    _frames.set_code_exec_strategy(function.__code__, _AS_IT_IS)
    return function


#: Has Dynamo, where it traces this call, end its graph; what made the call runs as it is.
break_graph: Callable[..., None] = torch._dynamo.graph_break
#: What intercepts the frames of this thread: None when nothing is being compiled. A C function: asking costs a few ns
#: in every forward, and is no frame that could itself be intercepted.
frame_callback: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback

#: Calls after which Dynamo has changed a setting of the thread; they compute no value.
GLOBAL_STATE = (
    needed_for(COMPILE, "torch.amp.autocast_mode._enter_autocast"),
    needed_for(COMPILE, "torch.amp.autocast_mode._exit_autocast"),
    needed_for(COMPILE, "torch._C._set_grad_enabled"),
)

# Dynamo wraps the user's backend in layers; each refers to the next by one of these attributes, which differ between
# versions of torch.
_LINKS = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable")


def is_compiled(module: nn.Module) -> bool:
    """Whether calling `module` runs what `torch.compile` made of it, of its `forward`, or its `compile()`."""
    call, forward = module._compiled_call_impl, getattr(module, "forward", None)
    return isinstance(module, _OptimizedModule) or call is not None or hasattr(forward, "_torchdynamo_orig_callable")


_stance_of = needed_for(COMPILE, "torch._dynamo.eval_frame._callback_from_stance")
_exchanges = threading.local()
_num_exchanging = 0
_counting = threading.Lock()


class exchanging_callbacks:  # noqa: N801  # like a function that makes a block; a class costs a forward less
    """Have compiled functions that this thread calls intercept frames by `exchange(callback)`; then call `is_over`.

    Each such call asks the stance for its callback: the one moment that they all pass.
    """

    __slots__ = ("_before", "_exchange", "_is_over")

    def __init__(self, exchange: Callable[[Any], Any], is_over: Callable[[], None]) -> None:
        self._exchange, self._is_over = exchange, is_over

    def __enter__(self) -> None:
        global _num_exchanging
        self._before = getattr(_exchanges, "current", None)
        _exchanges.current = self._exchange
        with _counting:
            _num_exchanging += 1
            torch._dynamo.eval_frame._callback_from_stance = _exchanged

    def __exit__(self, *_: object) -> None:
        global _num_exchanging
        with _counting:
            _num_exchanging -= 1
            if not _num_exchanging:
                torch._dynamo.eval_frame._callback_from_stance = _stance_of
        _exchanges.current = self._before
        self._is_over()


def _exchanged(callback: Any) -> Any:
    exchange = getattr(_exchanges, "current", None)
    return _stance_of(callback if exchange is None else exchange(callback))


def captures_frames(callback: Any) -> bool:
    """Whether a callback has frames compiled: it may also forbid that, or export."""
    return isinstance(callback, _CatchErrorsWrapper) and not getattr(wrapped_callback(callback), "_export", False)


def with_backend(callback: Any, backend: Callable[..., Any], *, one_graph: bool) -> Any:
    """Return a callback that does what `callback` does with another backend; with `one_graph` for `fullgraph=True`."""
    convert: Any = wrapped_callback(callback)
    if one_graph:
        clone: Any = _convert_frame_assert(backend, one_graph=True, recompile_limit=convert._recompile_limit)
    else:
        clone = convert._clone_with_backend(backend)
    return _CatchErrorsWrapper(clone, callback.hooks)


def wants_one_graph(callback: Any) -> bool:
    """Whether this layer around a backend was made for `fullgraph=True`."""
    return bool(getattr(callback, "_one_graph", False))


def wrapped_callback(callback: Any) -> Any:
    """Return what this layer is wrapped around; None if it is the user's backend."""
    backend = getattr(callback, "compiler_fn", None)
    found = next((getattr(callback, link) for link in _LINKS if hasattr(callback, link)), None)
    return backend if found is None and hasattr(backend, "compiler_name") else found


def optimize_ddp() -> Any:
    """Return `torch._dynamo.config.optimize_ddp`, with which users choose who averages."""
    return required(COMPILE, "torch._dynamo.config.optimize_ddp")


def fusion_passes() -> list[str]:
    """Return the passes for DDP that Inductor is configured with, as text."""
    return [str(each) for each in required(COMPILE, "torch._inductor.config._fuse_ddp_communication_passes")]


def inductor_compiler() -> tuple[Callable[..., Any], Callable[..., dict[str, Any]]]:
    """Return Inductor's compiler of captured graphs, and what makes settings of a function that partitions them.

    The function is given the partitioner of the settings so far, and its arguments; a text says what it depends on.
    """
    compile_fx = required(COMPILE, "torch._inductor.compile_fx.compile_fx")
    base: Any = required(COMPILE, "torch._inductor.custom_graph_pass.CustomPartitionerFn")
    required(COMPILE, "torch._inductor.config.custom_partitioner_fn")

    class Partitioner(base):  # type: ignore[misc]  # looked up by its name
        def __init__(self, function: Callable[..., Any], identity: str) -> None:
            self._function, self._identity = function, identity

        def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **options: Any) -> Any:
            return self._function(gm, joint_inputs, **options)

        def uuid(self) -> str:
            return self._identity

        def __deepcopy__(self, memo: object) -> Partitioner:
            """Return itself: Inductor copies its settings, and what this refers to is one process group's."""
            return self

        def __reduce__(self) -> tuple[type[str], tuple[str]]:
            """Pickle its identity: Inductor pickles settings only to look up in its cache what it has compiled."""
            return str, (self._identity,)

    def partitioned_by(function: Callable[..., Any], identity: str, settings: dict[str, Any]) -> dict[str, Any]:
        before = settings.get("custom_partitioner_fn", torch._inductor.config.custom_partitioner_fn)
        name = "" if before is None else f" {before.uuid()}"
        partition = partial(function, before or _min_cut())
        return {"custom_partitioner_fn": Partitioner(partition, identity + name)}

    return compile_fx, partitioned_by


def _min_cut() -> Callable[..., Any]:
    return required(COMPILE, "torch._functorch.partitioners.min_cut_rematerialization_partition")


def without_autograd_cache() -> AbstractContextManager[Any]:
    """Return a block in which AOTAutograd compiles every graph itself; torch has no argument for it."""
    import torch._functorch.config as functorch

    return functorch.patch(enable_autograd_cache=False)


def aot_eager_arguments() -> dict[str, Any]:
    """Return the arguments of `aot_autograd` that make the backend "aot_eager"."""
    boxed_nop = required(COMPILE, "torch._dynamo.backends.debugging.boxed_nop")
    return {
        "fw_compiler": boxed_nop,
        "bw_compiler": boxed_nop,
        "partition_fn": _min_cut(),
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
