"""Comm hooks, for gradients and for buffers: checking, binding and calling what users register."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from ddp_impl.base.errors import CommunicationError
from ddp_impl.buckets.bucket import GradBucket
from ddp_impl.torch_internals.distributed import BuiltinCommHookType
from ddp_impl.torch_internals.distributed import GradBucket as TorchGradBucket
from ddp_impl.torch_internals.tensors import keeping_versions
from ddp_impl.wire import collectives
from ddp_impl.wire.collectives import size_of

#: The module of torch's hooks that wait for collectives in the callback of another. It is not imported: it needs NumPy.
_WAITS_IN_CALLBACKS = "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook"
#: What those hooks of torch's cast gradients to that sum them over the group which is their state, or the default one.
#: Nothing else is in their futures, and a graph can do the same.
_WIRE_DTYPES = {
    default_hooks.allreduce_hook: None,
    default_hooks.fp16_compress_hook: torch.float16,
    default_hooks.bf16_compress_hook: torch.bfloat16,
}
_BUILTIN_WIRE_DTYPES = {BuiltinCommHookType.ALLREDUCE: None, BuiltinCommHookType.FP16_COMPRESS: torch.float16}


@dataclass(frozen=True, slots=True)
class BoundHook:
    """What the reducer calls for each full bucket. `group`: whose ranks have all called it at its end, if known."""

    call: Callable[[GradBucket], Any]
    group: Callable[[], dist.ProcessGroup | None] = lambda: None


class BufferHookLocation(Enum):
    """When a buffer hook runs; the names are torch's."""

    PRE_FORWARD = auto()
    POST_FORWARD = auto()


@dataclass(frozen=True, slots=True)
class BufferHook:
    """A user's function in place of the broadcast of buffers; backward waits for the futures that it returns."""

    hook: Callable[[Any, Mapping[str, Tensor]], Any]
    state: Any
    location: BufferHookLocation

    def run(self, buffers: Mapping[str, Tensor]) -> Iterable[Any]:
        """Call the hook and return its futures; a backward uses the new values, as after a broadcast."""
        with torch.no_grad(), keeping_versions(buffers.values()):
            return self.hook(self.state, buffers) or ()


def bind_hook(state: Any, hook: Any) -> BoundHook:
    """Return `hook` bound to `state`; raises `TypeError` for other arguments, `ValueError` for other annotations."""
    if not callable(hook):
        raise TypeError(f"Communication hook must be callable; got {type(hook).__name__}")
    try:
        signature = inspect.signature(hook)
    except ValueError:  # built in C: nothing can be known
        return BoundHook(lambda bucket: hook(state, bucket))
    if _waits_in_callbacks(hook, state):
        hook = _OneBucketAtATime(hook)
    try:
        bound = signature.bind(state, None)
    except TypeError as error:
        raise TypeError(f"a comm hook is called as hook(state, bucket), but {hook!r} cannot be: {error}") from error
    bucket_name = list(bound.arguments)[1] if len(bound.arguments) > 1 else None
    annotation = signature.parameters[bucket_name].annotation if bucket_name else inspect.Parameter.empty
    if not _names_one_of(annotation, inspect.Parameter.empty, TorchGradBucket, GradBucket):
        raise ValueError(f"Communication hook: bucket annotation should be TorchGradBucket, not {annotation!r}")
    if not _names_one_of(signature.return_annotation, inspect.Signature.empty, Future[Tensor], Future):
        raise ValueError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor], not "
            f"{signature.return_annotation!r}"
        )
    if any(hook is known for known in _WIRE_DTYPES):
        return BoundHook(lambda bucket: hook(state, bucket), lambda: state or dist.group.WORLD)
    return BoundHook(lambda bucket: hook(state, bucket))


def _waits_in_callbacks(*given: Any) -> bool:
    """Whether torch's PowerSGD is among a hook and its state, or within the functions that they wrap."""
    seen, waiting = set[int](), list(given)
    while waiting:
        one = waiting.pop()
        is_function = inspect.isfunction(one)
        if (one if is_function else type(one)).__module__ == _WAITS_IN_CALLBACKS:
            return True
        if id(one) in seen:
            continue
        seen.add(id(one))
        if is_function:
            waiting += _closed_over(one)
        elif isinstance(one, functools.partial):
            waiting += [one.func, *one.args]
        elif inspect.ismethod(one):
            waiting.append(one.__func__)
    return False


def _closed_over(function: Any) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a variable may get its value later
            yield cell.cell_contents


