"""The program of `ddp-conformance bench --compiled`: ranks time compiled DDPs in turn.

What decides how torch's class reduces under `torch.compile` is global configuration, read when a module is wrapped,
compiled and called. So every contestant has its own, in force only while it is at work, and `torch.compiler` is reset
before and after.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from conformance.bench.programs.step_time import TimedStep, take_turns
from conformance.bench.programs.workloads import Inputs
from conformance.models.language import Gpt
from conformance.programs.rank_context import RankContext
from conformance.programs.registry import program_without_truth

_ALPHABET = 64
_WRAPPER_FILE = "torch.nn.parallel.distributed"


class _Layers(nn.Module):
    """Like `nn.Sequential`, whose forward Dynamo leaves uncompiled where it is wrapped in torch's class."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


#: name -> (module, one batch). Of several MiB, because torch's optimiser refuses caps below 1 MiB.
COMPILED_WORKLOADS: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "24 layers": (
        lambda: _Layers(24, 256),
        lambda generator: torch.randn(16, 256, generator=generator),
    ),
    "GPT": (
        lambda: Gpt(alphabet=_ALPHABET, width=192, depth=3),
        lambda generator: torch.randint(0, _ALPHABET, (4, 32), generator=generator),
    ),
}
#: MiB per bucket, so that there are several: with one there is nothing to cut, and nothing to overlap with.
_CAP_MB = 1.0


@program_without_truth("compiled_step_time")
def compiled_step_time(ctx: RankContext) -> None:
    """Observe `<label>`: the seconds of each step of each of `arguments["contestants"]`, as `step_time` does.

    And `graphs/<label>`: how many forward graphs were compiled for it.

    A contestant is [label, subject, reduction]: a value of `torch._dynamo.config.optimize_ddp`. `arguments["compiler"]`
    is the backend of `torch.compile`. With `python_reducer` torch's class needs the backward to be compiled by compiled
    autograd; others are given the backward that scripts have.
    """
    make, inputs = COMPILED_WORKLOADS[str(ctx.arguments["workload"])]
    compiler = str(ctx.arguments["compiler"])
    batch = inputs(torch.Generator().manual_seed(ctx.rank)).to(ctx.device)
    torch.compiler.reset()
    with torch._inductor.config.patch(compile_threads=1):  # no process may outlive the scenario
        contestants: list[tuple[str, Callable[[], float]]] = []
        for label, subject, reduction in ctx.arguments["contestants"]:
            torch.manual_seed(0)
            configuration = _Configuration(reduction)
            with configuration.in_force():
                model = ctx.wrap_in(subject, make().to(ctx.device), bucket_cap_mb=_CAP_MB)
                call = torch.compile(model, backend=compiler)
            needs_compiled_autograd = subject == "torch" and reduction == "python_reducer"
            backward = _backward_compiled_with(compiler) if needs_compiled_autograd else Tensor.backward
            step = TimedStep(ctx, model, batch, call=call, backward=backward)
            with configuration.in_force():
                compiled_before = _num_graphs()
                step()
                ctx.observe(f"graphs/{label}", _num_graphs() - compiled_before)
            contestants.append((label, _under(configuration, step)))
        take_turns(ctx, contestants)
    torch.compiler.reset()


class _Configuration:
    """What one contestant has set of torch's global configuration, and what it set itself while it was wrapped."""

    def __init__(self, reduction: str) -> None:
        self._reduction = reduction
        self._own: _Globals | None = None

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        with torch._dynamo.config.patch(optimize_ddp=self._reduction):
            before = _Globals.current()
            if self._own is not None:
                self._own.restore()
            try:
                yield
            finally:
                self._own = _Globals.current()
                before.restore()


@dataclass(frozen=True, slots=True)
class _Globals:
    """What torch's class changes for the whole process when it is wrapped for `python_reducer`.

    `inlines_wrapper`: whether Dynamo captures the class's own forward; then its optimiser splits no graph any more.
    """

    fuses: bool
    fused_bucket_mb: float
    inlines_wrapper: bool

    @staticmethod
    def current() -> _Globals:
        from torch._dynamo import trace_rules  # a second, which only ranks that compile should spend

        config: Any = torch._inductor.config
        inlined = _WRAPPER_FILE in trace_rules.LEGACY_MOD_INLINELIST
        return _Globals(config._fuse_ddp_communication, config._fuse_ddp_bucket_size, inlined)

    def restore(self) -> None:
        from torch._dynamo import trace_rules

        config: Any = torch._inductor.config
        config._fuse_ddp_communication, config._fuse_ddp_bucket_size = self.fuses, self.fused_bucket_mb
        if self.inlines_wrapper != (_WRAPPER_FILE in trace_rules.LEGACY_MOD_INLINELIST):
            if self.inlines_wrapper:
                trace_rules.LEGACY_MOD_INLINELIST.add(_WRAPPER_FILE)
            else:
                trace_rules.LEGACY_MOD_INLINELIST.discard(_WRAPPER_FILE)
            trace_rules.get_legacy_mod_inlinelist.cache_clear()


def _num_graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["aot_autograd"]["total"])


def _under(configuration: _Configuration, step: TimedStep) -> Callable[[], float]:
    def configured_step() -> float:
        with configuration.in_force():
            return step()

    return configured_step


def _backward_compiled_with(compiler: str) -> Callable[[Tensor], None]:
    from torch._dynamo import compiled_autograd

    compile_backward = torch.compile(backend=compiler, fullgraph=True)

    def backward(loss: Tensor) -> None:
        with compiled_autograd._enable(compile_backward):
            loss.backward()

    return backward
