"""Mutants of chapter unused: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from conformance.mutants.bases import ActsAfterBackward, Reducing
from ddp_impl.bucket import Bucket
from ddp_impl.errors import ReductionError
from ddp_impl.parameter_usage import ParameterUsage
from ddp_impl.reducer import Reducer
from ddp_impl.reducer_state import Event


class ZeroesUnusedGradients(DistributedDataParallel):
    """BUG: a parameter that no rank used ends the backward with a gradient of zeros, where it had none."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, and let backward end with zeros where there is no gradient."""
        output = super().forward(*inputs, **kwargs)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(partial(_at_end_of_backward, self._fill_with_zeros))
        return output

    def _fill_with_zeros(self) -> None:
        for parameter in self.module.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def _at_end_of_backward(callback: Any, gradient: Tensor) -> None:
    Variable._execution_engine.queue_callback(callback)


class _Excluding(Reducer):
    """Takes for unused, before the backward brings anything, what it does not believe to come."""

    believed: Sequence[bool] = ()

    def _expect(self) -> None:
        super()._expect()
        if self.options.find_unused_parameters and any(self.believed):
            absent = [index for index, comes in enumerate(self.believed) if not comes]
            self.usage.unused.update(absent)
            for bucket in self.arrivals.exclude(absent):
                self._bucket_full(bucket)

    def _is_welcome_late(self, index: int) -> bool:
        return False


class LastForwardCounts(Reducing):
    """BUG: of several forwards before one backward only the last one's parameters count as used."""

    class OwnReducer(_Excluding):
        """Remembers one forward."""

        def prepare_for_backward(self, outputs: Any) -> None:
            """Forget the forwards before."""
            tensors = list(outputs)
            self.believed = _reachable(tensors, self.search.nodes)
            super().prepare_for_backward(tensors)


class RefusesUnusedSparse(Reducing):
    """BUG: a sparse gradient that does not come is an error."""

    class OwnReducer(Reducer):
        """Wants sparse gradients."""

        def _launch(self, bucket: Bucket) -> None:
            if bucket.sparse and bucket.parameters[0].grad is None:
                raise RuntimeError("a sparse gradient is missing")
            super()._launch(bucket)


class LeavesOneOut(Reducing):
    """BUG: off by one, with `find_unused_parameters` the last parameter counts as unused."""

    class OwnReducer(Reducer):
        """Miscounts."""

        def _used_by_now(self, bucket: Bucket, buffer: Tensor) -> list[bool] | None:
            used = super()._used_by_now(bucket, buffer)
            return None if used is None or not self.options.find_unused_parameters else [*used[:-1], False]


class NamesNoParameters(Reducing):
    """BUG: the error about missing gradients does not say which parameters they are of."""

    class OwnReducer(Reducer):
        """Says little."""

        def check_finished(self) -> None:
            """Raise without a name."""
            try:
                super().check_finished()
            except ReductionError as error:
                raise ReductionError("the previous reduction did not finish") from error


class AsksNobody(Reducing):
    """BUG: ranks do not ask each other which parameters were used."""

    class OwnUsage(ParameterUsage):
        """Believes itself."""

        def end_agreeing(self) -> None:
            """Wait, and take one's own answer."""
            own = self._used(self.used_locally)
            super().end_agreeing()
            self.anywhere = own


class UsedOnceIsUsed(Reducing):
    """BUG: a parameter that was used in some step counts as used in all later ones."""

    class OwnUsage(ParameterUsage):
        """Never forgets."""

        def end_agreeing(self) -> None:
            """Add what was known before."""
            before = self.anywhere
            super().end_agreeing()
            if before is not None and self.anywhere is not None:
                self.anywhere = [new or old for new, old in zip(self.anywhere, before, strict=True)]


class ZeroesForUnused(Reducing):
    """BUG: parameters that no rank used get zeros, which optimizers take for gradients."""

    class OwnReducer(Reducer):
        """Takes all for used."""

        def _used_by_now(self, bucket: Bucket, buffer: Tensor) -> list[bool] | None:
            return None


class SearchesBeforeBackwardOnly(Reducing):
    """BUG: parameters whose output the loss leaves out are waited for in vain."""

    class OwnReducer(Reducer):
        """Does not look again at the end."""

        def _missing_is_unused(self) -> bool:
            return False


class NeverSkips(Reducing):
    """BUG: `skip_all_reduce_unused_params` saves nothing."""

    class OwnReducer(Reducer):
        """Sends everything."""

        def _agree_on_skipped(self) -> None:
            pass


class ForgivesMissingGradients(Reducing):
    """BUG: gradients that never came are not noticed; the next iteration begins as if nothing had happened."""

    class OwnReducer(Reducer):
        """Forgets the iteration instead of raising."""

        def check_finished(self) -> None:
            """Forget it."""
            if self.state.is_unfinished:
                self.state.handle(Event.RESET)
                self.iteration.in_flight.clear()
                self.arrivals.disarm()


class FirstOutputOnly(Reducing):
    """BUG: backward is noticed through the first tensor of the output only."""

    class OwnReducer(_Excluding):
        """Looks at one output."""

        def prepare_for_backward(self, outputs: Iterable[Tensor]) -> None:
            """Forget all outputs but the first."""
            first = list(outputs)[:1]
            self.believed = _reachable(first, self.search.nodes)
            super().prepare_for_backward(first)
            self.iteration.is_announced = False


class UnusedHereStaysNone(ActsAfterBackward):
    """BUG: a rank that did not use a parameter gets no gradient for it, although others did."""

    def before_reduced(self) -> None:
        """Note what has no gradient of its own."""
        self._absent = [parameter for parameter in self.module.parameters() if parameter.grad is None]

    def after_reduced(self) -> None:
        """Take back what came from other ranks."""
        for parameter in self._absent:
            parameter.grad = None


class CountsEarlyGradientsAgain(Reducing):
    """BUG: a gradient that came before autograd reached an output of forward counts once more, as an unused one."""

    class OwnReducer(Reducer):
        """Counts what has come already among the parameters that the backward will not bring."""

        def _expect(self) -> None:
            for index, left in enumerate(self.arrivals.due):
                if not left and self.options.find_unused_parameters:
                    self.arrivals.pending[self.arrivals.bucket_of[index]] -= 1
            super()._expect()


class ForgetsIdleRanks(Reducing):
    """BUG: a rank whose forward used no parameter takes no part in the reduction; others meet its next one."""

    class OwnReducer(Reducer):
        """Returns outputs as they are."""

        def tie_unused(self, output: Any, tensors: Sequence[Tensor]) -> Any:
            """Tie nothing."""
            return output


class BelievesItsSearch(Reducing):
    """BUG: what the search did not find counts as unused, also behind functions that hide their graph."""

    class OwnReducer(_Excluding):
        """Is sure of what it cannot see."""

        def _expect(self) -> None:
            self.believed = self.search.coming()
            super()._expect()


def _reachable(outputs: Iterable[Tensor], nodes: Sequence[Node]) -> list[bool]:
    """Return which of these nodes a backward from `outputs` comes to."""
    stack = [get_gradient_edge(tensor).node for tensor in outputs if tensor.requires_grad]
    seen = set[Node](stack)
    while stack:
        following = {node for node, _ in stack.pop().next_functions if node is not None} - seen
        seen |= following
        stack += following
    return [node in seen for node in nodes]
