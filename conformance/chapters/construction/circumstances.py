"""Program `circumstances`: a module is wrapped and trained where and when a user may, and its averages are the same."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from conformance.composed.surroundings import run_within
from conformance.models.integers import RankStep, with_integer_weights
from conformance.programs import RankContext, observe_run, program, rank_step, run_steps, step_on

_NUM_STEPS = 2
#: The step of what is trained before: its data are no other step's.
_BEFORE = _NUM_STEPS
_ordinary = step_on(4, 3)


def _after_a_wrapper(ctx: RankContext, module: nn.Module) -> nn.Module:
    ctx.wrap(module)
    gc.collect()
    return ctx.wrap(module)


def _after_a_training(ctx: RankContext, module: nn.Module) -> nn.Module:
    _ordinary(ctx.wrap(module), rank_step(ctx, _BEFORE))
    gc.collect()
    return ctx.wrap(module)


def _after_a_part(ctx: RankContext, module: nn.Module) -> nn.Module:
    _ordinary(ctx.wrap(nn.Sequential(module.get_submodule("0"))), rank_step(ctx, _BEFORE))
    gc.collect()
    return ctx.wrap(module)


def _with_gradients(ctx: RankContext, module: nn.Module) -> nn.Module:
    _ordinary(module, rank_step(ctx, _BEFORE))
    return ctx.wrap(module)


def _in_evaluation(ctx: RankContext, module: nn.Module) -> nn.Module:
    return ctx.wrap(module.eval()).train()


def _evaluated_first(ctx: RankContext, module: nn.Module) -> nn.Module:
    model, turn = ctx.wrap(module).eval(), rank_step(ctx, _BEFORE)
    with torch.inference_mode():
        turn.forward(model, turn.inputs(4, 3))
    return model.train()


@dataclass(frozen=True)
class Circumstance:
    """How a module is wrapped, and within what the wrapping and each step run: see `run_within`."""

    wrap: Callable[[RankContext, nn.Module], nn.Module] = RankContext.wrap
    wraps_in: str = ""
    steps_in: str = ""


#: Where and when a module may be wrapped and trained.
CIRCUMSTANCES: Mapping[str, Circumstance] = {
    "wrapped_before": Circumstance(_after_a_wrapper),
    "trained_before": Circumstance(_after_a_training),
    "part_trained_before": Circumstance(_after_a_part),
    "holds_gradients": Circumstance(_with_gradients),
    "in_evaluation": Circumstance(_in_evaluation),
    "evaluated_first": Circumstance(_evaluated_first),
    "wrapped_in_a_thread": Circumstance(wraps_in="thread"),
    "trained_in_a_thread": Circumstance(steps_in="thread"),
    "all_in_threads": Circumstance(_after_a_training, "thread", "thread"),
    "anomaly_detection": Circumstance(wraps_in="anomaly", steps_in="anomaly"),
    "wrapped_beside_loader_workers": Circumstance(wraps_in="loader_workers"),
    "trained_beside_loader_workers": Circumstance(steps_in="loader_workers"),
    "function_mode": Circumstance(wraps_in="function_mode", steps_in="function_mode"),
}


@program("circumstances", invariants=("leaves_no_trace",))
def circumstances(ctx: RankContext) -> None:
    """Wrap a module and train it for some steps, in the circumstances that argument `circumstance` names.

    Observes the gradients of each step. All ranks run it.
    """
    around = CIRCUMSTANCES[ctx.arguments["circumstance"]]
    module = with_integer_weights(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), ctx.scenario.seed).to(ctx.device)
    model = run_within(around.wraps_in, lambda: around.wrap(ctx, module))

    def step(model: nn.Module, turn: RankStep) -> None:
        run_within(around.steps_in, lambda: _ordinary(model, turn))

    observe_run(ctx, lambda: run_steps(ctx, module, model, step, _NUM_STEPS))
