"""Tensors within others: in what modules take and return, wherever they are; and those that a tensor is made of.

An operation on a tensor that is made of several is one on each of them, a broadcast as many collectives with one work.
So ranks copy, and compare, the memory behind it. Of a DTensor, DDP averages this rank's local shard: ranks that hold
the same shard average it, in place. torch's way replaces parameters around each forward (pytorch/pytorch#106583).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain, compress, islice
from operator import attrgetter, is_
from types import MappingProxyType, MemberDescriptorType
from typing import Any

import torch
from torch import Tensor

from ddp_impl.torch_internals.tensors import has_operators, plain_alias

#: Types whose objects hold no tensors that forward returns.
_WITHOUT_TENSORS = (type(None), str, bytes, int, float, complex, type, torch.nn.Module)
#: At most so many things are looked at within objects that are no containers: one may refer to a whole dataset.
_MOST_IN_OBJECTS = 1000


def find_tensors(value: Any) -> list[Tensor]:
    """Return every tensor in `value`: in containers, dataclasses, owned RRefs, attributes of other objects.

    torch stops at types that it does not know (pytorch/pytorch#124666). What objects store is read without a call of
    their own code, which may compute, raise, or hand out each item once. All of a type are looked into in one step.
    """
    if type(value) is Tensor:
        return [value]
    tensors: list[Tensor] = []
    seen: dict[int, Any] = {}  # holds the objects, whose ids others could get
    objects: list[Any] = []
    _search([value], tensors, seen, sys.maxsize, objects)
    _search(objects, tensors, seen, _MOST_IN_OBJECTS)
    return tensors


def _search(
    level: list[Any], tensors: list[Tensor], seen: dict[int, Any], room: int, objects: list[Any] | None = None
) -> None:
    """Append to `tensors` those in `level` and below, by looking at `room` things; `objects` gets what is no container.

    Without `objects`, these are looked into as well.
    """
    while level:
        below: list[Any] = []
        kinds = list(dict.fromkeys(map(type, level)))
        for kind in kinds:
            if issubclass(kind, _WITHOUT_TENSORS):
                continue
            items = level if len(kinds) == 1 else list(compress(level, map(partial(is_, kind), map(type, level))))
            if issubclass(kind, Tensor):
                tensors += items
                continue
            read = _reader(kind)
            if objects is not None and read is _attributes:
                objects += items
                continue
            unseen = dict(zip(map(id, items), items, strict=True))
            if not seen.keys().isdisjoint(unseen):
                unseen = {key: item for key, item in unseen.items() if key not in seen}
            seen.update(unseen)
            contents = list(islice(chain.from_iterable(map(read, unseen.values())), room))
            room -= len(contents)
            below += contents
        level = below


def _reader(kind: type) -> Callable[[Any], Iterable[Any]]:
    """Return what reads the contents that objects of type `kind` store."""
    for container in (list, tuple, set, frozenset):
        if issubclass(kind, container):
            return container.__iter__
    if issubclass(kind, dict):
        return dict.values
    if kind is MappingProxyType:
        return MappingProxyType.values
    if dataclasses.is_dataclass(kind):
        return _stored
    return _local_value if _is_rref(kind) else _attributes


def _local_value(rref: Any) -> Iterable[Any]:
    return (rref.local_value(),) if rref.is_owner() else ()


def _attributes(item: Any) -> Iterable[Any]:
    return () if callable(item) else _stored(item)


def _stored(item: Any) -> Iterable[Any]:
    try:
        values = [*object.__getattribute__(item, "__dict__").values()]
    except AttributeError:
        values = []
    for kind in type(item).__mro__:
        for slot in vars(kind).values() if "__slots__" in vars(kind) else ():
            if type(slot) is MemberDescriptorType:
                with contextlib.suppress(AttributeError):  # it is not set
                    values.append(slot.__get__(item))
    return values


def map_tensors(
    function: Callable[[Tensor], Tensor], value: Any, copies: dict[int, tuple[Any, Any]] | None = None
) -> Any:
    """Return `value` with `function(tensor)` for every tensor in its lists, tuples, dictionaries and dataclasses.

    `copies` has, by identity, the containers that were seen with their copies: one may contain itself.
    """
    if isinstance(value, Tensor):
        return function(value)
    copies = {} if copies is None else copies
    if id(value) in copies:
        return copies[id(value)][1]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)._make(map_tensors(function, item, copies) for item in value)  # type: ignore[attr-defined]
    if isinstance(value, tuple):
        return type(value)(map_tensors(function, item, copies) for item in value)
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if not (is_record or isinstance(value, (list, dict))):
        return value
    # It may have attributes, and its constructor may take anything: it is copied, and its contents replaced.
    replaced: Any = copy.copy(value)
    copies[id(value)] = value, replaced
    if isinstance(value, list):
        replaced[:] = [map_tensors(function, item, copies) for item in value]
    elif isinstance(value, dict):
        for key, item in value.items():
            replaced[key] = map_tensors(function, item, copies)
    else:
        for field in dataclasses.fields(value):  # a frozen one, too; and `replace` would run its __init__ again
            if hasattr(value, field.name):  # what is not set stays so
                object.__setattr__(replaced, field.name, map_tensors(function, getattr(value, field.name), copies))
    return replaced


def move(value: Any, device: torch.device) -> Any:
    """Return `value` with all its tensors on `device`. Only from pinned memory, which may change, the copy blocks."""
    return map_tensors(lambda tensor: _moved(tensor, device), value)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device:
        return tensor
    try:
        may_change = tensor.is_pinned()
    except RuntimeError:  # within torch.vmap, where this cannot be asked
        may_change = True
    return tensor.to(device, non_blocking=not may_change)


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Return `value` with every floating-point tensor in its containers in `dtype`; None leaves them as they are."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


def _is_rref(kind: type) -> bool:
    if not torch.distributed.rpc.is_available():
        return False
    from torch.distributed.rpc import RRef

    return issubclass(kind, RRef)


_PLAIN = frozenset((Tensor, torch.nn.Parameter))
_LAYOUT = attrgetter("layout")
_REMEDY = (
    "name it, before wrapping, in DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names), "
    "which keeps such names in module._ddp_params_and_buffers_to_ignore"
)


def memory(kind: str, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the plain dense tensors, in order, that hold the values of these: a DTensor's shard, flattened parts.

    Raises `RuntimeError` with kind ("buffer") and name of one whose values have no known memory, as a sparse tensor's.
    """
    given = list(tensors.values())
    if _PLAIN.issuperset(map(type, given)) and {torch.strided}.issuperset(map(_LAYOUT, given)):  # in C, as mostly
        return given
    return [part for name, tensor in tensors.items() for part in _parts(f"{kind} '{name}'", tensor)]


def described(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return in words how the memory of each tensor has to be on every rank; raises as `memory` does."""
    return {name: _described(f"{kind} '{name}'", tensor) for name, tensor in tensors.items()}


def _described(name: str, tensor: Tensor) -> str:
    parts = _parts(name, tensor)
    texts = [f"{list(part.shape)} {part.dtype} on {part.device.type}" for part in parts]
    return texts[0] if len(parts) == 1 and parts[0] is tensor else f"{type(tensor).__name__} of {', '.join(texts)}"


def refuse_composite(name: str, parameter: Tensor) -> None:
    """Raise `RuntimeError` for a parameter that is made of other tensors: a bucket has one place for its gradient."""
    local = local_tensor(parameter) if is_distributed(parameter) else parameter
    if has_operators(local) and plain_alias(local) is None:
        raise RuntimeError(
            f"parameter '{name}' is a {type(local).__name__}, a tensor that is made of others, and requires a gradient "
            f"of which DistributedDataParallel could average one part only. Freeze it (requires_grad_(False)), or "
            f"{_REMEDY}"
        )


def _parts(name: str, tensor: Tensor) -> list[Tensor]:
    if is_distributed(tensor):
        return _parts(name, local_tensor(tensor))
    if type(tensor) not in _PLAIN and tensor.layout is torch.strided:
        is_composite, flatten = has_operators(tensor), getattr(tensor, "__tensor_flatten__", None)
        if is_composite and flatten is not None:
            return [part for inner in flatten()[0] for part in _parts(f"{name}.{inner}", getattr(tensor, inner))]
        alias = plain_alias(tensor)
        if alias is None and is_composite:
            raise RuntimeError(
                f"{name} is a {type(tensor).__name__}, which has no memory of its own and does not say what it is made "
                f"of (__tensor_flatten__), so that rank 0's values cannot be copied to it. Give its class that method, "
                f"or {_REMEDY}"
            )
        tensor = tensor if alias is None else alias
    if tensor.layout is not torch.strided:
        raise RuntimeError(
            f"{name} has layout {tensor.layout}, and only dense tensors can be copied from rank 0. Keep it dense "
            f"(to_dense()), take it out of the module, or {_REMEDY}"
        )
    return [tensor]


def is_distributed(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor; costs little where none is in use."""
    if type(tensor) in _PLAIN or not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, detached and sharing its storage; any other tensor detached."""
    if not is_distributed(tensor):
        return tensor.detach()
    return tensor.detach().to_local()  # type: ignore[attr-defined]


def local_gradient(parameter: Tensor) -> Tensor | None:
    """Return the gradient's local tensor, in the parameter's placement, to which autograd may have to bring it.

    Averages of partial sums would be wrong where a rank did not use the parameter. It may be a collective of the
    tensor-parallel group, on all its ranks alike.
    """
    gradient = parameter.grad
    if gradient is None or not is_distributed(parameter):
        return gradient
    if gradient.placements != parameter.placements:  # type: ignore[attr-defined]
        gradient = gradient.detach().redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
        parameter.grad = gradient
    return local_tensor(gradient)


def set_local_gradient(parameter: Tensor, local: Tensor) -> None:
    """Give `parameter` a gradient whose local shard is `local`."""
    parameter.grad = with_shard(parameter, local) if is_distributed(parameter) else local


def with_shard(like: Tensor, local: Tensor) -> Tensor:
    """Return a DTensor that is laid out as the DTensor `like` and whose local shard is `local`. Nothing is checked."""
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def describe_placement(tensor: Tensor) -> str:
    """Return how a DTensor is laid out over its mesh, and which shard this rank holds; empty for any other tensor."""
    if not is_distributed(tensor):
        return ""
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    text = f"{list(placements)} of {list(tensor.shape)} over {'x'.join(map(str, mesh.shape))} ranks"
    if all(placement.is_replicate() for placement in placements):
        return text
    return f"{text}, this rank in place {mesh.get_coordinate()} of them"
