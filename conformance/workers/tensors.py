"""Facts as data: what MessagePack has no type for, tensors and exceptions, travels as an extension with a code.

torch's own pickling would send every tensor through shared memory, which disappears with the rank that observed it. A
fact is a few numbers, so a tensor travels as its bytes, with dtype, shape and strides.
"""

import math
from dataclasses import replace
from typing import Any

import msgspec
import torch
from msgspec.msgpack import Ext, decode, encode
from torch import Tensor

from conformance.observation import PLAIN, Facts, Observation, Raised, Unmeasured

_STRIDED, _SPARSE, _RAISED, _UNMEASURED = 1, 2, 3, 4
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class Strided(msgspec.Struct, frozen=True):
    """A dense tensor: its elements in the order of its dimensions, and the strides that it had."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    data: bytes


class Sparse(msgspec.Struct, frozen=True):
    """A tensor in coordinate format."""

    indices: Strided
    values: Strided
    shape: tuple[int, ...]
    coalesced: bool


def portable(observation: Observation) -> Observation:
    """Return the observation with facts that a `Channel` can send.

    Raises:
        TypeError: a fact is neither a tensor on the CPU nor `Raised` nor `Unmeasured` nor JSON data.

    """
    return replace(observation, facts=portable_facts(observation.facts))


def portable_facts(facts: Facts) -> dict[str, Any]:
    """Return the facts as `portable` does."""
    return {name: _data(value) for name, value in facts.items()}


def from_extension(code: int, data: memoryview) -> Tensor | Raised | Unmeasured:
    """Return the tensor, exception or `Unmeasured` of an extension; raises `ValueError` for data that describe none."""
    if code == _STRIDED:
        return _dense(decode(data, type=Strided))
    if code == _RAISED:
        return decode(data, type=Raised)
    if code == _UNMEASURED:
        return decode(data, type=Unmeasured)
    if code != _SPARSE:
        raise ValueError(f"unknown extension {code}")
    one = decode(data, type=Sparse)
    return torch.sparse_coo_tensor(
        _dense(one.indices), _dense(one.values), one.shape, is_coalesced=one.coalesced, check_invariants=True
    )


def _data(value: Any) -> Any:
    if type(value) in PLAIN:  # as nearly all are: facts may be trees of thousands
        return value
    if isinstance(value, Tensor):
        return _extension(value)
    if isinstance(value, Raised):
        return Ext(_RAISED, encode(value))
    if isinstance(value, Unmeasured):
        return Ext(_UNMEASURED, encode(value))
    if isinstance(value, (list, tuple)):
        return list(value) if PLAIN.issuperset(map(type, value)) else [_data(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _data(item) for key, item in value.items()}
    for plain in (bool, int, float, str):
        if isinstance(value, plain):
            return plain(value)  # a number of NumPy is a float too, but no data
    raise TypeError(f"facts are tensors, Raised, Unmeasured or JSON data, got {type(value).__name__}")


def _extension(tensor: Tensor) -> Ext:
    if type(tensor) is Tensor and tensor.device.type == "cpu" and not tensor.is_quantized:
        if tensor.layout is torch.strided:
            return Ext(_STRIDED, encode(_strided(tensor)))
        if tensor.layout is torch.sparse_coo:
            sparse = tensor.detach()
            indices, values = _strided(sparse._indices()), _strided(sparse._values())
            return Ext(_SPARSE, encode(Sparse(indices, values, tuple(sparse.shape), sparse.is_coalesced())))
    raise TypeError(f"a tensor that is a fact is dense or sparse and on the CPU, got {type(tensor).__name__}")


def _strided(tensor: Tensor) -> Strided:
    dense = tensor.detach().resolve_conj().resolve_neg()
    data = dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
    stride = torch.empty_like(dense).stride()  # the tensor's own, unless its elements overlap or have gaps
    return Strided(str(dense.dtype), tuple(dense.shape), stride, data)


def _dense(one: Strided) -> Tensor:
    dtype = _DTYPES[one.dtype]
    num_elements = math.prod(one.shape)
    extents = [(extent - 1) * stride for extent, stride in zip(one.shape, one.stride, strict=True)]
    if min((*one.shape, *one.stride), default=0) < 0 or num_elements * dtype.itemsize != len(one.data):
        raise ValueError(f"{len(one.data)} bytes are no {one.dtype} of shape {one.shape}")
    if num_elements and sum(extents) + 1 != num_elements:  # else a few bytes could ask for all memory
        raise ValueError(f"strides {one.stride} leave gaps in a tensor of shape {one.shape}")
    if not num_elements:
        return torch.empty(one.shape, dtype=dtype)
    values = torch.frombuffer(bytearray(one.data), dtype=dtype).view(one.shape)
    if values.stride() == one.stride:
        return values
    return torch.empty_strided(one.shape, one.stride, dtype=dtype).copy_(values)
