"""Trainings that nobody wrote down: drawn at random, judged like any other, and shrunk to the simplest that fails.

Hypothesis draws scenarios of program `train` in this process, and warm ranks run them; so an example costs what a
scenario costs, and shrinking is affordable.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, reject, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.errors import Flaky, Unsatisfiable

from conformance.models.catalogue import get_fixture
from conformance.run.outcome import Outcome
from conformance.run.scenario_runner import ScenarioRunner
from conformance.scenario import ZERO_GRAD, Scenario, Step
from conformance.verdict import Verdict

#: What every explored training gives evidence for: it must end as the same training without DDP.
REQUIREMENT = "TRAIN-01"
MODELS = (
    "mlp", "unused", "two_heads", "rank_branch", "batchnorm_mlp", "frozen", "mixed_dtypes", "complex",
    "many_small_layers", "nested", "dataclass_output", "embedding", "sparse_embedding", "sparse_embedding_unused",
    "lstm", "moe", "channels_last_cnn", "gpt",
)  # fmt: skip
_DEADLINE_S = 10.0

_CAPS_MB = (0.0001, 0.001, 0.01, 1.0)
_OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "gradient_as_bucket_view": st.booleans(),
    "find_unused_parameters": st.booleans(),
    "static_graph": st.booleans(),
    "skip_all_reduce_unused_params": st.booleans(),
    "batched_grad_copy": st.booleans(),
    "forward_sync_buffers": st.booleans(),
    "bucket_cap_mb": st.sampled_from(_CAPS_MB),
    "bucket_cap_mb_list": st.lists(st.sampled_from(_CAPS_MB), min_size=1, max_size=3),
}
#: Options that are capabilities under the same name; the others every DDP is expected to take.
_CAPABILITIES = frozenset(_OPTIONS) - {"batched_grad_copy", "forward_sync_buffers", "bucket_cap_mb"}

_STEPS = st.builds(
    Step,
    local_backwards=st.integers(0, 2),
    synchronised=st.booleans().map(lambda local: not local),
    optimizer=st.booleans().map(lambda none: not none),
    zero_grad=st.sampled_from(ZERO_GRAD),
)


class _NonConformingError(Exception):
    """An explored training went wrong; the exploration holds its outcome."""


@dataclass(frozen=True, slots=True)
class Exploration:
    """What came of it: how many trainings were judged, how many could not be, and the simplest one that failed."""

    seed: int
    num_judged: int
    num_not_judged: int
    failure: Outcome | None
    always_fails: bool = True


def explore(
    runner: ScenarioRunner,
    *,
    examples: int,
    seed: int,
    world_sizes: tuple[int, ...] = (1, 2, 3, 4),
    budget_s: float = float("inf"),
    on_outcome: Callable[[Scenario, Outcome], None] = lambda scenario, outcome: None,
) -> Exploration:
    """Run up to `examples` random trainings on `runner` until one fails, then look for a simpler one that fails too.

    The same `seed` gives the same trainings. None is run after `budget_s` seconds; shrinking may take as long again.
    A training whose truth is not exact, or that subject or backend do not support, is not judged.
    """
    judged: dict[str, Verdict] = {}
    failing: list[Outcome] = []
    not_judged = 0
    started = time.monotonic()

    @seeded(seed)
    @settings(
        max_examples=examples, deadline=None, database=None, phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck), report_multiple_bugs=False, verbosity=Verbosity.quiet,
    )  # fmt: skip
    @given(_trainings(world_sizes))
    def look_at(scenario: Scenario) -> None:
        nonlocal not_judged
        if time.monotonic() - started > budget_s * (2 if failing else 1) or judged.get(scenario.id) is Verdict.PASS:
            return
        outcome = runner.run(scenario)
        on_outcome(scenario, outcome)
        judged[scenario.id] = outcome.subject.verdict
        if outcome.subject.verdict in (Verdict.UNSUPPORTED, Verdict.HARNESS_ERROR):
            not_judged += 1
            del judged[scenario.id]
            reject()
        if outcome.subject.verdict.is_failure:
            failing.append(outcome)
            raise _NonConformingError

    always_fails = True
    try:
        look_at()
    except _NonConformingError:
        pass
    except Flaky:
        always_fails = False
    except Unsatisfiable:  # nothing that was drawn could be judged; the counts say so
        assert not judged
    return Exploration(seed, len(judged), not_judged, failing[-1] if failing else None, always_fails)


@st.composite
def _trainings(draw: st.DrawFn, world_sizes: tuple[int, ...]) -> Scenario:
    model = draw(st.sampled_from(MODELS))
    fixture = get_fixture(model)
    options = draw(st.fixed_dictionaries({}, optional=_OPTIONS))
    if fixture.has_unused:  # what is used changes from step to step and from rank to rank
        options |= {"find_unused_parameters": True, "static_graph": False}
    scenario = Scenario(
        "explored",
        (REQUIREMENT,),
        "train",
        model=model,
        world_size=draw(st.sampled_from(world_sizes)),
        options=options,
        schedule=tuple(draw(st.lists(_STEPS, min_size=1, max_size=4))),
        dtype=draw(st.sampled_from(fixture.dtypes)),
        seed=draw(st.integers(0, 9)),
        needs=tuple(sorted(_CAPABILITIES & options.keys())),
        min_collectives=0,
        deadline_s=_DEADLINE_S,
    )
    return scenario.replace(id=f"explored/{REQUIREMENT}/{scenario.digest[:12]}")
