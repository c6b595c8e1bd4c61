"""The eager workloads of `ddp-conformance bench`: what is trained, and how."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.models.language import Gpt

Inputs = Callable[[torch.Generator], Tensor]

_ALPHABET = 64


@dataclass(frozen=True)
class Workload:
    """One row of the benchmark.

    `make` builds the module, `inputs` one rank's batch. `options` are given to every DDP of the row, torch's too.
    `num_micro`: backwards per step, all but the last under `no_sync`. `hook`: the name of one of torch's ready-made
    comm hooks, which every DDP of the row uses. `joins`: steps run inside a join context. `is_static`: every step has
    the same graph, and none is local.
    """

    make: Callable[[], nn.Module]
    inputs: Inputs
    options: Mapping[str, Any] = field(default_factory=dict)
    num_micro: int = 1
    hook: str = ""
    joins: bool = False
    is_static: bool = True


class _ResidualCnn(nn.Module):
    """Convolutions with batch normalisation and shortcuts, as in a ResNet."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
            )
            for _ in range(depth)
        )  # fmt: skip
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = F.relu(hidden + block(hidden))
        logits: Tensor = self.head(hidden.mean((2, 3)))
        return logits


class _Experts(nn.Module):
    """A layer of experts of which each step uses half, chosen by the step's number: others get no gradient."""

    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, width)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
            for _ in range(num_experts)
        )
        self._num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.gate(x)
        self._num_calls += 1
        for expert in self.experts[self._num_calls % 2 :: 2]:
            hidden = hidden + expert(hidden)
        return hidden


def layers(num_layers: int, width: int, *, bias: bool = True) -> Callable[[], nn.Module]:
    """Return what builds a chain of linear layers."""
    return lambda: nn.Sequential(*[nn.Linear(width, width, bias=bias) for _ in range(num_layers)])


def _rows(size: int, width: int) -> Inputs:
    return lambda generator: torch.randn(size, width, generator=generator)


def _text(generator: torch.Generator) -> Tensor:
    return torch.randint(0, _ALPHABET, (4, 32), generator=generator)


def _gpt(width: int, depth: int) -> Callable[[], nn.Module]:
    return lambda: Gpt(alphabet=_ALPHABET, width=width, depth=depth)


#: The rows that `ddp-conformance run --bench` measures.
QUICK = ("400 small layers", "small GPT")

WORKLOADS: Mapping[str, Workload] = {
    "400 small layers": Workload(layers(400, 16), _rows(4, 16)),
    "small GPT": Workload(_gpt(64, 4), _text),
    "24 layers of 512": Workload(layers(24, 512), _rows(16, 512)),
    "GPT of width 256": Workload(_gpt(256, 6), _text),
    "4 layers of 2048": Workload(layers(4, 2048, bias=False), _rows(16, 2048)),
    "CNN with buffers": Workload(
        lambda: _ResidualCnn(32, 6), lambda generator: torch.randn(4, 3, 16, 16, generator=generator)
    ),
    "experts": Workload(
        lambda: _Experts(16, 64), _rows(16, 64), options={"find_unused_parameters": True}, is_static=False
    ),
    "5,000 tensors": Workload(layers(2500, 8), _rows(4, 8)),
    "accumulation": Workload(_gpt(64, 4), _text, num_micro=4, is_static=False),
    "fp16 hook": Workload(layers(24, 512), _rows(16, 512), hook="fp16_compress_hook"),
    "bf16 hook": Workload(layers(24, 512), _rows(16, 512), hook="bf16_compress_hook"),
    "join": Workload(_gpt(64, 4), _text, joins=True),
}


def workload_named(name: str) -> Workload:
    """Return the workload of that name; `<n> tensors` for any n are layers of 8, as the growth plot needs them."""
    if name in WORKLOADS:
        return WORKLOADS[name]
    count = int(name.removesuffix(" tensors").replace(",", ""))
    return Workload(layers(count // 2, 8), _rows(4, 8))


def is_workload(name: str) -> bool:
    """Whether `workload_named` knows it."""
    return name in WORKLOADS or name.removesuffix(" tensors").replace(",", "").isdigit()


def register_hook(model: Any, hook: str) -> None:
    """Register torch's ready-made comm hook of that name; nothing for an empty name."""
    if hook:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        ready_made = getattr(default_hooks, hook)
        # Under a name of its own: torch's DDP refuses the name of the bfloat16 hook on the CPU, where gloo can do it.
        model.register_comm_hook(None, lambda state, bucket: ready_made(state, bucket))


def join_context(model: Any, *, joins: bool) -> contextlib.AbstractContextManager[Any]:
    """Return a join context of `model`, or none."""
    return model.join() if joins else contextlib.nullcontext()
