"""Measures step times of a DDP and of torch's DDP on the same ranks in one run, and returns their ratios.

Absolute times depend on the machine more than on the DDP, so this module reports none. For each workload and set of
options, the subject and torch's DDP take turns. Each round gives one ratio; the result is the median ratio with its
quartiles. torch's DDP takes part a second time, which shows how much of a ratio is noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.backends.backend import Backend
from conformance.bench.ratio import DEFAULT, FLOOR, ITSELF, Ratio, quartiles
from conformance.errors import ConformanceError
from conformance.scenario import Scenario
from conformance.subjects.subject import Subject
from conformance.workers.controller import Controller
from conformance.workers.zygote_process import NO_MEMORY_FILL

#: The sets of options that the benchmark measures, besides torch's DDP with its defaults.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "bucket view": {"gradient_as_bucket_view": True},
    "find unused": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
}
#: Values of `torch._dynamo.config.optimize_ddp`, which selects who averages the gradients of a compiled module; the
#: first is torch's default.
REDUCTIONS = ("ddp_optimizer", "python_reducer")
_AUTO = "auto buckets"
#: What the program `step_time` takes for the subject that trains without a DDP.
NO_DDP = "floor"
WARM_UP_ROUNDS = 5
#: How many steps a DDP takes in its turn before the one that counts (docs/decisions/steps_in_a_row.md).
STEPS_BEFORE = 1
_DEADLINE_S = 600.0


def measure(
    subject: Subject,
    backend: Backend,
    workload: str,
    *,
    world_size: int = 2,
    rounds: int = 60,
    clock: str = "wall",
    steps_before: int = STEPS_BEFORE,
) -> tuple[Ratio, ...]:
    """Compare `subject` with torch's DDP on one workload, by the `clock` "wall" or, of each process, "cpu".

    In each turn of a DDP, `steps_before` steps go before the one that counts.

    Returns for each variant the ratios to torch's DDP with the same options and with its defaults; if the subject can
    choose bucket caps itself, also its ratio to itself with default caps; the ratio of a step without DDP (`ratio`'s
    `FLOOR`); last, torch's DDP against itself.

    Raises `ConformanceError` when a rank does not finish.
    """
    from conformance.bench.programs.workloads import workload_named

    contestants: list[list[Any]] = [["torch", "torch", {}], ["torch again", "torch", {}], [FLOOR, NO_DDP, {}]]
    is_static = workload_named(workload).is_static
    variants = {name: options for name, options in VARIANTS.items() if is_static or "static_graph" not in options}
    for variant, options in variants.items():
        contestants.append([variant, subject.target, dict(options)])
        if options:
            contestants.append([f"torch {variant}", "torch", dict(options)])
    if chooses_caps := "auto_buckets" in subject.capabilities:
        contestants.append([_AUTO, subject.target, {"bucket_cap_mb": "auto"}])
    arguments = {"contestants": contestants, "clock": clock, "steps_before": steps_before}
    facts = run_program("step_time", subject, backend, workload, world_size, rounds, arguments)
    steps = _Steps.of(workload, facts, contestants)
    ratios = []
    for variant, options in variants.items():
        if options:
            ratios.append(steps.ratio(variant, "torch, same options", variant, f"torch {variant}"))
        ratios.append(steps.ratio(variant, DEFAULT, variant, "torch"))
    if chooses_caps:
        ratios.append(steps.ratio(_AUTO, "its default", _AUTO, "default"))
    ratios.append(steps.ratio(FLOOR, DEFAULT, FLOOR, "torch"))
    return (*ratios, steps.ratio(ITSELF, DEFAULT, "torch again", "torch"))


def measure_memory(subject: Subject, backend: Backend, workload: str, *, world_size: int = 2) -> dict[str, int]:
    """Return the most bytes that tensors take in a step on rank 0, by contestant: torch's DDP, `subject`, no DDP.

    Raises `ConformanceError` when a rank does not finish.
    """
    contestants: list[list[Any]] = [[FLOOR, NO_DDP, {}]]
    for variant in ("default", "bucket view"):
        contestants.append([f"torch {variant}", "torch", dict(VARIANTS[variant])])
        contestants.append([variant, subject.target, dict(VARIANTS[variant])])
    facts = run_program("peak_memory", subject, backend, workload, world_size, 1, {"contestants": contestants})
    return {label: facts[0][label] for label, *_ in contestants}


def measure_profile(
    subject: Subject, backend: Backend, workload: str, *, world_size: int = 2, rounds: int = 60
) -> tuple[float, tuple[tuple[str, float, float], ...]]:
    """Return the CPU milliseconds of a step on rank 0, and of the subject's functions: name, calls, milliseconds.

    Raises `ConformanceError` when a rank does not finish.
    """
    facts = run_program("step_profile", subject, backend, workload, world_size, rounds, {})[0]
    return facts["step_ms"], tuple((name, calls, num_ms) for name, calls, num_ms in facts["functions"])


def measure_compiled(
    subject: Subject, backend: Backend, workload: str, *, world_size: int = 2, rounds: int = 60, compiler: str
) -> tuple[Ratio, ...]:
    """Compare the compiled `subject` with torch's compiled DDP on one workload of `compiled_step_time`.

    Returns the ratios of the subject with each of `REDUCTIONS` to torch's DDP with each; last, torch's DDP against
    itself. `compiler` is the backend of `torch.compile`. Raises `ConformanceError` when a rank does not finish, or when
    torch's optimiser did not split the graph: the ratios would then not measure what they claim.
    """
    contestants = [
        [f"{name}{reduction}", target, reduction]
        for name, target in (("", subject.target), ("torch ", "torch"))
        for reduction in REDUCTIONS
    ]
    default = f"torch {REDUCTIONS[0]}"
    contestants.append(["torch again", "torch", REDUCTIONS[0]])
    arguments = {"contestants": contestants, "compiler": compiler, "steps_before": STEPS_BEFORE}
    facts = run_program("compiled_step_time", subject, backend, workload, world_size, rounds, arguments)
    for rank, seen in facts.items():
        if seen[f"graphs/{default}"] < 2:
            raise ConformanceError(
                f"bench: torch's optimiser must split {workload!r} into several graphs, but on rank {rank} it compiled "
                f"{seen[f'graphs/{default}']} graph(s); choose a larger model"
            )
    steps = _Steps.of(workload, facts, contestants)
    ratios = [
        steps.ratio(variant, f"torch's {reference}", variant, f"torch {reference}")
        for variant in REDUCTIONS
        for reference in REDUCTIONS
    ]
    return (*ratios, steps.ratio("torch itself", f"torch's {REDUCTIONS[0]}", "torch again", default))


def run_program(
    program: str,
    subject: Subject,
    backend: Backend,
    workload: str,
    world_size: int,
    rounds: int,
    arguments: Mapping[str, Any],
    *,
    deadline_s: float = _DEADLINE_S,
) -> dict[int, Mapping[str, Any]]:
    """Return every rank's facts after `rounds` rounds of a program of the bench, and those that warm the machine up.

    Raises `ConformanceError` when a rank does not finish.
    """
    scenario = Scenario(
        id=f"bench/{workload}",
        requirements=("BENCH",),
        program=program,
        world_size=world_size,
        arguments={"workload": workload, "rounds": rounds + WARM_UP_ROUNDS, **arguments},
        deadline_s=deadline_s,
        recorded=False,
        min_collectives=0,
    )
    with Controller(backend, environment=NO_MEMORY_FILL) as controller:  # to fill memory takes time
        observations = controller.run(scenario, subject)
    for observation in observations.values():
        if observation.fate.kind != "returned":
            raise ConformanceError(f"bench: rank {observation.rank} {observation.fate}; {workload!r} was not measured")
    return {rank: observation.facts for rank, observation in observations.items()}


@dataclass(frozen=True, slots=True)
class _Steps:
    """The step times of every contestant on one workload in seconds, by the contestant's label."""

    workload: str
    world_size: int
    seconds: Mapping[str, Sequence[float]]

    @staticmethod
    def of(workload: str, facts: Mapping[int, Mapping[str, Any]], contestants: Sequence[Sequence[Any]]) -> _Steps:
        """Read the times from the ranks' facts. The time of a step is that of its slowest rank."""
        seconds = {
            str(label): [max(times) for times in zip(*(seen[label] for seen in facts.values()), strict=True)]
            for label, *_ in contestants
        }
        return _Steps(workload, len(facts), seconds)

    def ratio(self, variant: str, reference: str, ours: str, theirs: str) -> Ratio:
        """Return the ratio of contestant `ours` to contestant `theirs`, without the warm-up rounds."""
        of_rounds = (self.seconds[ours][WARM_UP_ROUNDS:], self.seconds[theirs][WARM_UP_ROUNDS:])
        lower, median, upper = quartiles(*of_rounds)
        return Ratio(self.workload, variant, reference, self.world_size, median, lower, upper, len(of_rounds[0]))


def run(
    subject: Subject,
    backend: Backend,
    *,
    world_size: int = 2,
    rounds: int = 60,
    compiler: str | None = None,
    workloads: Sequence[str] = (),
    clock: str = "wall",
    steps_before: int = STEPS_BEFORE,
    progress: Callable[[str], object] = lambda workload: None,
) -> tuple[Ratio, ...]:
    """Measure `workloads`, by default the quick ones; call `progress(workload)` before each.

    `compiler` names a backend of `torch.compile` and selects compiled DDPs. Raises `ConformanceError` as `measure` and
    `measure_compiled` do.
    """
    from conformance.bench.programs.compiled_step_time import COMPILED_WORKLOADS
    from conformance.bench.programs.workloads import QUICK

    ratios: list[Ratio] = []
    for workload in workloads or (QUICK if compiler is None else COMPILED_WORKLOADS):
        progress(workload)
        if compiler is None:
            ratios += measure(
                subject, backend, workload,
                world_size=world_size, rounds=rounds, clock=clock, steps_before=steps_before,
            )  # fmt: skip
        else:
            ratios += measure_compiled(
                subject, backend, workload, world_size=world_size, rounds=rounds, compiler=compiler
            )
    return tuple(ratios)
