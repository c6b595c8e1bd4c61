"""A digest of an expected fact."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from conformance.observation import Raised
from conformance.truth.expected import AnyOf, Close, Matcher


def parts(value: Any) -> Iterator[bytes]:
    """Yield the parts of `value`, an expected fact, that distinguish it from every other."""
    yield type(value).__name__.encode()
    if isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)} {value.layout}".encode()
        if value.is_sparse:
            coalesced = value.coalesce()
            yield from parts(coalesced.indices())
            yield from parts(coalesced.values())
        elif value.numel():
            yield value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Raised):
        yield f"{value.type} {value.message}".encode()
    elif isinstance(value, AnyOf):
        yield from parts(list(value.choices))
    elif isinstance(value, Close):
        yield from parts([value.value, value.rtol, value.atol])
    elif isinstance(value, Matcher):
        yield str(value).encode()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield repr(key).encode()
            yield from parts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from parts(item)
    else:
        yield repr(value).encode()


def digest(value: Any) -> str:
    """Return the SHA-256 of `value`; each part counts with its length."""
    sha = hashlib.sha256()
    for part in parts(value):
        sha.update(len(part).to_bytes(8, "big") + part)
    return sha.hexdigest()
