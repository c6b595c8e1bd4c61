"""Computing and reducing in a lower precision than the one parameters are kept in (pytorch/pytorch#92882).

Parameters stay in full precision. While the module runs, it sees casts of them where it reads them (`Casts`), which are
part of the autograd graph: gradients arrive in full precision through the ordinary hooks, so every other feature works
unchanged. They travel in `reduce_dtype`: buckets are allocated in it, and copying in and out casts.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ddp_impl.base.nested_tensors import cast, local_tensor
from ddp_impl.module.parameter_swap import ParameterSwap
from ddp_impl.torch_internals.autograd import in_backward
from ddp_impl.torch_internals.tensors import drop_forward_hooks


@dataclass(frozen=True)
class MixedPrecision:
    """What is cast to what; None leaves it as it is.

    `param_dtype`: parameters and inputs during forward and backward. `reduce_dtype`: gradients in collectives;
    `param_dtype` if None. `buffer_dtype`: floating-point buffers, for good, at construction. `cast_forward_inputs`:
    whether inputs of the wrapper are cast to `param_dtype`. Modules of `full_precision_modules` (say
    `nn.BatchNorm2d`) compute in full precision with all modules in them: their inputs are cast up and their outputs
    down again. So do embeddings with sparse gradients. Complex gradients are never reduced in another dtype.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    full_precision_modules: tuple[type[nn.Module], ...] = ()

    @staticmethod
    def of(config: Any) -> MixedPrecision:
        """Read our own, torch's `_MixedPrecision` or FSDP's `MixedPrecision`.

        Raises `TypeError` for anything else and for integer dtypes, `ValueError` for an option set that has no meaning
        here.
        """
        if isinstance(config, MixedPrecision):
            checked = config
        else:
            try:
                checked = MixedPrecision(
                    config.param_dtype,
                    config.reduce_dtype,
                    config.buffer_dtype,
                    _first_of(config, "cast_root_forward_inputs", "cast_forward_inputs", default=True),
                    tuple(_first_of(config, "full_precision_modules", "_module_classes_to_ignore", default=())),
                )
            except AttributeError:
                raise TypeError(
                    "mixed_precision must have param_dtype, reduce_dtype and buffer_dtype (ddp_impl.MixedPrecision or "
                    f"torch's _MixedPrecision); got {type(config).__name__}"
                ) from None
            refuse_other_options(config)
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            dtype = getattr(checked, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise TypeError(f"mixed_precision.{name} must be a floating-point torch.dtype or None; got {dtype!r}")
        return checked

    def check_can_cast(self, module: nn.Module) -> None:
        """Raise `ValueError` where casts reach nothing: a bare list of parameters (replicate()), a scripted module."""
        if self.param_dtype is None:
            return
        if type(module) is nn.ParameterList:
            raise ValueError(
                f"mixed_precision.param_dtype={self.param_dtype}: parameters are cast while DistributedDataParallel "
                "runs their module; got a ParameterList, as replicate() makes it, whose owner would compute in full "
                "precision. Wrap the module itself, or give reduce_dtype alone"
            )
        for name, part in module.named_modules():
            if isinstance(part, torch.jit.ScriptModule):
                raise ValueError(
                    f"mixed_precision.param_dtype={self.param_dtype}: parameters are cast where Python reads them, and "
                    f"module '{name}' is a {type(part).__name__} of torch.jit, which reads them by itself. Wrap the "
                    "module that was scripted, or give reduce_dtype alone"
                )

    @property
    def communication_dtype(self) -> torch.dtype | None:
        """The dtype in which gradients are reduced; None for that of the parameter."""
        return self.reduce_dtype or self.param_dtype


class ModuleHook:
    """A forward hook of a `PrecisionCaster` on a module. In a copy of the module it does nothing: it is not cast."""

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self.call = call

    def __call__(self, *arguments: Any) -> Any:
        """Return what the caster returns."""
        return None if self.call is None else self.call(*arguments)

    def __reduce__(self) -> Any:
        """Leave the caster out of pickles and deep copies."""
        return ModuleHook, ()


class PrecisionCaster:
    """Applies a `MixedPrecision` to one module."""

    def __init__(self, module: nn.Module, config: MixedPrecision, ignored: Collection[str]) -> None:
        """Cast buffers for good and prepare the casts of parameters; `ignored` names stay untouched."""
        self.config = config
        self._full = [part for part in module.modules() if self._stays_full(part)]
        self._within = {inner for part in self._full for inner in part.modules() if inner is not part}
        self._swap = ParameterSwap(module, ignored, lambda part: part in self._within or part in self._full)
        if config.buffer_dtype is not None:
            for name, buffer in module.named_buffers():
                if name not in ignored and buffer.is_floating_point():
                    buffer.data = buffer.to(config.buffer_dtype)
        self._casts = None if config.param_dtype is None else Casts(config.param_dtype)
        self._hooks: list[ModuleHook] = []
        self._running: list[nn.Module] = []
        self._shown = contextlib.ExitStack()
        drop_forward_hooks(module, lambda hook: isinstance(hook, ModuleHook) and hook.call is None)
        if self._casts is not None:
            self.cast_while_recomputing(module)
            self._keep_full_precision()

    @contextlib.contextmanager
    def casting(self, device: torch.device, *, at_once: bool) -> Iterator[None]:
        """Compute in `param_dtype` for one forward; `at_once` casts before it, as graphs take parameters as inputs."""
        if self._casts is None or self._swap.active:
            yield
        elif at_once:
            with self._swap.swapped(self.cast_parameter):
                yield
        else:
            with self._casts.during_forward(device), self._swap.read_through(self._casts.read):
                yield

    def let_go(self) -> None:
        """Let the hooks do nothing, when nobody needs them any more: they hold this object, which holds the module."""
        for hook in self._hooks:
            hook.call = None

    def _hook(self, call: Callable[..., Any]) -> ModuleHook:
        self._hooks.append(ModuleHook(call))
        return self._hooks[-1]

    def cast_inputs(self, value: Any) -> Any:
        """Cast every floating-point tensor in nested containers to `param_dtype`, if inputs are to be cast."""
        if self.config.param_dtype is None or not self.config.cast_forward_inputs:
            return value
        return cast(value, self.config.param_dtype)

    def cast_parameter(self, parameter: Tensor) -> Tensor:
        """Return the copy of a parameter that the module computes with."""
        return parameter.to(self.config.param_dtype) if parameter.is_floating_point() else parameter

    def cast_while_recomputing(self, module: nn.Module) -> None:
        """Show casts to the parts of `module` that checkpointing runs again in backward."""
        for part in module.modules():
            if self._swap.has_any_of(part):
                part.register_forward_pre_hook(self._hook(self._begins_to_run))
                part.register_forward_hook(self._hook(self._has_run), always_call=True)

    def _begins_to_run(self, called: nn.Module, _: Any) -> None:
        # Checkpointing runs modules again during backward, when the wrapper's forward is long over. The outermost one
        # that runs shows the casts of all within it: some are read without being called.
        if not self._running and (self._swap.active or not in_backward()):
            return
        self._running.append(called)
        if len(self._running) == 1:
            self._shown.enter_context(self._swap.read_through(_once_each(self.cast_parameter), called))

    def _has_run(self, called: nn.Module, _: Any, __: Any) -> None:
        if self._running and self._running[-1] is called:
            self._running.pop()
            if not self._running:
                self._shown.close()

    def _keep_full_precision(self) -> None:
        for owner in self._full:
            if owner not in self._within:
                owner.register_forward_pre_hook(self._hook(lambda _, inputs: self._cast_now(inputs, torch.float32)))
                owner.register_forward_hook(self._hook(lambda _, __, out: self._cast_now(out, self.config.param_dtype)))

    def _stays_full(self, owner: nn.Module) -> bool:
        # The backward of a cast cannot carry a sparse gradient; such a table gives its rows in lower precision instead.
        sparse = isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and owner.sparse
        return sparse or isinstance(owner, self.config.full_precision_modules)

    def _cast_now(self, value: Any, dtype: torch.dtype | None) -> Any:
        return cast(value, dtype) if self._swap.active or in_backward() else None


def _first_of(config: Any, *names: str, default: Any) -> Any:
    return next((getattr(config, name) for name in names if hasattr(config, name)), default)


def refuse_other_options(config: Any) -> None:
    """Raise `ValueError` if `config` asks for something that `MixedPrecision` has no word for."""
    options = {field.name for field in dataclasses.fields(MixedPrecision)}
    known = {*options, "cast_root_forward_inputs", "_module_classes_to_ignore"}
    asked = [
        f"{name}={value!r}" for name, value in getattr(config, "__dict__", {}).items() if name not in known and value
    ]
    if asked:
        raise ValueError(
            f"mixed_precision asks for {', '.join(asked)}, which DistributedDataParallel does not offer: leave it "
            f"out. Gradients have the dtype of their parameter. Options are {', '.join(sorted(options))}"
        )


def _once_each(cast: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    @cache
    def cast_once(parameter: Tensor) -> Tensor:
        with torch.enable_grad():
            return cast(parameter)

    return cast_once


#: What is cast together beside the computation, in bytes of copies; at most two batches are ahead of it.
BATCH_BYTES = 8 * 1024 * 1024


class Casts:
    """Copies in `dtype` of the parameters that one module reads; in the graph where forward runs `with_gradients`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._copies: dict[Tensor, _Copy] = {}
        self._reads: list[Tensor] = []
        self._last_reads: list[nn.Parameter | None] = []
        self._let_go_early: set[Tensor] = set()
        self._ahead: _CastsAhead | None = None
        self.with_gradients = False

    @contextlib.contextmanager
    def during_forward(self, device: torch.device) -> Iterator[None]:
        """Keep copies while the block runs, which is one forward of a module on `device`."""
        self.with_gradients = torch.is_grad_enabled()
        if self._ahead is None and _has_streams(device):
            self._ahead = _CastsAhead(self.dtype, device)
        if self._ahead is not None:
            self._ahead.start()
        try:
            yield
        finally:
            if self._ahead is not None:
                self._ahead.finish(self._reads)
            self._last_reads, self._reads = _last_reads(self._reads), []
            self._copies.clear()
            self._let_go_early.clear()

    def read(self, parameter: Tensor) -> Tensor:
        """Return the copy of a parameter or its stand-in: one for all reads, if this forward is like the one before."""
        if not parameter.is_floating_point() or parameter.dtype == self.dtype:
            return parameter
        if torch.compiler.is_compiling():  # a part of the module: the cast belongs into its graph
            return parameter.to(self.dtype)
        self._let_go_of_last()
        self._reads.append(parameter)
        copy = self._copies.get(parameter)
        if copy is None:
            copy = self._copies[parameter] = self._cast(parameter)
        if copy.batch is not None:
            copy.batch.wait(copy.tensor)
        return copy.tensor

    def _let_go_of_last(self) -> None:
        position = len(self._reads) - 1
        if not 0 <= position < len(self._last_reads):
            return
        last = self._reads[position]
        if self._last_reads[position] is last and last not in self._let_go_early:
            del self._copies[last]
            self._let_go_early.add(last)  # were it read again, it would stay

    def _cast(self, parameter: Tensor) -> _Copy:
        # Forward may read under `no_grad` first and with gradients later; both must get this tensor.
        if torch.is_grad_enabled() is not self.with_gradients:
            with torch.inference_mode(False), torch.set_grad_enabled(self.with_gradients):
                return self._cast(parameter)
        return _Copy(parameter.to(self.dtype)) if self._ahead is None else self._ahead.take(parameter)


def _has_streams(device: torch.device) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def _last_reads(reads: Sequence[Tensor]) -> list[nn.Parameter | None]:
    """Return for each read its parameter if it is not read again, else None, as for what stood in for one."""
    last = {parameter: position for position, parameter in enumerate(reads)}
    return [
        parameter if isinstance(parameter, nn.Parameter) and last[parameter] == position else None
        for position, parameter in enumerate(reads)
    ]


@dataclass(slots=True)
class _Copy:
    tensor: Tensor
    #: What the stream that reads must wait for; None on a device without streams.
    batch: Batch | None = None


@dataclass(slots=True)
class Batch:
    """Copies that were launched together; `done` is recorded behind the last one."""

    done: torch.Event
    #: The streams that are behind it.
    waited: set[torch.Stream] = field(default_factory=set)

    def wait(self, tensor: Tensor) -> None:
        """Have the current stream wait until `tensor`, one of the copies, is there."""
        stream = torch.accelerator.current_stream(tensor.device)
        if stream not in self.waited:
            stream.wait_event(self.done)
            self.waited.add(stream)
        local_tensor(tensor).record_stream(stream)


class _CastsAhead:
    """Launches casts on a stream of its own, in batches, in the order in which the last forward read parameters."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._stream = torch.Stream(device)
        self._batches: list[list[nn.Parameter]] = []
        self._batch_of: dict[Tensor, int] = {}
        self._launched: set[int] = set()
        self._ready: dict[Tensor, _Copy] = {}

    def start(self) -> None:
        """Launch the first batch, behind what the current stream has written to parameters."""
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        self._launch(0)

    def take(self, parameter: Tensor) -> _Copy:
        """Return a copy that is in the graph, and launch the batch behind its own."""
        if parameter in self._batch_of:
            self._launch(self._batch_of[parameter] + 1)
        copy = self._ready.pop(parameter, None)
        if copy is None:
            tensor = parameter.to(self._dtype)
            stream = torch.accelerator.current_stream(parameter.device)
            return _Copy(tensor, Batch(stream.record_event(), {stream}))
        if parameter.requires_grad and torch.is_grad_enabled():
            copy.tensor = _InGraph.apply(parameter, [copy.tensor])
        return copy

    def finish(self, reads: Sequence[Tensor]) -> None:
        """Make the current stream, which will write parameters, wait for what was cast and not read; learn `reads`."""
        torch.accelerator.current_stream(self._device).wait_stream(self._stream)
        self._ready.clear()
        self._launched.clear()
        kept = (one for one in dict.fromkeys(reads) if isinstance(one, nn.Parameter))
        here = [parameter for parameter in kept if parameter.device == self._device]
        self._batches = _batches(here, self._dtype.itemsize)
        self._batch_of = {parameter: index for index, batch in enumerate(self._batches) for parameter in batch}

    def _launch(self, index: int) -> None:
        if index in self._launched or index >= len(self._batches):
            return
        self._launched.add(index)
        with torch.no_grad(), self._stream:
            tensors = [parameter.to(self._dtype) for parameter in self._batches[index]]
        batch = Batch(self._stream.record_event())
        for parameter, tensor in zip(self._batches[index], tensors, strict=True):
            self._ready[parameter] = _Copy(tensor, batch)


def _batches(parameters: Sequence[nn.Parameter], itemsize: int) -> list[list[nn.Parameter]]:
    batches: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        needed = local_tensor(parameter).numel() * itemsize
        if needed > room or not batches:
            batches.append([])
            room = BATCH_BYTES
        batches[-1].append(parameter)
        room -= needed
    return batches


class _InGraph(torch.autograd.Function):
    """Gives a copy, made elsewhere, the gradient function of a cast. The cast's own would run beside backward."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, copy: list[Tensor]) -> Tensor:
        """Return the only element of `copy`."""
        ctx.dtype = parameter.dtype
        return copy.pop()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient in the parameter's dtype."""
        return gradients[0].to(ctx.dtype), None
