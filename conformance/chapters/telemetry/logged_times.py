"""Programs that compare logged times with their own clock, never with a bound that depends on the machine."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from conformance.observation import Facts
from conformance.programs import RankContext, program, rank_step
from conformance.scenario import Scenario
from conformance.truth.expected import AnyOf, Raises, Satisfies

_NAMES = ("forward_compute_time", "backward_compute_time", "backward_comm_time", "backward_compute_comm_overlap_time")

_MOMENTS = (
    "forward_compute_time_start", "backward_compute_time_start", "backward_comm_time_start", "backward_comm_time_end",
)  # fmt: skip
_NUM_STEPS = 3
_NUM_SAMPLED_STEPS = 16

#: Iterations that are sampled whatever the rate (torch DDP: _set_ddp_runtime_logging_sample_rate).
_ALWAYS_SAMPLED = 10


class Work(torch.autograd.Function):
    """Passes values on; multiplies matrices for a while in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, clock: Clock) -> Tensor:
        ctx.clock = clock
        clock.forward_ns = _toil(clock.forward_units)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.clock.backward_ns = _toil(ctx.clock.backward_units)
        return grads[0], None


class Clock:
    """How much work forward and backward do, and how many ns that took."""

    def __init__(self, forward_units: int, backward_units: int) -> None:
        self.forward_units = forward_units
        self.backward_units = backward_units
        self.forward_ns = 0
        self.backward_ns = 0


def _toil(units: int) -> int:
    matrix = torch.ones(64, 64)
    started = time.perf_counter_ns()
    for _ in range(units * 10):
        matrix = torch.mm(matrix, matrix).clamp_(0, 1)
    return time.perf_counter_ns() - started


