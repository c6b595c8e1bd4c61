"""Program `step_profile`: where the time of a step goes, by the functions of the subject's own package."""

import cProfile
import pstats
import sys
import time
from pathlib import Path
from typing import Any

import torch

from conformance.bench.programs.step_time import TimedStep
from conformance.bench.programs.workloads import register_hook, workload_named
from conformance.programs.rank_context import RankContext
from conformance.programs.registry import program_without_truth

_WARM_UP_STEPS = 5


@program_without_truth("step_profile")
def step_profile(ctx: RankContext) -> None:
    """Train `arguments["rounds"]` steps of the subject under Python's profiler, on the clock of this process's CPU.

    Observes `step_ms`, the milliseconds of a step, and `functions`: file and line of each function of the subject's
    package, its calls per step, and its milliseconds per step, with those of what it calls in C (torch's operators,
    collectives) but not of other Python functions. A profile makes every Python call dearer. All ranks run it.
    """
    workload, rounds = workload_named(str(ctx.arguments["workload"])), int(ctx.arguments["rounds"])
    batch = workload.inputs(torch.Generator().manual_seed(ctx.rank)).to(ctx.device)
    torch.manual_seed(0)
    model: Any = ctx.wrap(workload.make().to(ctx.device), **workload.options)
    register_hook(model, workload.hook)
    step = TimedStep(ctx, model, batch, workload=workload, clock=time.process_time)
    for _ in range(_WARM_UP_STEPS):
        step()
    profile = cProfile.Profile(time.process_time)
    profile.enable()
    seconds = sum(step() for _ in range(rounds))
    profile.disable()
    ctx.observe("step_ms", 1e3 * seconds / rounds)
    ctx.observe("functions", _own_functions(profile, _folder_of(model), rounds))


def _folder_of(model: Any) -> str:
    file = sys.modules[type(model).__module__].__file__
    return str(Path(file or "").parent)


def _own_functions(profile: cProfile.Profile, folder: str, rounds: int) -> list[list[Any]]:
    """Return [function, calls, milliseconds] per step, the dearest first."""
    found: Any = pstats.Stats(profile)
    own: dict[tuple[str, int, str], list[float]] = {}
    for function, (_, calls, own_time, _, callers) in found.stats.items():
        if function[0].startswith(folder):
            entry = own.setdefault(function, [0, 0.0])
            entry[0], entry[1] = calls, entry[1] + own_time
        elif function[0] == "~":  # written in C
            for caller, (_, _, time_there, _) in callers.items():
                if caller[0].startswith(folder):
                    own.setdefault(caller, [0, 0.0])[1] += time_there
    rows = [
        [f"{Path(file).relative_to(folder)}:{line} {name}", calls / rounds, 1e3 * total / rounds]
        for (file, line, name), (calls, total) in own.items()
    ]
    return sorted(rows, key=lambda row: -row[2])
