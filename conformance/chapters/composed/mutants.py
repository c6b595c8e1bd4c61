"""Mutants of chapter composed: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from conformance.mutants.bases import Reducing
from ddp_impl import DistributedDataParallel
from ddp_impl.bucket import Bucket, ManagedParameter
from ddp_impl.bucket_plan import BucketPlan
from ddp_impl.errors import ReductionError
from ddp_impl.parameter_watch import ParameterWatch
from ddp_impl.reducer import Reducer


class RefusesAlone(Reducing):
    """BUG: a rank that cannot use a gradient raises at once; the others wait for it."""

    class OwnReducer(Reducer):
        """Raises whatever the options are."""

        def _refuse(self, error: ReductionError) -> None:
            raise error


class HoldsBackItsOwnMissing(Reducing):
    """BUG: a bucket waits for the end of backward if this rank will not fill it, and not if another rank will not."""

    class OwnReducer(Reducer):
        """Tells others what is sure, and does not listen."""

        def _tell_others(self, coming: Sequence[bool]) -> None:
            """Keep it."""
            self._mine = coming
            super()._tell_others(coming)

        def _hold_back(self, sure: Sequence[bool]) -> None:
            super()._hold_back(getattr(self, "_mine", sure))


class KeepsDroppedGradients(Reducing):
    """BUG: a gradient that the loop dropped before its first reduction counts; the parameter gets zeros."""

    class OwnReducer(Reducer):
        """Forgets nothing."""

        def _forget_dropped(self, unused: Iterable[int]) -> None:
            """Do nothing."""


class AsksNoPeerAfterAnException(Reducing):
    """BUG: a rank whose backward raised before its first gradient goes on, also if another's raised later."""

    class OwnReducer(Reducer):
        """Looks at itself alone."""

        def check_finished(self) -> None:
            """Raise for this rank's own gradients."""
            self._raised_early = False
            super().check_finished()


class LetsLocalForwardsPass(Reducing):
    """BUG: after a backward that raised, a forward under `no_sync` is let through, where only some ranks can go on."""

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.require_backward_grad_sync:
            return super()._pre_forward(*inputs, **kwargs)
        with mock.patch.object(self.reducer, "check_finished"):
            return super()._pre_forward(*inputs, **kwargs)


class LeavesOthersWaiting(Reducing):
    """BUG: ranks tell what they expect when a bucket is full; if one raises before, the others wait for it."""

    class OwnReducer(Reducer):
        """Says nothing when the backward begins."""

        def _expect(self) -> None:
            if not self._will_exchange_usage:
                super()._expect()


class SkipsAfterAnException(Reducing):
    """BUG: what ranks agreed not to use in a backward that raised, the next one skips."""

    class OwnReducer(Reducer):
        """Believes what was said before."""

        def backward_raised(self, *arguments: Any) -> None:
            """Take note, and skip everything."""
            super().backward_raised(*arguments)
            if self._raised_early:
                self.iteration.skipped = set(range(len(self.buckets)))


class KeepsTheOldLayout(Reducing):
    """BUG: a new gradient is laid out as its parameter was at construction, whatever data it was given since."""

    class OwnReducer(Reducer):
        """Copies views as they are."""

        def _hand_out(self, bucket: Bucket, buffer: Tensor, used: Sequence[bool] | None) -> None:
            with mock.patch("ddp_impl.gradients._new_gradient", lambda parameter, view: view.clone()):
                super()._hand_out(bucket, buffer, used)


class KeepsTheOldViews(Reducing):
    """BUG: gradients that live in buckets keep the layout that their parameters had at construction."""

    class OwnReducer(Reducer):
        """Takes every view for one that fits."""

        def _collected(self, bucket: Bucket) -> Tensor:
            with mock.patch("ddp_impl.gradients._is_laid_out_as", return_value=True):
                return super()._collected(bucket)


class LaysOutAsOfToday(Reducing):
    """BUG: buckets are laid out as parameters are when they are allocated, which may differ by rank."""

    class OwnReducer(Reducer):
        """Reads layouts anew."""

        def _adopt(self, plan: BucketPlan) -> None:
            self.members = tuple(
                ManagedParameter(member.index, member.name, member.parameter, member.sparse) for member in self.members
            )
            super()._adopt(plan)


class CopyForgetsLayouts(DistributedDataParallel):
    """BUG: a copy lays its buckets out as parameters are when it is made, which may differ by rank."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Keep the names alone."""
        super().__setstate__({**state, "_averaged": dict.fromkeys(state["_averaged"], ())})


class TakesStandInsForAll(DistributedDataParallel):
    """BUG: a parameter that was replaced behind stand-ins trains locally, and a copy knows no other."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        with mock.patch.object(ParameterWatch, "check_hidden"):
            super()._attach_reducer(members)

    def __getstate__(self) -> dict[str, Any]:
        """Check nothing."""
        with mock.patch.object(ParameterWatch, "check_hidden"):
            return super().__getstate__()


class AveragesWhatIsFrozen(Reducing):
    """BUG: a frozen parameter whose hook autograd still calls counts as used."""

    class OwnReducer(Reducer):
        """Looks at no `requires_grad`."""

        def _collected(self, bucket: Bucket) -> Tensor:
            with mock.patch("ddp_impl.bucket_reduction.frozen_in", return_value=set()):
                return super()._collected(bucket)


class ForgetsMissingGradients(Reducing):
    """BUG: with the group's update the reducer forgets that gradients were missing, and nobody was told."""

    class OwnReducer(Reducer):
        """Resets at once."""

        def reset(self, group: dist.ProcessGroup) -> None:
            """Say nothing."""
            self._told_missing = True
            super().reset(group)


