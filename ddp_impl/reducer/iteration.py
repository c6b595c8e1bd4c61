"""`Iteration` and `Backward`: what the reducer knows no longer than one of them lasts.

The state machine (`reducer_state`) says which of them begins and ends when; a new one is a new object, so that nothing
of the last one is forgotten in a reset. `reducer_state` lists what follows from neither, and where that is.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from ddp_impl.base.errors import ReductionError
from ddp_impl.buckets.bucket import Bucket
from ddp_impl.torch_internals.tensors import nodes_behind
from ddp_impl.wire.forecast import Forecast


@dataclass(eq=False)
class Iteration:
    """From the forward, or the backward, that expects gradients until their averages are handed out and stepped with.

    `num_forwards`: how many its gradients come from. `context_id`: the torch.distributed.autograd context of forward.
    `is_announced`: the backward will report when it comes to an output; `is_reached`: it has. `outputs`: the marks on
    what its forwards returned, as long as anything else keeps their graphs alive; there are none where no other wrapper
    must begin with this one.
    `forecast`: the exchange of what is sure to come, while it is on its way; `has_forecast`: the ranks have made it, or
    are about to. `in_flight`: for each bucket that has left the tensor that it left with and the Work or future.
    `filled`: for each bucket that has all its gradients how many collectives of the user's its group had begun then;
    `came`: for each parameter the place of its last gradient, in an iteration that is learnt from.
    `skipped`: the buckets that no rank will use. `refusal`: why this rank cannot average what came, told when ranks
    exchange. `to_step`: the buckets whose averages were handed out when the backward ended, and which parameters some
    rank used.
    """

    num_forwards: int = 0
    context_id: int | None = None
    is_announced: bool = False
    is_reached: bool = False
    outputs: list[weakref.ref[Any]] = field(default_factory=list)
    forecast: Forecast | None = None
    has_forecast: bool = False
    in_flight: dict[int, tuple[Tensor, Any]] = field(default_factory=dict)
    filled: dict[int, int] = field(default_factory=dict)
    came: dict[int, tuple[int, int]] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    refusal: ReductionError | None = None
    to_step: list[tuple[Bucket, Sequence[bool] | None]] = field(default_factory=list)

    def know_outputs(self, tensors: Iterable[Tensor]) -> None:
        """Know what one more forward returned, if it is marked."""
        nodes: Iterable[Any] = chain.from_iterable(map(nodes_behind, tensors))
        marks = [weakref.ref(node) for node in nodes if isinstance(node, BackwardCFunction)]
        self.outputs = [known for known in self.outputs if known() is not None] + marks

    @property
    def output_nodes(self) -> list[Node]:
        """The nodes of all outputs that are known and still there."""
        return [node for known in self.outputs if (node := known()) is not None]


@dataclass(eq=False)
class Backward:
    """One run of autograd's engine, with its `number`, of whose end the reducer will hear.

    `told_missing`: the user has heard that gradients are missing now that it is over. `is_compiled`: compiled autograd
    runs it, and it is not over.
    """

    number: int = -1
    told_missing: bool = False
    is_compiled: bool = False
