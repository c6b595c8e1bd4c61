"""Programs that several chapters run, and what every program is written with: these names."""

from conformance.programs.rank_context import UNSTATED, RankContext
from conformance.programs.registry import program
from conformance.programs.truth import truth_of
from conformance.programs.written_steps import observe_or_refused, observe_run, rank_step, run_steps

__all__ = [
    "UNSTATED",
    "RankContext",
    "observe_or_refused",
    "observe_run",
    "program",
    "rank_step",
    "run_steps",
    "truth_of",
]
