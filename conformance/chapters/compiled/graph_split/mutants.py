"""Mutants of chapter graph_split: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp_impl import DistributedDataParallel
from ddp_impl.bucket import ManagedParameter
from ddp_impl.compile.who_averages import Reduction


class NeverCuts(TorchDDP):
    """BUG: the compiler is not told where buckets end, so that no reduction begins before the backward is over."""

    @contextlib.contextmanager
    def _inside_ddp_forward(self) -> Iterator[None]:
        yield


class CompilesWhole(DistributedDataParallel):
    """BUG: graphs are never cut, so that no reduction begins before the backward is over."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        super()._attach_reducer(members)
        if self._compiled_calls.reduction is Reduction.SPLIT:
            self._compiled_calls.reduction = Reduction.WHOLE
