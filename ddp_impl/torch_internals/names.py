"""Looks up private names of torch; one that is missing takes a feature away, and says which."""

from __future__ import annotations

import importlib
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, Never

import torch

#: Features that names are needed for.
COMPILE, TRANSFORMS, PROFILER = "torch.compile", "function transforms", "events shown to profilers"
OWN_STEPS, DISTRIBUTED_AUTOGRAD = "_apply_optimizer_in_backward", "torch.distributed.autograd"


def _look_up(name: str) -> Any:
    """Return what `name` stands for, importing the modules in it; raises `AttributeError` if there is no such thing."""
    found: Any = torch
    path = "torch"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        if not hasattr(found, part):
            try:
                importlib.import_module(path)
            except Exception as error:  # torch's own modules lack the name, too, or something else that they import
                raise AttributeError(f"torch {torch.__version__} has no {name}") from error
        found = getattr(found, part)
    return found


def is_there(name: str) -> bool:
    """Whether the installed torch has `name`."""
    try:
        _look_up(name)
    except AttributeError:
        return False
    return True


def needed() -> Mapping[str, Sequence[str]]:
    """Return all names by the feature that needs them, of which "averaging" is all of ddp_impl."""
    return tomllib.loads((resources.files(__package__) / "names.toml").read_text(encoding="utf-8"))


def explain_missing(error: Exception | None) -> None:
    """Raise `ImportError` from `error` if torch lacks a name without which nothing works, or not for long."""
    if missing := [name for name in needed()["averaging"] if not is_there(name)]:
        raise ImportError(
            f"ddp_impl does not work with torch {torch.__version__}, which has no {', '.join(missing)}: install another"
            " version of torch (docs/torch_versions.md says which were tested), or a newer ddp_impl"
        ) from error


def required(feature: str, name: str) -> Any:
    """Return what `name` stands for, where `feature` is used; raises `NotImplementedError` if torch has none."""
    try:
        return _look_up(name)
    except AttributeError:
        raise NotImplementedError(_absence(feature, name)) from None


def needed_for(feature: str, name: str, *, instead: Any = None) -> Any:
    """Return what `name` stands for; if torch has none, warn, and return `instead`, or a class without use."""
    try:
        return _look_up(name)
    except AttributeError:
        warnings.warn(_absence(feature, name), RuntimeWarning, stacklevel=2)
        return instead or _Absent(name.rpartition(".")[2], (), {"_why": _absence(feature, name)})


def _absence(feature: str, name: str) -> str:
    """Return what is said where a feature is used whose name is missing."""
    return (
        f"torch {torch.__version__} has no {name}, which ddp_impl needs for {feature}. All else works as ever; use a "
        "version of torch that `python -m ddp_impl.torch_internals` finds nothing missing in"
    )


class _Absent(type):
    """The class of classes that stand for what torch lacks: nothing is an instance, and each use is an error."""

    _why: str

    def __call__(cls, *_: Any, **__: Any) -> Never:
        raise NotImplementedError(cls._why)

    def __getattr__(cls, name: str) -> Never:
        raise (AttributeError if name.startswith("__") else NotImplementedError)(cls._why)
