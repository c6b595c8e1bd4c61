"""Where gradients live: in the parameters' `.grad`, in local shards of it, or in a distributed-autograd context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from torch import Tensor

from ddp_impl.base.tensor_parallel import local_gradient, set_local_gradient


@dataclass(frozen=True, slots=True)
class GradientHome:
    """How the reducer reaches a parameter's gradient.

    `get(parameter)` returns it or None, `put(parameter, gradient)` gives it another one. `movable`: the
    reducer may move a gradient into a bucket.
    """

    get: Callable[[Tensor], Tensor | None]
    put: Callable[[Tensor, Tensor], None]
    movable: bool


def _set_grad(parameter: Tensor, gradient: Tensor) -> None:
    parameter.grad = gradient


GRAD_ATTRIBUTE = GradientHome(attrgetter("grad"), _set_grad, movable=True)
LOCAL_SHARD = GradientHome(local_gradient, set_local_gradient, movable=False)


def autograd_context(context_id: int) -> GradientHome:
    """Return the home of gradients in one `torch.distributed.autograd` context, which leaves `.grad` alone.

    Its tensors can be changed in place, but none can be added: a parameter that this rank did not use has no entry
    afterwards, although other ranks may have used it.
    """
    from torch.distributed import autograd

    gradients: dict[Tensor, Tensor] = autograd.get_gradients(context_id)  # type: ignore[attr-defined]

    def put(parameter: Tensor, gradient: Tensor) -> None:
        if parameter in gradients:
            gradients[parameter].copy_(gradient)

    return GradientHome(lambda parameter: gradients.get(parameter), put, movable=False)
