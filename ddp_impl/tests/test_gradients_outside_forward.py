"""Parameters that the loss reaches past the wrapper's outputs: their gradients are averaged like all others.

Each case trains on two ranks with data of their own. After every step either all gradients are the mean of the ranks'
local ones, with the same bits on both ranks, or every rank raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_impl import DistributedDataParallel
from ddp_impl.tests.ranks import group_of_one, run_ranks

Step = Callable[[nn.Module, Any, Tensor], None]
WORLD_SIZE = 2


class Parts(nn.Module):
    """Has more layers than its forward uses."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.body, self.head, self.pooler = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(4))
        self.returns = returns

    def forward(self, x: Tensor) -> Any:
        if self.returns == "scale":
            return self.scale
        hidden = self.body(x)
        if self.returns == "body":
            return hidden
        if self.returns == "head":
            return self.head(hidden)
        if self.returns == "head and scale":
            return self.head(hidden), self.scale
        return self.head(hidden), self.pooler(hidden)


def loss_of(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


def penalty(module: nn.Module) -> Tensor:
    return torch.stack([parameter.square().sum() for parameter in module.parameters()]).sum()


def through_head(call: nn.Module, parts: Parts, x: Tensor) -> None:
    loss_of(parts.head(call(x))).backward()


def body_only(call: nn.Module, parts: Parts, x: Tensor) -> None:
    call(x).sum().backward()


def with_penalty(call: nn.Module, parts: Parts, x: Tensor) -> None:
    (loss_of(call(x)) + penalty(parts)).backward()


def with_penalty_on_unused(call: nn.Module, parts: Parts, x: Tensor) -> None:
    (loss_of(call(x)) + penalty(parts.pooler)).backward()


def plain(call: nn.Module, parts: Parts, x: Tensor) -> None:
    loss_of(call(x)).backward()


def with_penalty_made_before(call: nn.Module, parts: Parts, x: Tensor) -> None:
    before = penalty(parts)  # autograd comes to it after everything that forward made
    (before + loss_of(call(x))).backward()


def penalty_alone_first(call: nn.Module, parts: Parts, x: Tensor) -> None:
    logits = call(x)
    penalty(parts.pooler).backward()
    loss_of(logits).backward()


def returned_scale(call: nn.Module, parts: Parts, x: Tensor) -> None:
    logits, scale = call(x)
    loss_of(logits * scale).backward()


def returned_scale_alone(call: nn.Module, parts: Parts, x: Tensor) -> None:
    call(x)[1].square().sum().backward()


def scale_squared(call: nn.Module, parts: Parts, x: Tensor) -> None:
    call(x).square().sum().backward()


def scale_and_penalty(call: nn.Module, parts: Parts, x: Tensor) -> None:
    (x.sum() * call(x).square().sum() + x.sum() * penalty(parts.pooler)).backward()


def both(call: nn.Module, parts: Parts, x: Tensor) -> None:
    logits, pooled = call(x)
    (loss_of(logits) + pooled.square().sum()).backward()


def one_of_both(call: nn.Module, parts: Parts, x: Tensor) -> None:
    loss_of(call(x)[0]).backward()


def one_after_the_other(call: nn.Module, parts: Parts, x: Tensor) -> None:
    logits, pooled = call(x)
    loss_of(logits).backward(retain_graph=True)
    pooled.square().sum().backward()


def twice(call: nn.Module, parts: Parts, x: Tensor) -> None:
    loss = loss_of(call(x))
    loss.backward(retain_graph=True)
    loss.backward()


#: name: (what forward returns, what the steps do)
CASES: dict[str, tuple[str, Sequence[Step]]] = {
    "loss on a submodule": ("body", [through_head] * 4),
    "loss on a submodule, now and then": ("body", [body_only, through_head, body_only, through_head]),
    "penalty": ("head", [with_penalty] * 4),
    "penalty, now and then": ("head", [plain, with_penalty, plain, with_penalty_on_unused]),
    "penalty on what forward leaves out": ("head", [with_penalty_on_unused] * 4),
    "penalty made before forward": ("head", [with_penalty_made_before] * 4),
    "penalty made before forward, now and then": ("head", [plain, with_penalty_made_before] * 2),
    "penalty in a backward of its own": ("head", [penalty_alone_first] * 3),
    "parameter returned": ("head and scale", [returned_scale] * 4),
    "parameter returned and nothing else used": ("head and scale", [returned_scale_alone] * 4),
    "nothing but a parameter returned": ("scale", [scale_squared, scale_and_penalty] * 2),
    "two losses": ("both", [both, one_of_both, both, one_of_both]),
    "two backwards": ("both", [one_after_the_other] * 3),
    "one graph twice": ("head", [twice] * 3),
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "skip": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
}
LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"gradient_as_bucket_view": True},
    {"bucket_cap_mb": 1e-5},
    {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-5},
)
#: The cases that end with an error on every rank; by feature.
REFUSED: dict[str, set[str]] = {
    # Parameters without a gradient are an error that the next forward raises.
    "plain": set(CASES) - {"penalty", "penalty made before forward"},
    "unused": set(),
    "static": {
        # The graph is not static: the second backward, or step, brings other gradients than the first.
        "loss on a submodule, now and then", "penalty, now and then", "penalty made before forward, now and then",
        "penalty in a backward of its own", "nothing but a parameter returned", "two backwards",
    },
    "skip": set(),
}  # fmt: skip


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def local_gradients(parts: nn.Module, call: Any, step: Step, x: Tensor) -> list[Tensor | None]:
    parts.zero_grad()
    step(call, parts, x)
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in parts.parameters()]


