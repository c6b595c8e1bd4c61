"""Mutants of chapter compatibility: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

import atexit
import gc
import os
import subprocess
import threading
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from conformance.mutants.patches import Call, replaces
from ddp_impl import DistributedDataParallel as Ours
from ddp_impl.api import replicated_view
from ddp_impl.buckets.bucket import ManagedParameter
from ddp_impl.module import sync_batch_norm
from ddp_impl.reducer.iteration import Progress, Run
from ddp_impl.reducer.reducer import Reducer


class SaysNothing(Ours):
    """BUG: a public method has no docstring."""

    def undocumented(self) -> None:
        pass


@replaces(Ours, "__init__")
def KnowsNoRun(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: what a run leaves in a store bears the name that every run gives it."""
    init(*args, **kwargs)
    ddp._peers.company.run = "run"


@replaces(Reducer, "finalize")
def ReadsResults(reducer: Reducer, finalize: Call) -> None:
    """BUG: sums are read from `Work.result()`, which not every backend has."""
    for buffer, work in reducer.reduction.iteration.in_flight.values():
        if reducer.reduction.comm_hook is None:
            work.wait()
            buffer.copy_(work.result()[0])
    finalize()


@replaces(Ours, "to_kwargs")
def ArgumentsWithoutTuples(ddp: Ours, to_kwargs: Call, inputs: Any, kwargs: Any, device_id: int) -> Any:
    """BUG: `to_kwargs` gives inputs and keywords as they are, not each in a tuple of one."""
    return inputs, kwargs


@replaces(Ours, "attach_reducer")
def PreparesOnce(ddp: Ours, attach_reducer: Call, members: Sequence[ManagedParameter]) -> None:
    """BUG: preparing for backward a second time switches averaging off."""
    attach_reducer(members)
    prepare = ddp.reducer.prepare_for_backward

    def prepare_once(outputs: Any) -> None:
        now = ddp.reducer.reduction.iteration
        if now.progress is Progress.AWAITS and now.run is Run.NONE:
            ddp.reducer.remove_hooks()
        prepare(outputs)

    ddp.reducer.prepare_for_backward = prepare_once  # type: ignore[method-assign]


@replaces(Ours, "attach_reducer")
def LooksItsGroupUp(ddp: Ours, attach_reducer: Call, members: Sequence[ManagedParameter]) -> None:
    """BUG: a group is looked up among those that torch.distributed has made."""
    dist.get_rank(ddp.process_group)
    attach_reducer(members)


class RunsTheModuleItself(Ours):
    """BUG: forward calls the module, even if a subclass overrides `_run_ddp_forward`."""

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        inputs, kwargs = self._pre_forward(*inputs, **kwargs)
        return self._post_forward(self.module(*inputs, **kwargs))


@replaces(Ours, "__init__")
def LeavesHooks(ddp: Ours, init: Call, module: Any, **options: Any) -> None:
    """BUG: a hook stays on each parameter when its wrapper is gone."""
    init(module, **options)
    for parameter in filter(attrgetter("requires_grad"), module.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda _: None)


@replaces(Ours, "__init__")
def LeavesAThread(ddp: Ours, init: Call, module: Any, **options: Any) -> None:
    """BUG: each wrapper starts a thread and never ends it."""
    init(module, **options)
    threading.Thread(target=threading.Event().wait, name="monitor", daemon=True).start()


@replaces(Ours, "__init__")
def LeavesAProcess(ddp: Ours, init: Call, module: Any, **options: Any) -> None:
    """BUG: each wrapper starts a process with a session of its own and never ends it."""
    init(module, **options)
    subprocess.Popen(["sleep", "5"], start_new_session=True)


@replaces(Ours, "__init__")
def LeavesAGroup(ddp: Ours, init: Call, module: Any, process_group: Any = None, **options: Any) -> None:
    """BUG: each wrapper makes a process group and never destroys it."""
    group = process_group or dist.group.WORLD
    init(module, process_group=dist.new_group(dist.get_process_group_ranks(group)), **options)


@replaces(Ours, "__init__")
def LeavesAFile(ddp: Ours, init: Call, module: Any, **options: Any) -> None:
    """BUG: each wrapper opens a file and never closes it."""
    init(module, **options)
    os.open(__file__, os.O_RDONLY)


@replaces(Ours, "__init__")
def LeavesAnExitCallback(ddp: Ours, init: Call, module: Any, **options: Any) -> None:
    """BUG: each wrapper has Python call something when the process ends and never takes it back."""
    init(module, **options)
    atexit.register(str)


class IsRemembered(Ours):
    """BUG: a list of the class keeps what every wrapper averages."""

    _all: ClassVar[list[Sequence[ManagedParameter]]] = []

    def attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        super().attach_reducer(members)
        self._all.append(members)


@replaces(Ours, "__init__")
def IsInACycle(ddp: Ours, init: Call, /, *args: Any, **options: Any) -> None:
    """BUG: the wrapper holds itself, so that what it had stays until garbage is collected."""
    init(*args, **options)
    ddp.__dict__["_itself"] = ddp


@replaces(Ours, "__init__")
def TakesNoSubclassSeriously(ddp: Ours, init: Call, module: Any, **options: Any) -> None:
    """BUG: the constructor accepts subclasses whose overrides are never called."""
    kind = type(ddp)
    ddp.__class__ = Ours
    Ours.__init__(ddp, module, **options)
    ddp.__class__ = kind


_replicated = replicated_view.ReplicatedView.replicated


@replaces(Ours, "forward")
def ReplicatesCopies(ddp: Ours, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: what forward sees as replicated parameters are copies of the parameters."""
    with mock.patch.object(
        replicated_view.ReplicatedView, "replicated", lambda view, tensor: _replicated(view, tensor.clone())
    ):
        return forward(*inputs, **kwargs)


@replaces(Ours, "forward")
def ForgetsSecondOrder(ddp: Ours, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: the gradient of SyncBatchNorm passes for a constant, so that a gradient penalty has no effect."""
    with mock.patch.object(sync_batch_norm, "NormaliseOverRanks", _Normalise):
        return forward(*inputs, **kwargs)


class _Normalise(sync_batch_norm.NormaliseOverRanks):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            return sync_batch_norm.NormaliseOverRanks.backward(ctx, *grads)


@replaces(Ours, "forward")
def CountsFromOneAgain(ddp: Ours, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: to a SyncBatchNorm each batch is the first one."""
    for layer in ddp.module.modules():
        if isinstance(layer, sync_batch_norm.SyncBatchNorm) and layer.num_batches_tracked is not None:
            layer.num_batches_tracked.zero_()
    return forward(*inputs, **kwargs)


@replaces(Ours, "forward")
def RestoresTheUsualDtype(ddp: Ours, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: after each forward the default dtype is float32, whatever the setting of the user's was."""
    output = forward(*inputs, **kwargs)
    torch.set_default_dtype(torch.float32)
    return output


@replaces(TorchDDP, "forward")
def SwitchesTheCollectorOn(ddp: TorchDDP, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: garbage collection pauses in forward and is on behind it, also where the user had switched it off."""
    gc.disable()
    try:
        return forward(*inputs, **kwargs)
    finally:
        gc.enable()