class Layers(nn.Module):
    """Two layers with work between them: the last layer's gradients precede it, the first layer's follow it."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.last = nn.Linear(3, 2)
        self.clock = clock

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = Work.apply(self.first(inputs), self.clock)
        output: Tensor = self.last(hidden)
        return output


@dataclass(frozen=True)
class Measured:
    """What the program measured of one step, in ns; `began` and `ended` are moments of the wall clock.

    `forward` and `backward` are the work in them, `step` is all of the step, `around_backward` the call of backward.
    """

    forward: int
    backward: int
    step: int
    around_backward: int
    began: int
    ended: int


@program("logged_times", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def logged_times(ctx: RankContext) -> None:
    """Train steps whose forward and backward take `forward` and `backward` units of work, and `pause_ms` between them.

    A step's times are read in the next one, after its forward: by then every DDP has logged them. Observes for each
    step what was logged between what the program measured inside and outside, in ns: `forward`, `backward`,
    `communication`, `overlap` and `moments`; with a pause also `without_pause`; and `averages`, how far the logged
    averages are from those of the logged times. All ranks run it.

    Only a pause shows that a DDP counts a backward from the end of forward on: it is longer than what a busy machine
    adds at the end of a backward, where no DDP counts. Without a pause the verdict would depend on chance.

    With argument `apart` each parameter has a bucket. From the second step on, the last layer's leave before the work
    in backward and the first layer's after it.
    """
    clock = Clock(ctx.arguments["forward"], ctx.arguments["backward"])
    model: Any = ctx.wrap(Layers(clock).to(ctx.device))
    logged: dict[str, list[int]] = {name: [] for name in _NAMES}
    last: Measured | None = None
    pause_s = ctx.arguments.get("pause_ms", 0) / 1e3
    for index in range(_NUM_STEPS + 1):
        turn = rank_step(ctx, index)
        inputs = turn.inputs(4, 3)
        model.zero_grad()
        began, wall = time.perf_counter_ns(), time.time_ns()
        loss = turn.loss(turn.forward(model, inputs))
        if last is not None:
            data = model._get_ddp_logging_data()
            _compare(ctx, index - 1, data, last, paused=pause_s > 0)
            for name in _NAMES:
                logged[name].append(int(data[name]))
        if index == _NUM_STEPS:
            break
        time.sleep(pause_s)
        paused = time.perf_counter_ns()
        turn.backward(loss)
        ended = time.perf_counter_ns()
        last = Measured(clock.forward_ns, clock.backward_ns, ended - began, ended - paused, wall, time.time_ns())
    averages = {name: int(data[f"avg_{name}"]) for name in _NAMES}
    ctx.observe("averages", [abs(averages[name] - sum(times) // len(times)) for name, times in logged.items()])


def _compare(ctx: RankContext, index: int, data: Mapping[str, Any], measured: Measured, *, paused: bool) -> None:
    forward, backward, communication, overlap = (int(data[name]) for name in _NAMES)
    ctx.observe(f"step{index}/forward", [measured.forward, forward, measured.step - measured.backward])
    ctx.observe(f"step{index}/backward", [measured.backward, backward, measured.step - measured.forward])
    if paused:
        ctx.observe(f"step{index}/without_pause", [backward, measured.around_backward])
    ctx.observe(f"step{index}/communication", [1, communication, measured.around_backward])
    least = measured.backward if index and ctx.arguments.get("apart") else 0
    ctx.observe(f"step{index}/overlap", [least, overlap, min(backward, communication)])
    moments = [int(data[name]) for name in _MOMENTS]
    ctx.observe(f"step{index}/moments", [measured.began, *moments, measured.ended])


def _ascend(times: Sequence[float]) -> bool:
    return list(times) == sorted(times)


def _are_at_most(numbers: Sequence[float], most: float) -> bool:
    return max(numbers) <= most


_ASCENDING = Satisfies("times in ascending order", _ascend)


@logged_times.expects
def _logged_times(scenario: Scenario) -> Mapping[int, Facts]:
    names = ["forward", "backward", "communication", "overlap", "moments"]
    if "pause_ms" in scenario.arguments:
        names.append("without_pause")
    facts: dict[str, Any] = {f"step{index}/{name}": _ASCENDING for index in range(_NUM_STEPS) for name in names}
    # Integer division, once or step by step.
    facts["averages"] = Satisfies("differences of at most 3 ns", _are_at_most, (3,))
    return dict.fromkeys(range(scenario.world_size), facts)


@program(
    "sampled_times",
    invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"),
    speaks_for={"averages": ("TELE-07",), "iterations": ("TELE-08",), "changed_alone": ("TELE-08",)},
)
def sampled_times(ctx: RankContext) -> None:
    """Train 16 steps with the sample rate of argument `rate` (torch's own if 0).

    Observes `iterations`, the last sampled one as it is logged after each step, whether times changed only with it, and
    `averages`, how far logged averages are from those of the logged times. All ranks run it.
    """
    model: Any = ctx.wrap(Layers(Clock(0, 0)).to(ctx.device))
    if rate := ctx.arguments["rate"]:
        model._set_ddp_runtime_logging_sample_rate(rate)
    iterations, changes, before = [], 0, ("no iteration", "no time")
    logged: list[int] = []
    off = 0
    for index in range(_NUM_SAMPLED_STEPS):
        turn = rank_step(ctx, index)
        turn.backward(turn.loss(turn.forward(model, turn.inputs(4, 3))))
        data = model._get_ddp_logging_data()
        iterations.append(data["iteration"])
        now = (data["iteration"], data.get("forward_compute_time_start", "no time yet"))
        changes += (now[0] == before[0]) != (now[1] == before[1])
        if now[1] not in (before[1], "no time yet"):
            logged.append(data["forward_compute_time"])
        if logged:
            off = max(off, abs(data["avg_forward_compute_time"] - sum(logged) // len(logged)))
        before = now
    ctx.observe("averages", [off])
    ctx.observe("iterations", iterations)
    ctx.observe("changed_alone", changes)


@sampled_times.expects
def _sampled_times(scenario: Scenario) -> Mapping[int, Facts]:
    rate = scenario.arguments["rate"] or 100
    # A DDP may log a step when it is complete, or when the next one begins: then the tenth is logged in the eleventh.
    answers = []
    for num_always in (_ALWAYS_SAMPLED, _ALWAYS_SAMPLED + 1):
        sampled = [index for index in range(_NUM_SAMPLED_STEPS) if index < num_always or index % rate == 0]
        answers.append([max(i for i in sampled if i <= index) for index in range(_NUM_SAMPLED_STEPS)])
    off = Satisfies("differences of at most 16 ns", _are_at_most, (_NUM_SAMPLED_STEPS,))  # one a division
    facts = {"iterations": AnyOf(*answers), "changed_alone": 0, "averages": off}
    return dict.fromkeys(range(scenario.world_size), facts)


@program("refused_sample_rate", invariants=("leaves_no_trace",))
def refused_sample_rate(ctx: RankContext) -> None:
    """Ask for the sample rates 0 and -1; observe the exceptions. All ranks run it."""
    model: Any = ctx.wrap(Layers(Clock(0, 0)).to(ctx.device))
    for name, rate in (("zero", 0), ("negative", -1)):
        with ctx.catching(name, must=Raises(("ValueError",), ("rate",))):
            model._set_ddp_runtime_logging_sample_rate(rate)
