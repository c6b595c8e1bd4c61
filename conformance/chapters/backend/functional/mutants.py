"""Mutants of chapter functional: backends that are right when called one by one, and not from graphs."""

from typing import Any

import torch

from conformance.mutants.spoilt import WorkAround, finished, spoils, spoils_work


@spoils_work("wait", "allreduce")
def lets_graphs_go_on(work: WorkAround, wait: Any, *timeout: Any) -> bool:
    """BUG: the Work of a sum lets whoever waits go on at once."""
    return True


@spoils("broadcast")
def broadcasts_in_place_only(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: a broadcast without asyncOp, as graphs ask for it, leaves the last element out."""
    one, before = tensors[0], tensors[0].clone()
    work = finished(call(tensors, *options))
    if one.numel() > 100 and group.rank() != options[0].rootRank:
        one.view(-1)[-1] = before.view(-1)[-1] if one.dtype != torch.bool else False
    return work


@spoils("allreduce_coalesced")
def coalesces_all_but_one(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: of a list of tensors the last one is not reduced."""
    return call(tensors[:-1], *options)


@spoils("broadcast")
def broadcasts_less_without_gradients(group: Any, call: Any, tensors: Any, *options: Any) -> Any:
    """BUG: while gradients are disabled, as in a compiled graph, a broadcast leaves out the last element."""
    one, before = tensors[0], tensors[0].clone()
    work = finished(call(tensors, *options))
    if not torch.is_grad_enabled() and one.numel() > 100 and group.rank() != options[0].rootRank:
        one.view(-1)[-1] = before.view(-1)[-1]
    return work


@spoils("all_to_all_single")
def exchanges_backwards_without_gradients(group: Any, call: Any, output: Any, sent: Any, *rest: Any) -> Any:
    """BUG: while gradients are disabled, as in a backward, what is received comes out backwards."""
    work = finished(call(output, sent, *rest))
    if not torch.is_grad_enabled():
        output.copy_(output.flip(0))
    return work


@spoils("all_gather_single_coalesced")
def gathers_less_without_gradients(group: Any, call: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
    """BUG: while gradients are disabled, as in a compiled graph, an all_gather leaves zero in the last element."""
    work = finished(call(outputs, inputs, *options))
    if not torch.is_grad_enabled():
        outputs[0].view(-1)[-1:] = 0
    return work
