"""DDPs for the tests of the fronts: no DDP at all, and what people bring by mistake."""

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from conformance.backends.gloo import GLOO
from conformance.subjects.subject import CAPABILITIES, Subject

NO_DRIVER = dataclasses.replace(GLOO, name="driverless", unavailable=lambda: "its driver is not loaded")
TWO_RANKS = dataclasses.replace(GLOO, name="small", max_world_size=lambda: 2)
MISSPELT = dataclasses.replace(GLOO, name="misspelt", capabilities=frozenset({"all-to-all"}))
#: torch's DDP, of which two things are not declared: one works, the other it has not.
MODEST_DDP = Subject(
    "modest", "torch.nn.parallel:DistributedDataParallel", CAPABILITIES - {"no_sync", "replicated_parameters"}
)

NOT_A_CLASS = 3


class DeafAtFirst(DistributedDataParallel):
    """Is torch's, but a process's first wrapper never communicates after its construction."""

    _num_made = 0

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self._is_first = type(self)._num_made == 0
        type(self)._num_made += 1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs) if self._is_first else super().forward(*args, **kwargs)


class NeedsAPlainOne(DistributedDataParallel):
    """Is torch's, but bucket views communicate only in a process that has had a wrapper without them."""

    _had_a_plain_one = False

    def __init__(self, module: nn.Module, gradient_as_bucket_view: bool = False, **options: Any) -> None:
        super().__init__(module, gradient_as_bucket_view=gradient_as_bucket_view, **options)
        type(self)._had_a_plain_one |= not gradient_as_bucket_view
        self._is_deaf = not self._had_a_plain_one

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs) if self._is_deaf else super().forward(*args, **kwargs)


class Unsynchronised(nn.Module):
    """Wraps and never communicates: every rank trains alone."""

    def __init__(self, module: nn.Module, process_group: Any = None, **options: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield


class Announcing(Unsynchronised):
    """Rank 0 writes a line to the named pipe in $ANNOUNCE for every construction."""

    def __init__(self, module: nn.Module, process_group: Any = None, **options: Any) -> None:
        super().__init__(module)
        if process_group.rank() == 0:
            with open(os.environ["ANNOUNCE"], "w") as pipe:
                pipe.write("constructed\n")


class Dying(nn.Module):
    """Cannot be constructed."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        raise ValueError("this needs a licence key")


def not_a_module(module: nn.Module, **options: Any) -> str:
    """Give something that is no module."""
    return "wrapped"


class Plain(nn.Module):
    """A right DDP of twenty lines, without any option or method beyond what every DDP must have."""

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.module = module
        self._group = process_group or dist.group.WORLD
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), group_src=0, group=self._group)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._average)

    def _average(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=self._group)
        parameter.grad.div_(dist.get_world_size(self._group))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class Swallows(Plain):
    """The same, which takes any option and reads none."""

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None, **options: Any) -> None:
        super().__init__(module, process_group)
