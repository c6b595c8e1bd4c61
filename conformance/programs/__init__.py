"""Programs that several chapters run, and what every program is written with: these names.

Its ranks must observe what plain ranks do (`truth_of`), unless the program has another expectation (`Program.expects`).
"""

from functools import partial

from conformance.programs import registry
from conformance.programs.rank_context import UNSTATED, RankContext
from conformance.programs.truth import truth_of
from conformance.programs.written_steps import (
    observe_or_refused,
    observe_run,
    observing_warnings,
    rank_step,
    run_steps,
    step_on,
)

program = partial(registry.program_without_truth, expectation=truth_of)

__all__ = [
    "UNSTATED",
    "RankContext",
    "observe_or_refused",
    "observe_run",
    "observing_warnings",
    "program",
    "rank_step",
    "run_steps",
    "step_on",
    "truth_of",
]
