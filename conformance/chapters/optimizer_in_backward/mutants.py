"""Mutants of chapter optimizer_in_backward: DDPs with one bug each; `mutants.toml` names what detects it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

from conformance.mutants.bases import Reducing
from ddp_impl import DistributedDataParallel
from ddp_impl.bucket import ManagedParameter
from ddp_impl.optimizer_in_backward import take_over_optimizers
from ddp_impl.reducer import Reducer


class HooksStopOptimizers(Reducing):
    """BUG: with a comm hook, optimizers in backward do not step."""

    class OwnReducer(Reducer):
        """Leaves steps out."""

        def _finalize(self) -> None:
            if self.comm_hook is not None:
                self.steps_optimizers = False
            super()._finalize()


_KEEPS_GRADIENTS = "DDP_OVERLAPPED_OPTIM_SET_GRADS_TO_NONE"


class StepsOnLocalGradients(DistributedDataParallel):
    """BUG: optimizers in backward step as soon as the local gradient is there."""

    def _lazy_init(self) -> None:
        self._lazy_init_ran = True


class TakesOverAtConstruction(DistributedDataParallel):
    """BUG: only optimizers that were applied before wrapping step on averaged gradients."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        super()._attach_reducer(members)
        self.reducer.steps_optimizers = take_over_optimizers(members)

    def _lazy_init(self) -> None:
        self._lazy_init_ran = True


class SilencesIgnoredOptimizers(DistributedDataParallel):
    """BUG: the optimizer of an ignored parameter is taken over too, and never steps again."""

    def _lazy_init(self) -> None:
        super()._lazy_init()
        everything = [ManagedParameter(0, name, parameter) for name, parameter in self.module.named_parameters()]
        take_over_optimizers(everything)


class OneOptimizerEach(DistributedDataParallel):
    """BUG: of several optimizers of a parameter only the first steps."""

    def _lazy_init(self) -> None:
        super()._lazy_init()
        for parameter in self.module.parameters():
            if hasattr(parameter, "_in_backward_optimizers"):
                parameter._in_backward_optimizers = parameter._in_backward_optimizers[:1]


class KeepsUsedGradients(Reducing):
    """BUG: gradients that an optimizer in backward has used stay, and are accumulated onto."""

    class OwnReducer(Reducer):
        """Keeps gradients."""

        def _finalize(self) -> None:
            with mock.patch.dict(os.environ, {_KEEPS_GRADIENTS: "0"}):
                super()._finalize()


class DropsUsedGradients(Reducing):
    """BUG: gradients that an optimizer in backward has used are dropped even where they are to be kept."""

    class OwnReducer(Reducer):
        """Drops gradients."""

        def _finalize(self) -> None:
            with mock.patch.dict(os.environ, {_KEEPS_GRADIENTS: "1"}):
                super()._finalize()


class DropsAllGradients(Reducing):
    """BUG: with an optimizer in backward, gradients of parameters that have none are dropped as well."""

    class OwnReducer(Reducer):
        """Drops too much."""

        def _finalize(self) -> None:
            super()._finalize()
            if self.steps_optimizers:
                for member in self.members:
                    member.parameter.grad = None


class StepsTwice(Reducing):
    """BUG: optimizers in backward step twice on each gradient."""

    class OwnReducer(Reducer):
        """Steps before the reducer does."""

        def _finalize(self) -> None:
            optimizers = [
                optimizer
                for member in self.members
                for optimizer in getattr(member.parameter, "_in_backward_optimizers", ())
            ]
            for optimizer in optimizers:
                optimizer.step = _twice(optimizer.step)
            super()._finalize()
            for optimizer in optimizers:
                del optimizer.step


def _twice(step: Any) -> Any:
    def steps() -> None:
        step()
        step()

    return steps


class FreezesLearningRate(DistributedDataParallel):
    """BUG: optimizers in backward keep the learning rate of the first step."""

    def _post_forward(self, output: Any) -> Any:
        for parameter in self.module.parameters():
            for optimizer in getattr(parameter, "_in_backward_optimizers", ()):
                for group in optimizer.param_groups:
                    group["lr"] = group.setdefault("lr of the first step", group["lr"])
        return super()._post_forward(output)


class IgnoresFusedOptimizers(DistributedDataParallel):
    """BUG: `_register_fused_optim` accepts anything and does nothing."""

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        pass


class OverlooksUserHooks(Reducing):
    """BUG: nobody says that hooks of the user stepped on local gradients."""

    class OwnReducer(Reducer):
        """Looks for no hooks."""

        def _watch_backward(self) -> None:
            self.user_hooks.iteration_begins(search=False)
            self.user_hooks._hooked = []
            super()._watch_backward()


class SuspectsEveryHook(Reducing):
    """BUG: any hook of the user counts as an optimizer."""

    class OwnReducer(Reducer):
        """Looks for hooks alone."""

        def _finalize(self) -> None:
            self.user_hooks._versions = dict.fromkeys(range(len(self.members)), -1)
            super()._finalize()


class StepsAtTheEnd(Reducing):
    """BUG: optimizers in backward step when the backward is over, and all gradients are alive until then."""

    class OwnReducer(Reducer):
        """Waits."""

        def _hand_out_before(self, last_launched: int) -> None:
            pass