class _OneBucketAtATime:
    """Calls a hook on a CPU when it is done with the bucket before: gloo has two threads, which may both wait."""

    def __init__(self, hook: Any) -> None:
        self._hook = hook
        self._before: Any = None

    def __call__(self, state: Any, bucket: GradBucket) -> Any:
        if self._before is not None and bucket.index() > 0 and bucket.buffer().device.type == "cpu":
            # Whoever consumes that future raises what it holds.
            with contextlib.suppress(Exception):
                self._before.wait()
        future = self._hook(state, bucket)
        self._before = None if bucket.is_last() else future
        return future


def builtin_hook(kind: Any, group: Callable[[], dist.ProcessGroup]) -> BoundHook | None:
    """Return the hook for a `dist.BuiltinCommHookType`, over `group()` in each call; None for the all-reduce."""
    if kind == BuiltinCommHookType.ALLREDUCE:
        return None
    if kind == BuiltinCommHookType.FP16_COMPRESS:
        return BoundHook(lambda bucket: Compressed(torch.float16, bucket.buffer(), group()), group)
    raise ValueError(f"unknown built-in comm hook {kind!r}; known: ALLREDUCE, FP16_COMPRESS")


@dataclass(frozen=True, slots=True)
class WireFormat:
    """What gradients are cast to while they travel; None for their own dtype."""

    dtype: torch.dtype | None = None


def wire_format(registered: tuple[Any, Any] | None, group: dist.ProcessGroup) -> WireFormat | None:
    """Return what a graph does in place of the hook that was `registered` as (state, hook); None if it cannot."""
    if registered is None:
        return WireFormat()
    state, hook = registered
    if hook is None:
        return WireFormat(_BUILTIN_WIRE_DTYPES[state]) if state in _BUILTIN_WIRE_DTYPES else None
    if hook in _WIRE_DTYPES and (state is None or state is group):
        return WireFormat(_WIRE_DTYPES[hook])
    return None


def call_hook(hook: BoundHook, bucket: GradBucket, here: str) -> Any:
    """Let `hook` reduce `bucket`; raises `RuntimeError`, beginning with `here`, if it returns no future."""
    future = hook.call(bucket)
    if not hasattr(future, "wait"):
        raise RuntimeError(
            f"{here} a comm hook must return a torch.futures.Future of the reduced buffer, but for bucket "
            f"{bucket.index()} it returned {type(future).__name__}. Expected an object of type torch.futures.Future"
        )
    return future


def tensor_in(result: Any, buffer: Tensor, here: str) -> Tensor:
    """Return the tensor of a hook's future, to replace `buffer`; raises `CommunicationError` if that does not fit."""
    if isinstance(result, (list, tuple)) and len(result) == 1:
        result = result[0]
    if not isinstance(result, Tensor):
        raise CommunicationError(
            f"{here} a comm hook's future must hold the reduced tensor, but it held {type(result).__name__}"
        )
    if buffer.is_complex() and result.dtype is buffer.dtype.to_real() and result.numel() == 2 * buffer.numel():
        return torch.view_as_complex(result.reshape(-1, 2))  # torch's collectives leave this in their futures
    fits = result.shape == buffer.shape if buffer.is_sparse else result.numel() == buffer.numel()
    if not fits or result.is_sparse != buffer.is_sparse or not torch.can_cast(result.dtype, buffer.dtype):
        raise CommunicationError(
            f"{here} a comm hook's future must hold the reduced tensor, which is {_described(buffer)}, but it held "
            f"{_described(result)}"
        )
    return result


class Compressed:
    """A sum over `group` of `buffer` divided by its size, on its way in `dtype`."""

    def __init__(self, dtype: torch.dtype, buffer: Tensor, group: dist.ProcessGroup) -> None:
        self._buffer = buffer
        # Divided before it is summed: the sum of finite gradients must not overflow (pytorch/pytorch#59522).
        self._compressed = buffer.to(dtype).div_(size_of(group))
        self._work = collectives.all_reduce_sum(self._compressed, group)

    def wait(self) -> Tensor:
        """Return the buffer, which holds the average now; raises what `collectives.finished` raises."""
        collectives.finished(self._work, "all_reduce", [self._compressed])
        return self._buffer.copy_(self._compressed)


def _described(tensor: Tensor) -> str:
    layout = "sparse" if tensor.is_sparse else "dense"
    return f"{layout}, of shape {list(tensor.shape)} and {tensor.dtype}"


def _names_one_of(annotation: Any, *allowed: Any) -> bool:
    """Whether an annotation is one of `allowed`; a postponed one is a string, compared by its last word."""
    if isinstance(annotation, str):
        words = {str(getattr(item, "__name__", item)).rsplit(".", 1)[-1] for item in allowed}
        return annotation.split("[", 1)[0].rsplit(".", 1)[-1] in words
    return annotation in allowed
