"""Mutants of chapter failures: backends that take mistaken calls for right ones, or do not get over them."""

from __future__ import annotations

from typing import Any

from conformance.mutants.spoilt import spoils


@spoils("allgather")
def takes_what_fits(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: lists of a wrong length are taken as far as they go."""
    if len(outputs[0]) != group.size():
        return group.inner.barrier()
    return call(outputs, inputs, *options)


@spoils("all_gather_single")
def takes_any_size(group: Any, call: Any, output: Any, sent: Any, *options: Any) -> Any:
    """BUG: an output of a wrong size is left alone without a word."""
    if output.numel() != sent.numel() * group.size():
        return group.inner.barrier()
    return call(output, sent, *options)


@spoils("allgather")
def is_sulky(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: after a call that was refused, sums are wrong."""
    try:
        return call(outputs, inputs, *options)
    except RuntimeError:
        group.sulks = True
        raise


def _sulking(self: Any, tensors: Any, *options: Any) -> Any:
    if getattr(self, "sulks", False):
        tensors[0].zero_()
    return self.inner.allreduce(tensors, *options)


is_sulky.create.allreduce = _sulking  # type: ignore[attr-defined]
