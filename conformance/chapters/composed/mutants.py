"""Mutants of chapter composed: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

import random
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from conformance.mutants.patches import Call, as_part, replaces
from ddp_impl import DistributedDataParallel as Ours
from ddp_impl.base.errors import ReductionError
from ddp_impl.buckets.bucket import Bucket, ManagedParameter, allocate
from ddp_impl.buckets.plan import BucketPlan
from ddp_impl.module.parameter_watch import ParameterWatch
from ddp_impl.reducer import planning as planning_module
from ddp_impl.reducer.expectations import FindUnused
from ddp_impl.reducer.iteration import Event
from ddp_impl.reducer.planning import BucketPlanning
from ddp_impl.reducer.reducer import Reducer
from ddp_impl.reducer.reduction import Reduction


@replaces(Reduction, "refuse")
def RefusesAlone(reduction: Reduction, refuse: Call, error: ReductionError) -> None:
    """BUG: a rank that cannot use a gradient raises at once; the others wait for it."""
    raise error


@as_part
class HoldsBackItsOwnMissing(FindUnused):
    """BUG: a bucket waits for the end of backward if this rank will not fill it, and not if another rank will not."""

    _mine: Sequence[bool] = ()

    def forecast(self, certain: Sequence[bool]) -> None:
        self._mine = certain
        super().forecast(certain)

    def await_forecast(self) -> None:
        with mock.patch.object(self.reduction, "launch_uncertain_after_backward", self._hold_back):
            super().await_forecast()

    def _hold_back(self, _: Sequence[bool]) -> None:
        type(self.reduction).launch_uncertain_after_backward(self.reduction, self._mine)


@replaces(Reduction, "forget_dropped")
def KeepsDroppedGradients(reduction: Reduction, forget_dropped: Call) -> None:
    """BUG: a gradient that the loop dropped before its first reduction counts; the parameter gets zeros."""


@replaces(Reducer, "check_finished")
def AsksNoPeerAfterAnException(reducer: Reducer, check_finished: Call) -> None:
    """BUG: a rank whose backward raised before its first gradient continues, also if another's raised later."""
    reducer.raised_early = False
    check_finished()


@replaces(Reducer, "announce")
def LeavesOthersWaiting(reducer: Reducer, expect: Call) -> None:
    """BUG: ranks exchange what they expect when a bucket is full; if one raises before, the others wait."""
    if not reducer.ranks_may_differ:
        expect()


@replaces(Reducer, "backward_raised")
def SkipsAfterAnException(reducer: Reducer, backward_raised: Call, *arguments: Any) -> None:
    """BUG: what ranks agreed not to use in a backward that raised, the next one skips."""
    backward_raised(*arguments)
    if reducer.raised_early:
        reducer.reduction.iteration.skipped = set(range(len(reducer.buckets)))


@replaces(Reduction, "hand_out")
def KeepsTheOldLayout(reduction: Reduction, hand_out: Call, bucket: Bucket, buffer: Tensor, used: Any) -> None:
    """BUG: a new gradient is laid out as its parameter was at construction, whatever data it was given since."""
    with mock.patch("ddp_impl.buckets.gradients.new_gradient", lambda parameter, view: view.clone()):
        hand_out(bucket, buffer, used)


@replaces(Reduction, "collect")
def KeepsTheOldViews(reduction: Reduction, collected: Call, bucket: Bucket) -> Any:
    """BUG: gradients that live in buckets keep the layout that their parameters had at construction."""
    with mock.patch("ddp_impl.buckets.gradients.is_laid_out_as", return_value=True):
        return collected(bucket)


@replaces(BucketPlanning, "adopt")
def LaysOutAsOfToday(planning: BucketPlanning, adopt: Call, plan: BucketPlan) -> None:
    """BUG: buckets are laid out as parameters are when they are allocated, which may differ by rank."""

    def allocate_now(plan: BucketPlan, members: Sequence[ManagedParameter], *rest: Any) -> list[Bucket]:
        return allocate(
            plan, [ManagedParameter(one.index, one.name, one.parameter, one.sparse) for one in members], *rest
        )

    with mock.patch.object(planning_module, "allocate", allocate_now):
        adopt(plan)


@replaces(Ours, "__setstate__")
def CopyForgetsLayouts(ddp: Ours, setstate: Call, state: dict[str, Any]) -> None:
    """BUG: a copy lays its buckets out as parameters are when it is made, which may differ by rank."""
    setstate({**state, "_averaged": dict.fromkeys(state["_averaged"], ())})


@replaces(Ours, "attach_reducer", "__getstate__")
def TakesStandInsForAll(ddp: Ours, call: Call, *args: Any) -> Any:
    """BUG: a parameter that was replaced behind stand-ins trains locally, and a copy contains no other."""
    with mock.patch.object(ParameterWatch, "check_hidden"):
        return call(*args)


@replaces(Reduction, "collect")
def AveragesWhatIsFrozen(reduction: Reduction, collected: Call, bucket: Bucket) -> Any:
    """BUG: a frozen parameter whose hook autograd still calls counts as used."""
    with mock.patch("ddp_impl.reducer.reduction.frozen_in", return_value=set()):
        return collected(bucket)