def mean_gradients(parts: nn.Module, step: Step, number: int) -> list[Tensor | None]:
    """Return the mean over ranks, None where no rank has a gradient: no DDP and no collective is involved."""
    of_ranks = [local_gradients(parts, parts, step, batch(number, rank)) for rank in range(WORLD_SIZE)]
    means: list[Tensor | None] = []
    for parameter, gradients in zip(parts.parameters(), zip(*of_ranks, strict=True), strict=True):
        present = [gradient for gradient in gradients if gradient is not None]
        means.append(sum(present, torch.zeros_like(parameter)) / WORLD_SIZE if present else None)
    return means


def train(rank: int, returns: str, steps: Sequence[Step], options: dict[str, Any]) -> str:
    """Return "right", or what went wrong first."""
    torch.manual_seed(0)
    twin, parts = Parts(returns), Parts(returns)
    parts.load_state_dict(twin.state_dict())
    ddp = DistributedDataParallel(parts, **options)
    for number, step in enumerate(steps):
        expected = mean_gradients(twin, step, number)
        try:
            found = local_gradients(parts, ddp, step, batch(number, rank))
            for name, mine, mean in zip(dict(parts.named_parameters()), found, expected, strict=True):
                if (mine is None) != (mean is None) or (mine is not None and not torch.allclose(mine, mean, atol=1e-6)):  # type: ignore[arg-type]
                    ddp._check_reducer_finalized()
                    return f"step {number}: wrong gradient of {name}"
        except RuntimeError as error:
            return f"step {number} raised on rank {rank}: {error}"
        flat = torch.cat([mine.flatten() for mine in found if mine is not None])
        copies = [torch.empty_like(flat) for _ in range(WORLD_SIZE)]
        dist.all_gather(copies, flat)
        if not torch.equal(*copies):
            return f"step {number}: ranks differ"
    return "right"


def train_all(rank: int, feature: str) -> dict[tuple[str, int], str]:
    outcomes = {}
    for name, (returns, steps) in CASES.items():
        for number, layout in enumerate(LAYOUTS):
            outcomes[name, number] = train(rank, returns, steps, {**FEATURES[feature], **layout})
            dist.barrier()
    return outcomes


@pytest.mark.parametrize(
    "feature", [pytest.param(name, marks=pytest.mark.nightly if name != "plain" else ()) for name in FEATURES]
)
def test_right_or_an_error_on_every_rank(feature: str, tmp_path: Path) -> None:
    of_ranks = run_ranks(train_all, WORLD_SIZE, tmp_path, feature)
    expected = {key: ("raised" if key[0] in REFUSED[feature] else "right") for key in of_ranks[0]}
    for outcomes in of_ranks:
        short = {key: "raised" if "raised on rank" in outcome else outcome for key, outcome in outcomes.items()}
        different = {key: outcomes[key] for key in expected if short[key] != expected[key]}
        assert different == {}


@pytest.mark.parametrize("is_late", [False, True])
def test_a_parameter_out_of_reach_of_the_outputs_is_awaited_if_the_loss_reaches_it(is_late: bool) -> None:
    """The penalty on `pooler` comes before the last gradient of the one bucket, or after it."""
    with group_of_one():
        parts = Parts("head")
        ddp = DistributedDataParallel(parts, find_unused_parameters=True)
        for _ in range(2):  # in these `pooler` is unused
            plain(ddp, parts, batch(0, 0))
        parts.zero_grad()
        # Autograd comes to what was made first last.
        penalised = [parts.pooler.weight] if is_late else [parts.body.weight, parts.pooler.weight]
        before = torch.stack([weight.square().sum() for weight in penalised]).sum()
        (loss_of(ddp(batch(0, 0))) + before).backward()
        ddp._check_reducer_finalized()
        assert parts.pooler.weight.grad is not None
        assert torch.equal(parts.pooler.weight.grad, 2 * parts.pooler.weight)
