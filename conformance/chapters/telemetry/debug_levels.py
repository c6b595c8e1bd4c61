"""Programs under torch.distributed's debug levels, which must add explanations and change no result."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor, nn
from torch._C._distributed_c10d import DebugLevel, get_debug_level, set_debug_level, set_debug_level_from_env

from conformance.models.integers import RankStep, with_integer_weights
from conformance.observation import Facts, Raised
from conformance.programs import RankContext, observe_run, program, rank_step, run_steps
from conformance.programs.standard_error import written_to_stderr
from conformance.scenario import Scenario
from conformance.truth.expected import Satisfies

_VARIABLE = "TORCH_DISTRIBUTED_DEBUG"
_TIMES = ("forward compute time", "backward compute time", "backward comm time", "backward compute comm overlap time")


class Net(nn.Module):
    """Two layers with `width` columns between them, and a third that is used on demand."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.last = nn.Linear(width, 2)
        self.spare = nn.Linear(3, 2)

    def forward(self, inputs: Tensor, with_spare: bool) -> Tensor:
        output: Tensor = self.last(self.first(inputs))
        return output + self.spare(inputs) if with_spare else output


@contextmanager
def _debug_level(name: str, *, by_environment: bool) -> Iterator[None]:
    level = get_debug_level()
    with mock.patch.dict(os.environ, {_VARIABLE: name} if by_environment else {}):
        try:
            if by_environment:
                set_debug_level_from_env()
            else:
                set_debug_level(getattr(DebugLevel, name))
            yield
        finally:
            set_debug_level(level)


def _step(scenario: Scenario, model: Any, turn: RankStep) -> None:
    with_spare = scenario.arguments.get("spare_by_rank") is None or turn.rank == 0
    turn.backward(turn.loss(turn.forward(model, turn.inputs(4, 3), with_spare)))


def _train(ctx: RankContext, model: Any, num_steps: int = 3, with_spare: bool = True) -> None:
    for index in range(num_steps):
        turn = rank_step(ctx, index)
        turn.backward(turn.loss(turn.forward(model, turn.inputs(4, 3), with_spare)))


@program("debug_level", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def debug_level(ctx: RankContext) -> None:
    """Train three steps at the debug level of argument `level`, set by environment if argument `by_environment`.

    With `spare_by_rank` only rank 0 uses one of the layers. Observes gradients, and `level` as torch reads it back.
    All ranks run it.
    """
    module = with_integer_weights(Net(), ctx.scenario.seed).to(ctx.device)
    with _debug_level(ctx.arguments["level"], by_environment=bool(ctx.arguments.get("by_environment"))):
        ctx.observe("level", get_debug_level().name, must=ctx.arguments["level"])
        observe_run(ctx, lambda: run_steps(ctx, module, ctx.wrap(module), lambda m, t: _step(ctx.scenario, m, t), 3))


@program("debugged_mistake", invariants=("leaves_no_trace",))
def debugged_mistake(ctx: RankContext) -> None:
    """Leave a layer unused without `find_unused_parameters`, at debug level `level`; observe `answer`, the error."""
    module = with_integer_weights(Net(), ctx.scenario.seed).to(ctx.device)
    with (
        _debug_level(ctx.arguments["level"], by_environment=bool(ctx.arguments.get("by_environment"))),
        ctx.catching("answer"),
    ):
        _train(ctx, ctx.wrap(module), num_steps=2, with_spare=False)


def _names_both(got: Any) -> bool:
    return isinstance(got, Raised) and "spare.weight" in got.message and "spare.bias" in got.message


@debugged_mistake.expects
def _debugged_mistake(scenario: Scenario) -> Mapping[int, Facts]:
    answer = Satisfies("an error that names spare.weight and spare.bias", _names_both)
    return {rank: {"answer": answer} for rank in range(scenario.world_size)}


@program("debugged_milestones", invariants=("leaves_no_trace",))
def debugged_milestones(ctx: RankContext) -> None:
    """Train three steps at debug level `level`; observe what was written to stderr by then. All ranks run it.

    `constructed` and `trained`: whether anything was written in that time, and in it the name of a parameter.
    """
    module = with_integer_weights(Net(), ctx.scenario.seed).to(ctx.device)
    with _debug_level(ctx.arguments["level"], by_environment=False):
        with written_to_stderr() as text:
            model = ctx.wrap(module)
        ctx.observe("constructed", ["last.weight" in text(), "find_unused_parameters" in text()])
        with written_to_stderr() as text:
            _train(ctx, model)
        ctx.observe("trained", ["last.weight" in text(), "bucket" in text()])


@program("debugged_times", invariants=("leaves_no_trace",))
def debugged_times(ctx: RankContext) -> None:
    """Train three steps at debug level `level`; observe `told`, whether stderr names each of the four times.

    All ranks run it.
    """
    module = with_integer_weights(Net(), ctx.scenario.seed).to(ctx.device)
    with _debug_level(ctx.arguments["level"], by_environment=False), written_to_stderr() as text:
        _train(ctx, ctx.wrap(module))
    said = text().lower().replace("_", " ")
    ctx.observe("told", [name in said for name in _TIMES])


@debugged_times.expects
def _times(scenario: Scenario) -> Mapping[int, Facts]:
    said = [scenario.arguments["level"] == "DETAIL"] * len(_TIMES)
    return {rank: {"told": said} for rank in range(scenario.world_size)}


@program("logged_milestones", invariants=("leaves_no_trace",))
def logged_milestones(ctx: RankContext) -> None:
    """Train three steps with TORCH_CPP_LOG_LEVEL=INFO in the environment and debug level OFF.

    Observes `told`, whether stderr names an option of the wrapper, and buckets. All ranks run it.
    """
    module = with_integer_weights(Net(), ctx.scenario.seed).to(ctx.device)
    told_by_level = mock.patch.dict(os.environ, {"TORCH_CPP_LOG_LEVEL": "INFO"})
    with told_by_level, _debug_level("OFF", by_environment=False), written_to_stderr() as text:
        _train(ctx, ctx.wrap(module))
    ctx.observe("told", ["find_unused_parameters" in text(), "bucket" in text()])


@logged_milestones.expects
def _logged(scenario: Scenario) -> Mapping[int, Facts]:
    return {rank: {"told": [True, True]} for rank in range(scenario.world_size)}


@debugged_milestones.expects
def _milestones(scenario: Scenario) -> Mapping[int, Facts]:
    said = [scenario.arguments["level"] != "OFF"] * 2
    return {rank: {"constructed": said, "trained": said} for rank in range(scenario.world_size)}