@replaces(Reducer, "reset")
def ForgetsMissingGradients(reducer: Reducer, reset: Call, group: dist.ProcessGroup) -> None:
    """BUG: with the group's update the reducer forgets that gradients were missing, and reports nothing."""
    reducer.reduction.iteration.enter(Event.RESET)
    reset(group)


@replaces(Reducer, "prepare_for_forward")
def RebuildsAlone(reducer: Reducer, prepare_for_forward: Call) -> None:
    """BUG: a rank that torch.autograd.grad led back to an earlier forward rebuilds no buckets with the others."""
    reducer.reduction.iteration.is_repeated = False
    prepare_for_forward()


class StaysInJoin(Ours):
    """BUG: after a join context every forward asks who still has data, and takes the buffers of the last rank."""

    @property
    def _join_config(self) -> Any:
        return self.__dict__["joins"]

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        if config.enable or "joins" not in self.__dict__:
            self.__dict__["joins"] = config


@replaces(Ours, "join")
def LeavesAWarningsFilter(ddp: Ours, join: Call, *args: Any, **kwargs: Any) -> Join:
    """BUG: torch's join context as it is, which leaves a filter of warnings."""
    return Join([ddp], *args, **kwargs)


@replaces(Reducer, "announce")
def AgreesInAutogradGrad(reducer: Reducer, expect: Call) -> None:
    """BUG: ranks exchange what they will not use when autograd reaches an output, for torch.autograd.grad as well."""
    if isinstance(reducer.expectation, FindUnused) and not reducer.reduction.iteration.has_forecast:
        reducer.expectation.forecast(reducer.reduction.graph.certain_to_arrive())
    expect()


@replaces(Reduction, "collect")
def SendsNothingForFrozen(reduction: Reduction, collected: Call, bucket: Bucket) -> Any:
    """BUG: a sparse gradient that never arrived, because its parameter was frozen, is handed out without an entry."""
    unused = set(reduction.iteration.unused)
    buffer = collected(bucket)
    if bucket.sparse:
        reduction.iteration.unused.intersection_update(unused)
    return buffer


@replaces(Ours, "__setstate__")
def CopyLeavesFrozenOut(ddp: Ours, setstate: Call, state: dict[str, Any]) -> None:
    """BUG: a copy averages what requires a gradient on this rank now, not what the original averaged."""
    setstate({name: value for name, value in state.items() if name != "_averaged"})


@replaces(Ours, "__init__")
def DrawsRandomNumbers(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: the constructor draws from torch's random generator, so that dropout differs from training without DDP."""
    init(*args, **kwargs)
    torch.rand(1)


@replaces(Ours, "forward")
def DrawsNumbersOfNumPy(ddp: Ours, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: each forward draws from NumPy's random generator, so that the user's data are drawn in another order."""
    np.random.rand()
    return forward(*inputs, **kwargs)


@replaces(Ours, "__init__")
def BuildsWithNumbersOfNumPy(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: the constructor seeds NumPy's random generator."""
    init(*args, **kwargs)
    np.random.seed(0)


@replaces(Ours, "forward")
def DrawsNumbersOfPython(ddp: Ours, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: each forward draws from Python's random generator."""
    random.random()
    return forward(*inputs, **kwargs)


@replaces(Ours, "forward")
def LeavesADefaultDtype(ddp: Ours, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: a forward under no_grad leaves another default dtype behind."""
    output = forward(*inputs, **kwargs)
    if not torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        torch.set_default_dtype(torch.float64)
    return output


@replaces(Ours, "__init__")
def TurnsPartsToEvaluation(ddp: Ours, init: Call, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """BUG: the constructor switches the module's parts to evaluation mode."""
    init(module, *args, **kwargs)
    for part in list(ddp.module.children()):
        part.eval()


@replaces(Ours, "__init__")
def ReplacesForward(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: the constructor puts a forward of its own in the place of the user's module's."""
    init(*args, **kwargs)
    ddp.module.forward = partial(type(ddp.module).forward, ddp.module)


@replaces(Ours, "forward")
def ChangesInputs(ddp: Ours, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: forward asks for gradients of its floating-point inputs."""
    for tensor in inputs:
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and torch.is_grad_enabled():
            tensor.requires_grad_(True)
    return forward(*inputs, **kwargs)


@replaces(Ours, "_run_ddp_forward")
def SwitchesAutocastOff(ddp: Ours, run_ddp_forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: the module runs without the user's autocast."""
    with torch.autocast("cpu", enabled=False):
        return run_ddp_forward(*inputs, **kwargs)


class IsBoundToItsThread(Ours):
    """BUG: gradients of a forward in another thread than the wrapper's stay local."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._thread = threading.get_ident()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == self._thread:
            return super().forward(*inputs, **kwargs)
        with self.no_sync():
            return super().forward(*inputs, **kwargs)


@replaces(Ours, "forward")
def KeepsEveryOutput(ddp: Ours, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: the outputs of all forwards are kept, with their graphs, as long as the wrapper lives."""
    output = forward(*inputs, **kwargs)
    _KEPT.setdefault(ddp, []).append(output)
    return output


#: Beside the wrappers, which may be copied.
_KEPT: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()


@replaces(Ours, "forward")
def TiesParameters(ddp: Ours, forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: a parameter that a forward returns is a copy, where the forward reaches frozen parameters alone."""
    with mock.patch("ddp_impl.autograd.marks.nn.Parameter", ()):
        return forward(*inputs, **kwargs)
