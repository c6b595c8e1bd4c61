"""The program of `ddp-conformance bench`: ranks time the steps of several DDPs in turn, and measure their memory."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.bench.programs.workloads import Workload, join_context, register_hook, workload_named
from conformance.programs.rank_context import RankContext
from conformance.programs.registry import program_without_truth

#: The subject of the contestant without a DDP.
NO_DDP = "floor"

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@program_without_truth("step_time")
def step_time(ctx: RankContext) -> None:
    """Observe `<label>`: the seconds of each step of each of `arguments["contestants"]`, in the same order.

    A contestant is [label, subject, options], with a fourth item where its workload is not `arguments["workload"]`;
    subject `NO_DDP` trains without a DDP. In each round every contestant takes one step (forward, backward, optimiser,
    zero_grad) that counts, in turn (`take_turns`). Times are from a barrier to the end of the step, on the
    `arguments["clock"]`: of the wall, or of this process's CPU.
    """
    clock = CLOCKS[str(ctx.arguments.get("clock", "wall"))]
    contestants: list[tuple[str, Callable[[], float]]] = []
    for label, subject, options, *own in ctx.arguments["contestants"]:
        workload = workload_named(str(own[0] if own else ctx.arguments["workload"]))
        batch = workload.inputs(torch.Generator().manual_seed(ctx.rank)).to(ctx.device)
        contestants.append((label, _contestant(ctx, workload, batch, subject, options, clock)))
    take_turns(ctx, contestants)


def _contestant(
    ctx: RankContext, workload: Workload, batch: Tensor, subject: str, options: Any, clock: Callable[[], float]
) -> TimedStep:
    torch.manual_seed(0)
    module = workload.make().to(ctx.device)
    if subject == NO_DDP:
        return Floor(ctx, module, batch, workload=workload, clock=clock)
    model = ctx.wrap_in(subject, module, **{**workload.options, **options})
    register_hook(model, workload.hook)
    return TimedStep(ctx, model, batch, workload=workload, clock=clock)


def take_turns(ctx: RankContext, contestants: Sequence[tuple[str, Callable[[], float]]]) -> None:
    """Let every contestant take one step in each of `arguments["rounds"]` rounds; observe the seconds that they return.

    The order turns by one from round to round, so that what disturbs the machine disturbs all alike. In each turn
    `arguments["steps_before"]` steps go before the one that counts: a training finds its own data and code in the
    processor's caches, and behind the others' steps they are not there.
    """
    seconds: dict[str, list[float]] = {label: [] for label, _ in contestants}
    for round_index in range(int(ctx.arguments["rounds"])):
        turn = round_index % len(contestants)
        for label, step in [*contestants[turn:], *contestants[:turn]]:
            for _ in range(int(ctx.arguments.get("steps_before", 0))):
                step()
            seconds[label].append(step())
    for label, values in seconds.items():
        ctx.observe(label, values)


class TimedStep:
    """One contestant: each call is a training step, from a barrier to its end, and returns its seconds. Collective."""

    def __init__(
        self,
        ctx: RankContext,
        model: nn.Module,
        batch: Any,
        *,
        call: Callable[[Any], Any] | None = None,
        backward: Callable[[Tensor], None] = Tensor.backward,
        workload: Workload | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Train `model` on `batch`, through `call` (a compiled form of it) where given."""
        self._ctx = ctx
        self._model: Any = model
        self._call = model if call is None else call
        self._backward = backward
        self._batch = batch
        self._num_micro = 1 if workload is None else workload.num_micro
        self._joins = workload is not None and workload.joins
        self._clock = clock
        self._optimizer = torch.optim.SGD(model.parameters(), lr=2**-10)

    def __call__(self) -> float:
        """Take one step."""
        dist.barrier(self._ctx.process_group)
        begin = self._clock()
        self._train()
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._ctx.device.type != "cpu":
            torch.accelerator.synchronize()
        return self._clock() - begin

    def _train(self) -> None:
        with self._joining():
            for micro in range(self._num_micro):
                with contextlib.nullcontext() if micro == self._num_micro - 1 else self._locally():
                    self._backward(self._call(self._batch).float().square().mean())

    def _joining(self) -> contextlib.AbstractContextManager[Any]:
        return join_context(self._model, joins=self._joins)

    def _locally(self) -> contextlib.AbstractContextManager[Any]:
        return self._model.no_sync()


class Floor(TimedStep):
    """A step without a DDP, and one all-reduce of as many bytes as gradients have, of which nobody makes use."""

    def __init__(self, ctx: RankContext, model: nn.Module, batch: Any, **kwargs: Any) -> None:
        """Allocate what is sent: one tensor, in the dtype in which the workload's comm hook sends."""
        super().__init__(ctx, model, batch, **kwargs)
        hook = kwargs["workload"].hook
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(hook[:4], torch.float32)
        self._sent = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=dtype, device=ctx.device)

    def _train(self) -> None:
        super()._train()
        dist.all_reduce(self._sent, group=self._ctx.process_group)

    def _joining(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def _locally(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


#: Steps of which the last one's peak counts: buckets are planned anew before it.
_NUM_MEMORY_STEPS = 4
#: Of so many measurements the least counts. What a thread of gloo's frees, because it was the last to hold an old
#: bucket, the profiler does not see, and takes for memory that is still there.
_NUM_MEMORY_MEASUREMENTS = 3


@program_without_truth("peak_memory")
def peak_memory(ctx: RankContext) -> None:
    """Observe `<label>`: the most bytes that tensors took at one time in a late step, for each contestant.

    Contestants and workload are those of `step_time`. Counted from before the module is built: what a DDP allocates for
    good counts.
    """
    workload = workload_named(str(ctx.arguments["workload"]))
    batch = workload.inputs(torch.Generator().manual_seed(ctx.rank)).to(ctx.device)
    for label, subject, options in ctx.arguments["contestants"]:
        make = functools.partial(_contestant, ctx, workload, batch, subject, options, time.time)
        ctx.observe(label, min(_peak_bytes(ctx, make) for _ in range(_NUM_MEMORY_MEASUREMENTS)))


def _peak_bytes(ctx: RankContext, make: Callable[[], TimedStep]) -> int:
    gc.collect()  # what the last contestant leaves behind is not this one's
    if ctx.device.type == "cuda":
        before = torch.cuda.memory_allocated()
        step = make()
        for _ in range(_NUM_MEMORY_STEPS - 1):
            step()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step = make()
        for _ in range(_NUM_MEMORY_STEPS - 1):
            step()
        gc.collect()  # what the collector frees by chance in the middle of a step would count in it
        with torch.profiler.record_function(_LAST_STEP):
            step()
    events = profile.profiler.kineto_results.events()
    begin = min(event.start_ns() for event in events if event.name() == _LAST_STEP)
    allocated, peak = 0, 0
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        if event.start_ns() >= begin:
            peak = max(peak, allocated)
    return peak


_LAST_STEP = "conformance: the step whose peak counts"
