"""A DDP as it would be if it ignored one of its options, as a subject: what tells whether it does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from conformance.subjects.subject import Subject, load

if TYPE_CHECKING:
    from torch import nn

#: Between the option and the target in the attribute of this module that such a DDP is; a dot would divide it.
_BETWEEN, _DOT = " of ", "/"


def without_option(subject: Subject, option: str) -> Subject:
    """Return the subject whose constructor does not pass `option` on, and which is else `subject`."""
    attribute = f"{option}{_BETWEEN}{subject.target.replace('.', _DOT)}"
    return replace(subject, target=f"{__name__}:{attribute}", source="")


def __getattr__(name: str) -> Callable[..., nn.Module]:
    option, between, target = name.partition(_BETWEEN)
    if not between:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return functools.partial(_construct, load(Subject(name, target.replace(_DOT, "."))), option)


def _construct(ddp: Callable[..., nn.Module], ignored: str, module: nn.Module, **options: Any) -> nn.Module:
    options.pop(ignored, None)
    return ddp(module, **options)
