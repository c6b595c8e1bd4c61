"""Program `order_of_layers`: ranks run layers, or wrappers, in orders of their own, and communicate in between."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from conformance.models.integers import RankStep, with_integer_weights
from conformance.programs import RankContext, observe_run, program, run_steps

#: As many rows as columns: gradients between layers have the size of a layer's, and are summed with it if they meet.
_WIDTH = 3
_NUM_STEPS = 4

#: What runs in an order: layers of one wrapper, between which a hook communicates; three wrappers; their backwards.
OF = ("layers", "wrappers", "backwards")
#: Ranks have one order, and change it together with every step; or each has its own, at first or in later steps only.
ORDERS = ("changed_by_all", "own", "own_later")

_ORDERS = ((0, 1, 2), (1, 0, 2), (2, 0, 1), (2, 1, 0))


class _InOrder(nn.Module):
    """Runs `layers` in the order that it is given; `group` sums the gradients between them unless it is None.

    Its rank 0 sends each of them to rank 1, too, `num_messages` times.
    """

    def __init__(self, layers: Sequence[nn.Module], group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.sums: list[Tensor] = []
        self._group = group
        self.num_messages = 0

    def forward(self, rows: Tensor, order: Sequence[int]) -> Tensor:
        for index in order:
            rows = self.layers[index](rows)
            if self._group is not None and index != order[-1]:
                rows.register_hook(self._keep_sum)
        return rows

    def _keep_sum(self, gradient: Tensor) -> None:
        total = gradient.clone()
        dist.all_reduce(total, group=self._group)
        self.sums.append(total)
        for _ in range(self.num_messages):
            if dist.get_rank(self._group) == 0:
                dist.send(total, group=self._group, group_dst=1)
            elif dist.get_rank(self._group) == 1:
                dist.recv(total, group=self._group, group_src=0)


@program("order_of_layers", invariants=("leaves_no_trace",))
def order_of_layers(ctx: RankContext) -> None:
    """Run three layers in an order that may be the rank's own, for four steps.

    Arguments: `of`, one of `OF`; `order`, one of `ORDERS`; `num_rows`; `talks_from`, the first step in which it talks;
    `beside`, whether another wrapper's backward precedes, and each step has more messages than the last; `hook`,
    "ready" for torch's comm hook that averages, "written" for one of the user's; `late`, whether the first wrapper
    trains a step before the others are built. Observes the gradients of every step and the user's sums. All ranks run
    it.
    """
    observe_run(ctx, lambda: _train(ctx, ctx.arguments["of"], ctx.arguments["order"]))


def _train(ctx: RankContext, of: str, order: str) -> dict[str, Any]:
    layers = [with_integer_weights(nn.Linear(_WIDTH, _WIDTH, bias=False), ctx.scenario.seed, k) for k in range(3)]
    inner = nn.ModuleList(layers).to(ctx.device)
    model: Any
    beside: Any = None
    if of == "layers":
        whole = _InOrder(layers, ctx.process_group)
        model = _wrapped(ctx, whole)
        if ctx.arguments.get("beside", False):
            other = with_integer_weights(nn.Linear(_WIDTH, 1), ctx.scenario.seed, 3).to(ctx.device)
            inner.append(other)
            beside = _wrapped(ctx, other)
    else:
        num_wrapped = 1 if ctx.arguments.get("late", False) else len(layers)
        model = whole = _InOrder([_wrapped(ctx, layer) for layer in layers[:num_wrapped]], None)

    def step(model: nn.Module, turn: RankStep) -> dict[str, Any]:
        whole.sums.clear()
        talks = turn.step >= ctx.arguments.get("talks_from", _NUM_STEPS)
        whole.num_messages = talks * (1 + turn.step if beside else 1)
        rows = turn.inputs(ctx.arguments.get("num_rows", _WIDTH), _WIDTH).requires_grad_()
        now = _order(order, ctx.rank, turn.step)
        if len(whole.layers) < len(layers):
            if turn.step == 0:
                now = (0,)
            else:
                whole.layers.extend(_wrapped(ctx, layer) for layer in layers[1:])
        if of == "backwards":
            for index in now:
                turn.backward(turn.loss(turn.forward(whole.layers[index], rows), micro=index))
        else:
            loss = turn.loss(turn.forward(model, rows, now))
            turn.backward(turn.loss(turn.forward(beside, rows), micro=1) + loss if beside else loss)
        return {f"sum{index}": total for index, total in enumerate(whole.sums)}

    return run_steps(ctx, inner, model, step, _NUM_STEPS)


def _wrapped(ctx: RankContext, module: nn.Module) -> Any:
    wrapper: Any = ctx.wrap(module)
    ready = default_hooks.allreduce_hook
    hooks = {"ready": ready, "written": lambda state, bucket: ready(state, bucket)}
    if "hook" in ctx.arguments:
        wrapper.register_comm_hook(ctx.process_group, hooks[ctx.arguments["hook"]])
    return wrapper


def _order(which: str, rank: int, step: int) -> Sequence[int]:
    """Return the order of a rank's step: in `own_later`, every rank leaves the common one in step 2."""
    if which == "changed_by_all":
        return _ORDERS[step % len(_ORDERS)]
    if which == "own":
        return _ORDERS[rank]
    return _ORDERS[1 + rank] if which == "own_later" and step >= 2 else _ORDERS[0]
