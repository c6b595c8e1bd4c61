"""Small models for the tests of compilation, and ways to look at what compilers are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn

from ddp_impl import DistributedDataParallel
from ddp_impl.buckets.plan import ParameterSpec
from ddp_impl.compile.compiled_calls import CompiledCalls, WhereAveraged
from ddp_impl.compile.fusion import Fusion
from ddp_impl.compile.graph_split import AveragedParameters

WIDTH = 4
#: Bytes of one bias and of one weight of `layers()`.
BIAS_BYTES = 4 * WIDTH
WEIGHT_BYTES = 4 * WIDTH * WIDTH


def average_in_graph(ddp: DistributedDataParallel, fusion: Fusion = Fusion.CONCAT) -> None:
    """Have the compiled backward of `ddp` average, whatever torch is configured to do."""
    body = {"reduction": WhereAveraged.IN_GRAPH, "fusion": fusion}
    ddp._compiled_calls.__class__ = type("InGraphCalls", (CompiledCalls,), body)


def layers(count: int) -> nn.Sequential:
    modules: list[nn.Module] = []
    for _ in range(count):
        modules += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*modules[:-1])


class Calls(nn.Module):
    """Three linear layers `a`, `b`, `c`, put together by a function given as text of a test."""

    def __init__(self, body: Callable[..., Any]) -> None:
        """Take `body(module, *inputs)`, which computes the output."""
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.body = body

    def forward(self, *inputs: Any) -> Any:
        return self.body(self, *inputs)


class Recorder:
    """A backend that keeps every graph that it is given and runs it as it is, or through another backend."""

    def __init__(self, backend: Callable[..., Any] | None = None) -> None:
        self.backend = backend
        self.graphs: list[fx.GraphModule] = []
        self.inputs: list[list[Any]] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        self.graphs.append(gm)
        self.inputs.append(list(example_inputs))
        return gm.forward if self.backend is None else self.backend(gm, example_inputs, **options)


def averaged_parameters(module: nn.Module, leave_out: Sequence[str] = ()) -> AveragedParameters:
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad and n not in leave_out]
    specs = [
        ParameterSpec(index, name, p.numel() * p.element_size(), (str(p.dtype), str(p.device)))
        for index, (name, p) in enumerate(named)
    ]
    return AveragedParameters([parameter for _, parameter in named], specs)


def capture(module: nn.Module, *inputs: Any) -> tuple[fx.GraphModule, list[Any]]:
    torch._dynamo.reset()
    recorder = Recorder()
    torch.compile(module, backend=recorder, fullgraph=True)(*inputs)
    (graph,) = recorder.graphs
    return graph, recorder.inputs[0]


def gradients(module: nn.Module, call: Callable[..., Tensor], *inputs: Any) -> dict[str, Tensor | None]:
    module.zero_grad()
    output = call(*inputs)
    output.sum().backward()
    named = {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
    return {"output": output.detach(), **named}


def assert_same(ours: dict[str, Tensor | None], truth: dict[str, Tensor | None]) -> None:
    assert ours.keys() == truth.keys()
    for name, expected in truth.items():
        actual = ours[name]
        assert (actual is None) == (expected is None), name
        if expected is not None:
            assert actual is not None
            torch.testing.assert_close({name: actual}, {name: expected})