class RebuildsAlone(Reducing):
    """BUG: a rank that torch.autograd.grad led back to an earlier forward rebuilds no buckets with the others."""

    class OwnReducer(Reducer):
        """Takes what was asked again for an iteration that a forward has opened."""

        def prepare_for_forward(self) -> None:
            """Leave the phase as it is."""
            self.state.is_repeated = False
            super().prepare_for_forward()


class StaysInJoin(DistributedDataParallel):
    """BUG: after a join context every forward asks who still has data, and takes the buffers of the last rank."""

    @property
    def _join_config(self) -> Any:
        return self.__dict__["joins"]

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        if config.enable or "joins" not in self.__dict__:
            self.__dict__["joins"] = config


class LeavesAWarningsFilter(DistributedDataParallel):
    """BUG: torch's join context as it is, which leaves a filter of warnings."""

    def join(self, *args: Any, **kwargs: Any) -> Join:
        """Return torch's."""
        return Join([self], *args, **kwargs)


class AgreesInAutogradGrad(Reducing):
    """BUG: ranks exchange what they will not use when autograd reaches an output, for torch.autograd.grad as well."""

    class OwnReducer(Reducer):
        """Does not wait for a gradient."""

        def _expect(self) -> None:
            """Exchange it at once."""
            if self._will_exchange_usage and not self.iteration.has_forecast:
                self._tell_others(self.search.coming())
            super()._expect()


class SendsNothingForFrozen(Reducing):
    """BUG: a sparse gradient that never came, because its parameter was frozen, is handed out without an entry."""

    class OwnReducer(Reducer):
        """Counts it as used."""

        def _collected(self, bucket: Bucket) -> Tensor:
            """Forget which gradient was missing."""
            unused = set(self.usage.unused)
            buffer = super()._collected(bucket)
            if bucket.sparse:
                self.usage.unused.intersection_update(unused)
            return buffer


class CopyLeavesFrozenOut(DistributedDataParallel):
    """BUG: a copy averages what requires a gradient on this rank now, not what the original averaged."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Forget what the original averaged."""
        super().__setstate__({name: value for name, value in state.items() if name != "_averaged"})


class DrawsRandomNumbers(DistributedDataParallel):
    """BUG: the constructor draws from torch's random generator, so that dropout differs from training without DDP."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        torch.rand(1)


class DrawsNumbersOfNumPy(DistributedDataParallel):
    """BUG: each forward draws from NumPy's random generator, so that the user's data come in another order."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        np.random.rand()
        return super().forward(*inputs, **kwargs)


class BuildsWithNumbersOfNumPy(DistributedDataParallel):
    """BUG: the constructor seeds NumPy's random generator."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        np.random.seed(0)


class DrawsNumbersOfPython(DistributedDataParallel):
    """BUG: each forward draws from Python's random generator."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        random.random()
        return super().forward(*inputs, **kwargs)


class LeavesADefaultDtype(DistributedDataParallel):
    """BUG: a forward under no_grad leaves another default dtype behind."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        output = super().forward(*inputs, **kwargs)
        if not torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            torch.set_default_dtype(torch.float64)
        return output


class TurnsPartsToEvaluation(DistributedDataParallel):
    """BUG: the constructor switches the module's parts to evaluation mode."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        for part in list(self.module.children()):
            part.eval()


class ReplacesForward(DistributedDataParallel):
    """BUG: the constructor puts a forward of its own in the place of the user's module's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.module.forward = partial(type(self.module).forward, self.module)


class ChangesInputs(DistributedDataParallel):
    """BUG: forward asks for gradients of its floating-point inputs."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        for tensor in inputs:
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and torch.is_grad_enabled():
                tensor.requires_grad_(True)
        return super().forward(*inputs, **kwargs)


class SwitchesAutocastOff(DistributedDataParallel):
    """BUG: the module runs without the user's autocast."""

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return super()._run_ddp_forward(*inputs, **kwargs)


class IsBoundToItsThread(DistributedDataParallel):
    """BUG: gradients of a forward in another thread than the wrapper's stay local."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Note the thread."""
        super().__init__(*args, **kwargs)
        self._thread = threading.get_ident()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Synchronise in one thread only."""
        if threading.get_ident() == self._thread:
            return super().forward(*inputs, **kwargs)
        with self.no_sync():
            return super().forward(*inputs, **kwargs)


class KeepsEveryOutput(DistributedDataParallel):
    """BUG: the outputs of all forwards are kept, with their graphs, as long as the wrapper lives."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Keep one more."""
        output = super().forward(*inputs, **kwargs)
        _KEPT.setdefault(self, []).append(output)
        return output


#: Beside the wrappers, which may be copied.
_KEPT: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()


class TiesParameters(DistributedDataParallel):
    """BUG: a parameter that a forward returns is a copy, where the forward reaches frozen parameters alone."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Tie everything."""
        with mock.patch("ddp_impl.anchor.nn.Parameter", ()):
            return super().forward(*inputs, **kwargs)
