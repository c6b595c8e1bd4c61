"""Mutants of chapter optimizer_in_backward: DDPs with one bug each; `mutants.toml` names what detects it."""

import contextlib
import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

from torch import Tensor

from conformance.mutants.patches import Call, as_part, replaces
from ddp_impl import DistributedDataParallel as Ours
from ddp_impl.buckets.bucket import Bucket, ManagedParameter
from ddp_impl.reducer.reducer import Reducer
from ddp_impl.reducer.reduction import Reduction, take_over_optimizers


@replaces(Reducer, "finalize")
def HooksStopOptimizers(reducer: Reducer, finalize: Call) -> None:
    """BUG: with a comm hook, optimizers in backward do not step."""
    if reducer.reduction.comm_hook is not None:
        reducer.reduction.steps_optimizers = False
    finalize()


_KEEPS_GRADIENTS = "DDP_OVERLAPPED_OPTIM_SET_GRADS_TO_NONE"


@replaces(Ours, "_lazy_init")
def StepsOnLocalGradients(ddp: Ours, lazy_init: Call) -> None:
    """BUG: optimizers in backward step as soon as the local gradient is there."""
    ddp._lazy_init_ran = True


class TakesOverAtConstruction(Ours):
    """BUG: only optimizers that were applied before wrapping step on averaged gradients."""

    def attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        super().attach_reducer(members)
        self.reducer.reduction.steps_optimizers = take_over_optimizers(members)

    def _lazy_init(self) -> None:
        self._lazy_init_ran = True


@replaces(Ours, "_lazy_init")
def SilencesIgnoredOptimizers(ddp: Ours, lazy_init: Call) -> None:
    """BUG: the optimizer of an ignored parameter is taken over too, and never steps again."""
    lazy_init()
    everything = [ManagedParameter(0, name, parameter) for name, parameter in ddp.module.named_parameters()]
    take_over_optimizers(everything)


@replaces(Ours, "_lazy_init")
def OneOptimizerEach(ddp: Ours, lazy_init: Call) -> None:
    """BUG: of several optimizers of a parameter only the first steps."""
    lazy_init()
    for parameter in ddp.module.parameters():
        if hasattr(parameter, "_in_backward_optimizers"):
            parameter._in_backward_optimizers = parameter._in_backward_optimizers[:1]


@replaces(Reduction, "step")
def KeepsUsedGradients(reduction: Reduction, step: Call, bucket: Bucket, used: Any) -> None:
    """BUG: gradients that an optimizer in backward has used stay, and are accumulated onto."""
    with mock.patch.dict(os.environ, {_KEEPS_GRADIENTS: "0"}):
        step(bucket, used)


@replaces(Reduction, "step")
def DropsUsedGradients(reduction: Reduction, step: Call, bucket: Bucket, used: Any) -> None:
    """BUG: gradients that an optimizer in backward has used are dropped even where they are to be kept."""
    with mock.patch.dict(os.environ, {_KEEPS_GRADIENTS: "1"}):
        step(bucket, used)


@replaces(Reducer, "finalize")
def DropsAllGradients(reducer: Reducer, finalize: Call) -> None:
    """BUG: with an optimizer in backward, gradients of parameters that have none are dropped as well."""
    finalize()
    if reducer.reduction.steps_optimizers:
        for member in reducer.members:
            member.parameter.grad = None


@replaces(Reduction, "step")
def StepsTwice(reduction: Reduction, step: Call, bucket: Bucket, used: Any) -> None:
    """BUG: optimizers in backward step twice on each gradient."""
    for parameter in bucket.parameters:
        if parameter.grad is not None:
            for optimizer in getattr(parameter, "_in_backward_optimizers", ()):
                optimizer.step()
    step(bucket, used)


@replaces(Ours, "_post_forward")
def FreezesLearningRate(ddp: Ours, post_forward: Call, output: Any) -> Any:
    """BUG: optimizers in backward keep the learning rate of the first step."""
    for parameter in ddp.module.parameters():
        for optimizer in getattr(parameter, "_in_backward_optimizers", ()):
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("lr of the first step", group["lr"])
    return post_forward(output)


@replaces(Ours, "_register_fused_optim")
def IgnoresFusedOptimizers(
    ddp: Ours, register_fused_optim: Call, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any
) -> None:
    """BUG: `_register_fused_optim` accepts anything and does nothing."""


@replaces(Reducer, "watch_backward")
def OverlooksUserHooks(reducer: Reducer, watch_backward: Call) -> None:
    """BUG: no warning says that hooks of the user stepped on local gradients."""
    watch_backward()
    reducer.reduction.user_hooks.hooked = []


@replaces(Reducer, "finalize")
def SuspectsEveryHook(reducer: Reducer, finalize: Call) -> None:
    """BUG: any hook of the user counts as an optimizer."""
    with mock.patch("ddp_impl.reducer.reduction.version_of", return_value=-1):
        finalize()


@replaces(Reduction, "hand_out_all_but_the_last")
def StepsAtTheEnd(reduction: Reduction, hand_out_all_but_the_last: Call) -> None:
    """BUG: optimizers in backward step when the backward is over, and all gradients are alive until then."""


@replaces(Reduction, "step")
def StepsWhateverHasAGradient(_: Reduction, step: Call, bucket: Bucket, *__: Any) -> None:
    """BUG: a parameter that no rank has used is stepped where the user has given it a gradient."""
    step(bucket, None)


@as_part
class ClaimsWhatHasElements(Reduction):
    """BUG: a bucket of no elements that has given up its memory has no place for its gradients any more."""

    def collect(self, bucket: Bucket) -> Tensor:
        with contextlib.nullcontext() if bucket.num_bytes else mock.patch.object(Bucket, "claim"):
            return super().collect(bucket)
