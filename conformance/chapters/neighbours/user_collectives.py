"""What users communicate beside a DDP, by place: each is what some training in the world does."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.chapters.neighbours.towers import WIDTH
from conformance.programs.written_steps import in_a_thread


class _Sum(torch.autograd.Function):
    """The sum over ranks, in forward and in backward, as layers do that synchronise by hand."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _sum(rows, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _sum(gradients[0], ctx.group), None


class _Statistics(torch.autograd.Function):
    """The sums of all ranks' rows: gathered in forward, reduced in backward, as torch's SyncBatchNorm does."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.num_rows = group, len(rows)
        mine = rows.detach().sum(0)
        everyone = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(everyone, mine, group=group)
        return torch.stack(everyone).sum(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _sum(gradients[0], ctx.group).expand(ctx.num_rows, -1), None


class _Gathered(torch.autograd.Function):
    """All ranks' rows, and in backward the sum of what all ranks made of this rank's, as contrastive losses do."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.num_rows = group, len(rows)
        everyone = [torch.empty_like(rows) for _ in range(group.size())]
        dist.all_gather(everyone, rows.detach().contiguous(), group=group)
        return torch.cat(everyone)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = _sum(gradients[0], ctx.group)
        return total[ctx.group.rank() * ctx.num_rows :][: ctx.num_rows], None


def summed(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks, which is one in backward, too."""
    total: Tensor = _Sum.apply(rows, group)
    return total


def _sum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = tensor.detach().clone().contiguous()
    dist.all_reduce(total, group=group)
    return total


class User:
    """What one rank's user communicates in one training; `seen` are the results of the step."""

    def __init__(
        self, place: str, layer: int, group: dist.ProcessGroup, own_group: dist.ProcessGroup | None, like: Tensor
    ) -> None:
        """Communicate in `place`, behind layer `layer`; where size and device are free, with tensors as `like`.

        What goes by hooks goes over `own_group`, if there is one.
        """
        self._place = place
        self._layer = layer
        self._group = group
        self._own_group = own_group
        self._like = like
        self._step = 0
        self._flying: tuple[Any, Tensor] | None = None
        self.seen: list[Tensor] = []

    def begin(self, step: int) -> None:
        self._step, self.seen = step, []

    def listen(self, module: nn.Module) -> None:
        found = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
        layer: Any = found[0][min(self._layer, len(found[0]) - 1)]
        if self._place == "module_hook":
            layer.register_full_backward_hook(lambda *_: self.reduce())
        elif self._place == "post_accumulate":
            layer.weight.register_post_accumulate_grad_hook(lambda _: self.reduce())
        elif self._place == "parameter_hook":
            layer.weight.register_hook(lambda _: self.reduce())

    def behind_layer(self, index: int, rows: Tensor) -> Tensor:
        if index != self._layer:
            return rows
        if (function := _FUNCTIONS.get(self._place)) is not None:
            result: Tensor = rows + function(rows, self._group)
            return result
        if self._place == "forward":
            self.seen.append(_sum(rows, self._group))
        elif self._place == "tensor_hook" and rows.requires_grad:
            rows.register_hook(lambda _: self.reduce())
        elif self._place == "thread" and rows.requires_grad:
            rows.register_hook(lambda _: in_a_thread(self.reduce))
        return rows

    def loss(self, output: Tensor) -> Tensor:
        gathered: Tensor = _Gathered.apply(output, self._group) if self._place == "gathered_loss" else output
        return gathered

    def before_backward(self) -> None:
        if self._place == "before_backward":
            self.reduce()
        elif self._place == "across_backward":
            tensor = self._tensor()
            self._flying = dist.all_reduce(tensor, group=self._group, async_op=True), tensor

    def after_backward(self, module: nn.Module) -> None:
        if self._place == "after_backward":
            self.reduce()
        elif self._flying is not None:
            self._flying[0].wait()
            self.seen.append(self._flying[1])
            self._flying = None
        elif self._place == "average":  # rank 0's exponential average of the weights, for all
            for parameter in module.parameters():
                shadow = parameter.detach() * (self._group.rank() + 1)
                dist.broadcast(shadow, group=self._group, group_src=0)
                self.seen.append(shadow)

    def _tensor(self) -> Tensor:
        return torch.full_like(self._like, 1.0 + self._group.rank() + self._step)

    def reduce(self) -> None:
        tensor = self._tensor()
        dist.all_reduce(tensor, group=self._group if self._own_group is None else self._own_group)
        self.seen.append(tensor)


_FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {"summed": _Sum.apply, "statistics": _Statistics.apply}

#: Where a user may communicate. Those of `IN_BACKWARD` meet a DDP's own collectives within the backward.
IN_BACKWARD = (
    "summed", "statistics", "gathered_loss", "tensor_hook", "parameter_hook", "module_hook", "post_accumulate",
)  # fmt: skip
#: Hooks of a layer: a rank that skips the layer does not communicate there.
OF_A_LAYER = ("parameter_hook", "module_hook", "post_accumulate")
PLACES = ("forward", "before_backward", "across_backward", "after_backward", "average", "thread", *IN_BACKWARD)


def rows_for(as_many_as_a_bucket: bool) -> int:
    """Return how many rows of WIDTH have as many elements as a bucket of one pair of layers, or fewer."""
    return WIDTH + 1 if not as_many_as_a_bucket else 2 * (WIDTH + 1)
