"""Replaces torch's DDP class by the DDP under test, in every imported module."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch.nn.parallel

Factory = Callable[..., Any]


class Constructions:
    """Counts how often a rank constructs a DDP. A test that never does so does not test it."""

    def __init__(self) -> None:
        self.count = 0


def swap_in(subject: Factory) -> Constructions:
    """Replace torch's DDP by `subject` in every imported module, until the process ends; returns a counter of its uses.

    `isinstance` checks against torch's name then check for the subject's class, also in torch's optimizers and
    compiler. The package of the subject keeps torch's class, because it may subclass it.

    Constructors ignore `device_ids` and `output_device`: the tests' modules are on the CPU (see `cpu_placement`), where
    a DDP refuses these arguments.
    """
    constructions = Constructions()
    native = torch.nn.parallel.DistributedDataParallel
    if isinstance(subject, type):
        subject.__init__ = _observed(subject.__init__, constructions, 2)  # type: ignore[misc]
    else:
        subject = _observed(subject, constructions, 1)
    own_package = subject.__module__.partition(".")[0]
    for name, module in list(sys.modules.items()):
        if subject is native or module is None or name.partition(".")[0] == own_package:
            continue
        for attribute, value in list(vars(module).items()):
            if value is native:
                setattr(module, attribute, subject)
    return constructions


def _observed(construct: Factory, constructions: Constructions, num_leading: int) -> Factory:
    """Wrap a constructor whose `num_leading` first positional arguments end with the module to wrap."""

    @functools.wraps(construct)
    def observed(*args: Any, **kwargs: Any) -> Any:
        constructions.count += 1
        devices = slice(num_leading, num_leading + 2)
        placed = [*args]
        placed[devices] = [None] * len(placed[devices])
        for name in ("device_ids", "output_device"):
            kwargs.pop(name, None)
        return construct(*placed, **kwargs)

    return observed
