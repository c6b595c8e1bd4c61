"""Who averages the gradients of a forward while `torch.compile` is at work: the reducer, or the compiled backward.

Gradients that the compiled backward averages are averaged *in graph*. All that decides about it is here.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddp_impl.base.options import ReducerOptions
from ddp_impl.buckets.comm_hooks import wire_format
from ddp_impl.compile.graph_parameters import AveragedParameters
from ddp_impl.torch_internals.compile import optimize_ddp


class Reduction(enum.Enum):
    """How the graphs of a compiled module are compiled, for the sake of who averages the gradients."""

    #: The reducer, from hooks; graphs are cut where buckets end, so that it can begin before the backward is over.
    SPLIT = "split"
    #: The reducer, from hooks, after the backward of a graph that is compiled whole.
    WHOLE = "whole"
    #: The compiled backward itself.
    IN_GRAPH = "in_graph"


@dataclass(frozen=True, slots=True)
class InGraph:
    """What an average inside a graph depends on: whose ranks take part, and what gradients are cast to on the way."""

    group: dist.ProcessGroup
    wire_dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class ForwardFacts:
    """What the answer depends on in one forward; equal on every rank.

    `synchronises`: it runs outside of `no_sync`, with gradients enabled. `comm_hook` is (state, hook) as registered, or
    None. `param_dtype` is what mixed precision computes in, None without it.
    """

    synchronises: bool
    averaged: AveragedParameters
    options: ReducerOptions
    group: dist.ProcessGroup
    comm_hook: tuple[Any, Any] | None
    joins: bool
    steps_optimizers: bool
    param_dtype: torch.dtype | None


def wanted_reduction() -> Reduction:
    """Return what `torch._dynamo.config.optimize_ddp` asks for, with the values that torch gives it.

    True and "ddp_optimizer" mean `SPLIT`, False and "no_optimization" `WHOLE`, "python_reducer" and
    "python_reducer_without_compiled_forward" `IN_GRAPH`. Equal on every rank.
    """
    wanted = optimize_ddp()
    if isinstance(wanted, str) and wanted.startswith("python_reducer"):
        return Reduction.IN_GRAPH
    return Reduction.WHOLE if wanted in (False, "no_optimization") else Reduction.SPLIT


def in_graph(wanted: Reduction, forward: ForwardFacts) -> InGraph | None:
    """Return how the compiled backward averages if it can do what is `wanted`; None: the reducer averages.

    A graph knows only dense gradients, of which none must be reduced after the others. It does only the plain average
    and those comm hooks that cast.
    """
    wire = wire_format(forward.comm_hook, forward.group)
    options = forward.options
    casts_otherwise = forward.param_dtype is not None and options.reduce_dtype is not forward.param_dtype
    if (
        wanted is not Reduction.IN_GRAPH
        or not forward.synchronises
        or wire is None
        or any(spec.sparse or spec.delayed for spec in forward.averaged.specs)
        or forward.joins
        or options.find_unused_parameters
        or options.static_graph
        or options.finalizes_by_hand
        or forward.steps_optimizers
        or casts_otherwise
    ):
        return None
    return InGraph(forward.group, wire.dtype or forward.param_dtype)


def reduction_of(wanted: Reduction, answer: InGraph | None) -> Reduction:
    """Return how graphs are compiled for a forward, given what `in_graph` answered.

    Where the reducer must average although the graph was to, it does so from split graphs.
    """
    if answer is not None:
        return Reduction.IN_GRAPH
    return Reduction.SPLIT if wanted is Reduction.IN_GRAPH else wanted
