"""How fast a DDP is beside torch's own: paired ratios of step times, measured on the same ranks in one run.

Absolute times say more about the machine than about the DDP, so none is reported. For each workload and set of options
the subject and torch's DDP take turns; each round gives one ratio, and the median of the ratios is the result, printed
with its quartiles. Another contestant, torch's DDP a second time, shows how much of a ratio is noise.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conformance.backends.backend import Backend
from conformance.errors import ConformanceError
from conformance.scenario import Scenario
from conformance.subjects.subject import Subject, get_subject
from conformance.workers.controller import Controller

#: Options whose step times are compared; the reference is always torch's DDP with its defaults.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "bucket view": {"gradient_as_bucket_view": True},
    "find unused": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
}
#: What decides who averages the gradients of a compiled module (`torch._dynamo.config.optimize_ddp`); torch's default
#: is the first.
REDUCTIONS = ("ddp_optimizer", "python_reducer")
_AUTO = "auto buckets"
_WARM_UP_ROUNDS = 5
_DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class Ratio:
    """Step time of a contestant over that of the reference: median and quartiles over rounds."""

    workload: str
    variant: str
    reference: str
    median: float
    lower: float
    upper: float
    rounds: int


def measure(
    subject: Subject, backend: Backend, workload: str, *, world_size: int = 2, rounds: int = 60
) -> tuple[Ratio, ...]:
    """Compare `subject` with torch's DDP on one workload.

    For each variant: the ratio to torch's DDP with the same options and with its defaults; where the subject chooses
    bucket caps by itself, the ratio to itself with default caps; last, torch's DDP against itself.

    Raises `ConformanceError` when a rank did not finish.
    """
    contestants: list[list[Any]] = [["torch", "torch", {}], ["torch again", "torch", {}]]
    for variant, options in VARIANTS.items():
        contestants.append([variant, subject.target, dict(options)])
        if options:
            contestants.append([f"torch {variant}", "torch", dict(options)])
    if chooses_caps := "auto_buckets" in subject.capabilities:
        contestants.append([_AUTO, subject.target, {"bucket_cap_mb": "auto"}])
    facts = _run("step_time", subject, backend, workload, world_size, rounds, {"contestants": contestants})
    seconds = _step_seconds(facts, contestants)
    ratios = []
    for variant, options in VARIANTS.items():
        if options:
            ratios.append(
                _ratio(workload, variant, "torch, same options", seconds[variant], seconds[f"torch {variant}"])
            )
        ratios.append(_ratio(workload, variant, "torch's default", seconds[variant], seconds["torch"]))
    if chooses_caps:
        ratios.append(_ratio(workload, _AUTO, "its default", seconds[_AUTO], seconds["default"]))
    ratios.append(_ratio(workload, "torch itself", "torch's default", seconds["torch again"], seconds["torch"]))
    return tuple(ratios)


def measure_compiled(
    subject: Subject, backend: Backend, workload: str, *, world_size: int = 2, rounds: int = 60, compiler: str
) -> tuple[Ratio, ...]:
    """Compare the compiled `subject` with torch's compiled DDP on one workload of `compiled_step_time`.

    The subject with each of `REDUCTIONS` is compared with torch's DDP with each; last, torch's DDP with itself.
    `compiler` is the backend of `torch.compile`. Raises `ConformanceError` when a rank did not finish, or when torch's
    graphs were not split although they had to be: ratios would then be about something else.
    """
    contestants = [
        [f"{name}{reduction}", target, reduction]
        for name, target in (("", subject.target), ("torch ", "torch"))
        for reduction in REDUCTIONS
    ]
    default = f"torch {REDUCTIONS[0]}"
    contestants.append(["torch again", "torch", REDUCTIONS[0]])
    arguments = {"contestants": contestants, "compiler": compiler}
    facts = _run("compiled_step_time", subject, backend, workload, world_size, rounds, arguments)
    for rank, seen in facts.items():
        if seen[f"graphs/{default}"] < 2:
            raise ConformanceError(
                f"bench: {workload!r} was to be split by torch's optimiser, but on rank {rank} it compiled "
                f"{seen[f'graphs/{default}']} graph(s); choose a larger model"
            )
    seconds = _step_seconds(facts, contestants)
    ratios = [
        _ratio(workload, variant, f"torch's {reference}", seconds[variant], seconds[f"torch {reference}"])
        for variant in REDUCTIONS
        for reference in REDUCTIONS
    ]
    ratios.append(
        _ratio(workload, "torch itself", f"torch's {REDUCTIONS[0]}", seconds["torch again"], seconds[default])
    )
    return tuple(ratios)


def _run(
    program: str,
    subject: Subject,
    backend: Backend,
    workload: str,
    world_size: int,
    rounds: int,
    arguments: Mapping[str, Any],
) -> dict[int, Mapping[str, Any]]:
    """Return every rank's facts."""
    scenario = Scenario(
        id=f"bench/{workload}",
        requirements=("BENCH",),
        program=program,
        world_size=world_size,
        arguments={"workload": workload, "rounds": rounds + _WARM_UP_ROUNDS, **arguments},
        deadline_s=_DEADLINE_S,
        recorded=False,
        min_collectives=0,
    )
    with Controller(backend) as controller:
        observations = controller.run(scenario, subject)
    for observation in observations.values():
        if observation.fate.kind != "returned":
            raise ConformanceError(f"bench: rank {observation.rank} {observation.fate}; {workload!r} was not measured")
    return {rank: observation.facts for rank, observation in observations.items()}


def _step_seconds(
    facts: Mapping[int, Mapping[str, Any]], contestants: Sequence[Sequence[Any]]
) -> dict[str, list[float]]:
    """Return the seconds of each contestant's steps. A step ends when the slowest rank's does."""
    return {
        str(label): [max(times) for times in zip(*(seen[label] for seen in facts.values()), strict=True)]
        for label, *_ in contestants
    }


def _ratio(workload: str, variant: str, reference: str, ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    values = [a / b for a, b in zip(ours[_WARM_UP_ROUNDS:], theirs[_WARM_UP_ROUNDS:], strict=True)]
    lower, median, upper = statistics.quantiles(values, n=4)
    return Ratio(workload, variant, reference, median, lower, upper, len(values))


def run(
    ddp: str,
    backend: Backend,
    world_size: int,
    rounds: int,
    out: Path | None,
    progress: Callable[[str], object],
    *,
    compiler: str | None = None,
) -> tuple[Ratio, ...]:
    """Measure every workload, calling `progress(workload)` before each; write the ratios to `out` as JSON if given.

    With `compiler`, the name of a backend of `torch.compile`, compiled DDPs are compared.
    """
    from conformance.programs.compiled_step_time import COMPILED_WORKLOADS
    from conformance.programs.step_time import WORKLOADS

    subject = get_subject(ddp)
    ratios: list[Ratio] = []
    for workload in WORKLOADS if compiler is None else COMPILED_WORKLOADS:
        progress(workload)
        if compiler is None:
            ratios += measure(subject, backend, workload, world_size=world_size, rounds=rounds)
        else:
            ratios += measure_compiled(
                subject, backend, workload, world_size=world_size, rounds=rounds, compiler=compiler
            )
    if out is not None:
        out.write_text(json.dumps([asdict(ratio) for ratio in ratios], indent=2) + "\n")
    return tuple(ratios)
