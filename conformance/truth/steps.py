"""The truth of steps that a program writes itself, computed with one module per rank."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from conformance.models.integers import RankStep
from conformance.observation import Facts
from conformance.truth.device import single_threaded
from conformance.truth.replicas import Replicas

#: Runs forward and backward of one step on a module, wrapped or not; may return further facts of the step.
StepFunction = Callable[[Any, RankStep], Mapping[str, Any] | None]


def simulate_steps(
    replicas: Sequence[nn.Module], step: StepFunction, num_steps: int, *, ignored: frozenset[str] = frozenset()
) -> Mapping[int, Facts]:
    """Run `step` on every rank's replica without DDP, average, and return the facts of each rank.

    Gradients are set to None before every step. The facts are `step<k>/grad/<name>`, and `step<k>/<name>` for what
    `step` returns. Raises `InexactError` where a mean is not exact.
    """
    with single_threaded():
        world = Replicas(replicas, ignored=ignored)
        facts: dict[int, dict[str, Any]] = {rank: {} for rank in range(len(replicas))}
        for index in range(num_steps):
            extra = []
            for rank, module in enumerate(replicas):
                module.zero_grad(set_to_none=True)
                extra.append(step(module, RankStep(rank, index)) or {})
            world.average_gradients()
            for rank, module in enumerate(replicas):
                facts[rank] |= {f"step{index}/{name}": value for name, value in extra[rank].items()}
                facts[rank] |= gradients(f"step{index}", module)
        return facts


def gradients(prefix: str, module: nn.Module) -> dict[str, Any]:
    """Return copies of the gradients of `module` as facts `<prefix>/grad/<name>`."""
    return {
        f"{prefix}/grad/{name}": None if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in module.named_parameters()
    }
