"""Program `compiled`: runs any other program, and compiles every module that it wraps."""

from collections.abc import Mapping
from typing import Any

from conformance.chapters.compiled.compiling import OF_WARNINGS, PRELOAD, QUIET, CompileOrder, compiling, graphs
from conformance.errors import present
from conformance.observation import Facts
from conformance.programs import RankContext, program
from conformance.programs.registry import get_program
from conformance.scenario import Scenario
from conformance.truth.expected import at_least


@program("compiled", invariants=("nothing_in_flight", "leaves_no_trace"), preload=PRELOAD, speaks_for=OF_WARNINGS)
def compiled(ctx: RankContext) -> None:
    """Run the program that argument `program` names; argument `compile` (`CompileOrder`) says how to compile.

    Observes what that program observes, `warnings`, and `compiled/num_captured`, how many graphs Dynamo captured, and
    `compiled/num_in_graphs`, how many reductions are nodes of the graphs that code was generated for. Arguments:
    `num_captured`, the least and the most there may be; `averages`, "graph" where graphs must reduce and "reducer"
    where they must not; `num_in_graphs`, exactly how many reductions graphs must have; `may_warn`, where a DDP may warn
    of what the program does. All ranks run it.
    """
    with compiling(ctx) as (inside, watch):
        get_program(ctx.arguments["program"]).body(inside)
        ctx.observe("compiled/num_captured", watch.num_captured)
        ctx.observe("compiled/num_in_graphs", watch.num_reductions())


@compiled.expects
def _as_uncompiled(scenario: Scenario) -> Mapping[int, Facts]:
    CompileOrder.of(scenario)
    least, most = scenario.arguments.get("num_captured", (1, 1000))
    count = graphs(least, most) if most < 1000 else at_least(1, "graph")
    uncompiled = scenario.replace(program=scenario.arguments["program"])
    expectation = present(get_program(scenario.arguments["program"]).expectation)
    facts: dict[int, dict[str, Any]] = {rank: dict(mine) for rank, mine in expectation(uncompiled).items()}
    # A DDP that searches for unused parameters may say that it found none.
    may_warn = scenario.options.get("find_unused_parameters") or scenario.arguments.get("may_warn")
    quiet = {} if may_warn else QUIET
    judged: dict[str, Any] = {"compiled/num_captured": count, **quiet, **_judged_reductions(scenario)}
    return {rank: {**mine, **judged} for rank, mine in facts.items()}


def _judged_reductions(scenario: Scenario) -> Facts:
    averages, exactly = scenario.arguments.get("averages"), scenario.arguments.get("num_in_graphs")
    if exactly is not None:
        return {"compiled/num_in_graphs": exactly}
    if averages is None:
        return {}
    return {"compiled/num_in_graphs": 0 if averages == "reducer" else at_least(1)}
