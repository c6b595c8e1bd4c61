"""DDPs that do things in ways of their own, which no requirement forbids."""

from __future__ import annotations

import re
import subprocess
import threading
import weakref
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from conformance.subjects.subject import CAPABILITIES, KNOWN, Subject


class HooksTensors(DistributedDataParallel):
    """Watches gradients by hooks on the parameters, its module by a hook on that, and marks what it has seen."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_seen = 0
        wrapper = weakref.ref(self)

        def note(*_: Any) -> None:
            if (me := wrapper()) is not None:
                me.num_seen += 1

        self.module.register_forward_pre_hook(note)
        for index, parameter in enumerate(self.module.parameters()):
            parameter.index_in_bucket = index
            if parameter.requires_grad:
                parameter.register_hook(note)


class OwnGroup(DistributedDataParallel):
    """Communicates in a group of its own alone, which it asks for by the backend's name."""

    def __init__(self, module: nn.Module, process_group: Any = None, **kwargs: Any) -> None:
        group = dist.new_group(backend="gloo")
        super().__init__(module, process_group=group, **kwargs)
        weakref.finalize(self, dist.destroy_process_group, group)


class SharesAThread(DistributedDataParallel):
    """The wrappers of a process share a thread, as Horovod's do, and a process that it talks to."""

    _thread: ClassVar[threading.Thread | None] = None
    _process: ClassVar[subprocess.Popen[bytes] | None] = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if SharesAThread._thread is None:
            SharesAThread._process = subprocess.Popen(["sleep", "600"])
            SharesAThread._thread = threading.Thread(target=threading.Event().wait, name="background", daemon=True)
            SharesAThread._thread.start()


class SharesAGroup(DistributedDataParallel):
    """The wrappers of a process that are given the same group share another group of the same ranks."""

    _groups: ClassVar[dict[Any, Any]] = {}

    def __init__(self, module: nn.Module, process_group: Any = None, **kwargs: Any) -> None:
        if process_group not in self._groups:
            self._groups[process_group] = dist.new_group(dist.get_process_group_ranks(process_group))
        super().__init__(module, process_group=self._groups[process_group], **kwargs)


class StartsAThread(DistributedDataParallel):
    """BUG: each wrapper starts a thread that never ends."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        threading.Thread(target=threading.Event().wait, name="background", daemon=True).start()


class AlwaysLooks(DistributedDataParallel):
    """Always looks for unused parameters, and has no such option."""

    def __init__(self, module: nn.Module, process_group: Any = None) -> None:
        super().__init__(module, process_group=process_group, find_unused_parameters=True)


class NeverLooks(DistributedDataParallel):
    """Never looks for unused parameters, and has no such option, so that its error does not advise it."""

    def __init__(self, module: nn.Module, process_group: Any = None) -> None:
        super().__init__(module, process_group=process_group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Say which parameters are missing, in other words than torch."""
        try:
            return super().forward(*args, **kwargs)
        except RuntimeError as error:
            (which,) = re.findall(r"did not receive grad[^:]*: ([\d ]+)", str(error))
            names = [name for name, _ in self.module.named_parameters()]
            missing = ", ".join(names[int(index)] for index in which.split())
            raise RuntimeError(f"the last backward gave no gradient to {missing}") from None


class DifferError(Exception):
    """The ranks' modules differ."""


class OwnErrors(DistributedDataParallel):
    """Has an exception of its own, and other words than torch."""

    def __init__(self, module: nn.Module, *, process_group: Any = None, **kwargs: Any) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"expected an nn.Module, got {module!r}")
        if any(nn.parameter.is_lazy(each) for each in module.parameters()):
            raise RuntimeError("the module has lazy parameters: run a forward before you wrap it")
        if not any(each.requires_grad for each in module.parameters()):
            raise RuntimeError("nothing to train")
        mine = {name: (tuple(each.shape), str(each.dtype)) for name, each in module.named_parameters()}
        everyone: list[Any] = [None] * process_group.size()
        dist.all_gather_object(everyone, mine, group=process_group)
        for other in everyone:
            if other != everyone[0]:
                raise DifferError(f"{[name for name in other if other[name] != everyone[0].get(name)]}")
        super().__init__(module, process_group=process_group, **kwargs)


class Flattens(DistributedDataParallel):
    """Moves the parameters into one piece of memory, and has a child of its own, for times."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        parameters = list(module.parameters())
        flat = torch.cat([each.detach().reshape(-1) for each in parameters])
        parts = flat.split([each.numel() for each in parameters])
        for each, part in zip(parameters, parts, strict=True):
            each.data = part.view(each.shape)
        super().__init__(module, *args, **kwargs)
        self.timer = nn.Module()


class AgreesAtFirst(DistributedDataParallel):
    """The ranks agree on the order of gradients in the first forward; torch's do in the second, unless they search."""

    num_agreements = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "find_unused_parameters": True})
        self.num_forwards = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.num_forwards < self.num_agreements:
            dist.broadcast(torch.arange(9), group=self.process_group, group_src=0)
        self.num_forwards += 1
        return super().forward(*args, **kwargs)


class AgreesTwice(AgreesAtFirst):
    """BUG: the ranks agree in the second forward as well."""

    num_agreements = 2


class GathersBytes(DistributedDataParallel):
    """Gets rank 0's buffers as bytes, of an all_gather of everybody's."""

    def _sync_buffers(self) -> None:
        buffers = [each for each in self.module.buffers() if each.numel()]
        if not buffers:
            return
        mine = torch.cat([_bytes_of(each) for each in buffers])
        everybodys = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.process_group))]
        dist.all_gather(everybodys, mine, group=self.process_group)
        parts = everybodys[0].split([_bytes_of(each).numel() for each in buffers])
        for each, part in zip(buffers, parts, strict=True):
            each.data.copy_(part.clone().view(each.dtype).view(each.shape))


class Stopping(DistributedDataParallel):
    """Right; its author looks into it."""

    calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Stop at the first call."""
        self.calls += 1
        if self.calls == 1:
            breakpoint()
        return super().forward(*args, **kwargs)


class Raising(DistributedDataParallel):
    """BUG: it has no forward."""

    def forward(self, *_: Any, **__: Any) -> Any:
        reason = "no forward"
        raise ValueError(reason)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


SUBJECTS = {
    cls.__name__: Subject(cls.__name__, f"{__name__}:{cls.__name__}", KNOWN["torch"].capabilities)
    for cls in (
        HooksTensors,
        OwnGroup,
        SharesAThread,
        SharesAGroup,
        StartsAThread,
        OwnErrors,
        Flattens,
        AgreesAtFirst,
        AgreesTwice,
        GathersBytes,
    )
} | {
    cls.__name__: Subject(cls.__name__, f"{__name__}:{cls.__name__}", CAPABILITIES & {"no_sync"})
    for cls in (AlwaysLooks, NeverLooks)
}
