"""Low-precision copies of parameters: made when a forward reads them, or ahead of it, and let go after the last read.

A forward tells in which order it reads parameters; the next one is expected to read them in the same order. Where it
does not, nothing is wrong: what is read is cast, once more if need be. So a copy never outlives its forward, except for
what autograd keeps of it: one kept from step to step would be stale after a write through `.data`, which nobody sees.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ddp_impl.base.tensor_parallel import local_tensor

#: What is cast together beside the computation, in bytes of copies; at most two batches are ahead of it.
BATCH_BYTES = 8 * 1024 * 1024


class Casts:
    """Copies in `dtype` of the parameters that one module reads; in the graph where forward runs `with_gradients`."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Cast nothing yet."""
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
        """Return the copy of `parameter`, or of a tensor that stands in for one in this forward.

        It is one tensor for all reads, if this forward is like the one before it.
        """
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
    """Whether work on `device` can be put on streams."""
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
