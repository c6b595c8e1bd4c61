"""Mutants of chapter refusals: backends that do something else where they should refuse."""

from typing import Any

import torch

from conformance.mutants.modest import MODEST, Modest
from conformance.mutants.spoilt import SUM, finished, made_from, reduction, spoils, with_reduction


@spoils("allreduce")
def forgets_the_factor(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: PREMUL_SUM, which it does not declare, is done as SUM."""
    return call(tensors, *(with_reduction(options, SUM) if reduction(options) == "PREMUL_SUM" else options))


@spoils("broadcast")
def clips_shorts(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: int16, which it does not declare, is sent as int8."""
    if tensors[0].dtype != torch.int16:
        return call(tensors, *options)
    narrow = tensors[0].to(torch.int8)
    work = finished(call([narrow], *options))
    tensors[0].copy_(narrow)
    return work


@made_from(MODEST)
class scatters_nothing(Modest):
    """BUG: a scatter, which it does not declare, is done without an error and leaves the output as it was."""

    def scatter(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        return self.inner.scatter([output.clone() for output in outputs], inputs, *options)


@made_from(MODEST)
class takes_the_next_message(Modest):
    """BUG: tags, which it does not declare, are taken and ignored."""

    def send(self, tensors: Any, rank: int, tag: int) -> Any:
        return self.inner.send(tensors, rank, 0)

    def recv(self, tensors: Any, rank: int, tag: int) -> Any:
        return self.inner.recv(tensors, rank, 0)
