"""Program `compiled_mistake`: user errors under torch.compile, which must raise with a remedy and do no damage."""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from conformance.chapters.compiled.compiling import PRELOAD, CompilingContext, compiling
from conformance.models.integers import RankStep, with_integer_weights
from conformance.observation import Facts, Raised
from conformance.programs import RankContext, program, rank_step
from conformance.scenario import Scenario
from conformance.truth.expected import AnyOf, Raises
from conformance.truth.steps import gradients, simulate_steps

_ERROR = ("RuntimeError", "ValueError", "TypeError")


class Forgetful(nn.Module):
    """Two layers that are used and a third that is not; with `breaks`, Dynamo cannot make one graph of it."""

    def __init__(self, *, spare: bool = False, breaks: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.spare = nn.Linear(3, 3) if spare else None
        self.breaks = breaks
        with_integer_weights(self)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            if self.breaks:
                torch._dynamo.graph_break()
            hidden = layer(hidden)
        return hidden


def _step(ctx: RankContext, model: Any, index: int = 0) -> None:
    turn = rank_step(ctx, index)
    turn.backward(turn.loss(turn.forward(model, turn.inputs(4, 3))))


def _raising_backend(ctx: CompilingContext) -> None:
    def backend(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        raise ArithmeticError("no kernel for this")

    model = ctx.uncompiled.wrap(Forgetful().to(ctx.device), bucket_cap_mb=1e-5)
    _step(ctx, torch.compile(model, backend=backend))


def _added(ctx: CompilingContext) -> None:
    module = Forgetful().to(ctx.device)
    model = ctx.wrap(module)
    module.layers.append(nn.Linear(3, 3).to(ctx.device))
    _step(ctx, model)


def _replaced(ctx: CompilingContext) -> None:
    module = Forgetful().to(ctx.device)
    model = ctx.wrap(module)
    module.layers[0].weight = nn.Parameter(torch.ones(3, 3, device=ctx.device))
    _step(ctx, model)


def _thawed(ctx: CompilingContext) -> None:
    module = Forgetful().to(ctx.device)
    module.layers[0].weight.requires_grad_(False)
    model = ctx.wrap(module)
    module.layers[0].weight.requires_grad_(True)
    _step(ctx, model)


def _no_parameter(ctx: CompilingContext) -> None:
    _step(ctx, ctx.wrap(nn.Sequential(nn.ReLU())))


def _mixed_devices(ctx: CompilingContext) -> None:
    module = Forgetful().to(ctx.device)
    module.layers[1].to("meta")
    _step(ctx, ctx.wrap(module))


def _two_groups(ctx: CompilingContext) -> None:
    mesh = init_device_mesh(ctx.device.type, (ctx.world_size,))
    _step(ctx, ctx.wrap(Forgetful().to(ctx.device), device_mesh=mesh, process_group=ctx.process_group))


def _unused(ctx: CompilingContext) -> nn.Module:
    module = Forgetful(spare=True).to(ctx.device)
    _step(ctx, ctx.wrap(module))
    return module


def _many_graphs(ctx: CompilingContext) -> nn.Module:
    module = Forgetful(breaks=True).to(ctx.device)
    _step(ctx, ctx.wrap(module))
    return module


def _local_too_late(ctx: CompilingContext) -> nn.Module:
    module = Forgetful().to(ctx.device)
    model: Any = ctx.wrap(module)
    turn = rank_step(ctx, 0)
    synchronised = turn.loss(turn.forward(model, turn.inputs(4, 3)))
    with model.no_sync():
        local = turn.loss(turn.forward(model, turn.inputs(4, 3, micro=1)), 1)
    turn.backward(local)
    turn.backward(synchronised)
    return module


def _with_spare(option: str, ctx: CompilingContext) -> nn.Module:
    module = Forgetful(spare=True).to(ctx.device)
    _step(ctx, ctx.uncompiled.wrap(module, **{option: True}))
    return module


@dataclass(frozen=True)
class _Mistake:
    """A user's mistake, and the error that it must raise on every rank.

    A DDP may support what the mistake tries: `make` then returns the module, and `truth` runs on a replica, with the
    `spare` layer or without, the step whose gradients the DDP must have averaged.
    """

    make: Callable[[CompilingContext], nn.Module | None]
    raises: Raises
    truth: Callable[[nn.Module, RankStep], None] | None = None
    spare: bool = False


def _one_backward(module: nn.Module, turn: RankStep) -> None:
    turn.backward(turn.loss(module(turn.inputs(4, 3))))


def _two_backwards(module: nn.Module, turn: RankStep) -> None:
    _one_backward(module, turn)
    turn.backward(turn.loss(module(turn.inputs(4, 3, micro=1)), 1))


_MISTAKES: Mapping[str, _Mistake] = {
    "raising_backend": _Mistake(_raising_backend, Raises(("Exception",), ("no kernel for this", "bucket_cap_mb"))),
    "added_parameter": _Mistake(_added, Raises(_ERROR, ("layers.2.weight", "wrap"))),
    "replaced_parameter": _Mistake(_replaced, Raises(_ERROR, ("layers.0.weight",))),
    "thawed_parameter": _Mistake(_thawed, Raises(_ERROR, ("layers.0.weight", "wrap"))),
    "no_parameter": _Mistake(_no_parameter, Raises(_ERROR, ("parameter", "gradient"))),
    "mixed_devices": _Mistake(_mixed_devices, Raises(_ERROR, ("device", "meta"))),
    "two_groups": _Mistake(_two_groups, Raises(_ERROR, ("process_group", "device_mesh"))),
    "unused_parameter": _Mistake(
        _unused, Raises(("Exception",), ("spare.weight", "find_unused_parameters")), _one_backward, spare=True
    ),
    "many_graphs": _Mistake(_many_graphs, Raises(("Exception",), ("optimize_ddp",)), _one_backward),
    "local_too_late": _Mistake(_local_too_late, Raises(("RuntimeError",), ("no_sync",)), _two_backwards),
    # Compiled autograd does not report the end of a backward, with which ranks may have to exchange what they used.
    **{
        f"captured_{option}": _Mistake(
            partial(_with_spare, option),
            Raises(("RuntimeError",), ("compiled autograd", option)),
            _one_backward,
            spare=True,
        )
        for option in ("find_unused_parameters", "static_graph")
    },
}


@program("compiled_mistake", invariants=("leaves_no_trace",), preload=PRELOAD)
def compiled_mistake(ctx: RankContext) -> None:
    """Make the mistake that argument `mistake` names, and then train correctly.

    Observes `answer`, the exception with its notes and those of its causes, or the gradients where there was none; and
    `afterwards`, a gradient of a module that was wrapped and compiled after it. All ranks run it.
    """
    with compiling(ctx) as (inside, _):
        try:
            module = _MISTAKES[ctx.arguments["mistake"]].make(inside)
        except Exception as error:
            raised = Raised.of(error, traceback.format_exc())
            ctx.observe("answer", Raised(raised.type, raised.bases, _in_full(error), raised.traceback))
        else:
            ctx.observe("answer", None if module is None else gradients("step0", module))
        module = Forgetful().to(ctx.device)
        _step(inside, inside.wrap(module), 1)
        ctx.observe("afterwards", module.layers[1].bias.grad)


def _in_full(error: BaseException | None) -> str:
    """Return what Python prints of an error and its causes, without the frames."""
    lines: list[str] = []
    while error is not None:
        lines += [str(error), *getattr(error, "__notes__", ())]
        error = error.__cause__ or error.__context__
    return "\n".join(lines)


@compiled_mistake.expects
def _answered(scenario: Scenario) -> Mapping[int, Facts]:
    mistake = _MISTAKES[scenario.arguments["mistake"]]
    ranks = range(scenario.world_size)
    afterwards = simulate_steps([Forgetful() for _ in ranks], _second_step, 1)
    facts: dict[int, dict[str, Any]] = {
        rank: {"answer": mistake.raises, "afterwards": afterwards[rank]["step0/grad/layers.1.bias"]} for rank in ranks
    }
    if mistake.truth is not None:
        right = simulate_steps([Forgetful(spare=mistake.spare) for _ in ranks], mistake.truth, 1)
        for rank in ranks:
            facts[rank]["answer"] = AnyOf(dict(right[rank]), mistake.raises)
    return facts


def _second_step(module: nn.Module, turn: RankStep) -> None:
    _one_backward(module, RankStep(turn.rank, turn.step + 1))
