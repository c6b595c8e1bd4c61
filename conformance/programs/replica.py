"""Program `replica`: computes what the ranks of another scenario must observe, on a rank that has no DDP.

The truth contains losses, and gradients and parameters that come of them. Another device, or the same one with other
kernels, computes them with other roundings, each as right as the other. So a rank of the backend under test computes
the truth: in a process like every other rank's, on the same device, with the same kernels. It is alone in its group,
and no subject is ever loaded in its process.

What a program without a DDP must observe holds no number that a device computes: its ranks judge for themselves. That
truth needs no rank, which would take as long for it as some ranks for their whole scenario.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from conformance.errors import ReplicaError
from conformance.observation import Facts, Observation
from conformance.programs.rank_context import RankContext
from conformance.programs.registry import get_program, program
from conformance.programs.truth import expected_of
from conformance.scenario import Scenario
from conformance.truth.carried import packed, unpacked
from conformance.truth.device import on_device

#: The longest truth, of a training of several epochs on a busy machine, takes a tenth of this.
_DEADLINE_S = 120.0


async def expect(
    scenario: Scenario, observe: Callable[[Scenario], Awaitable[Mapping[int, Observation]]]
) -> Mapping[int, Facts]:
    """Have a replica compute what the ranks of `scenario` must observe, or compute it here, if no device has to.

    `observe` runs a scenario on ranks that no subject ever runs on.

    Raises:
        ReplicaError: the replica did not return; with the traceback of what it raised, if it raised.

    """
    if get_program(scenario.program).without_ddp:
        return expected_of(scenario)
    return _expected_by((await observe(replica_of(scenario)))[0])


def replica_of(scenario: Scenario) -> Scenario:
    """Return the scenario in which one rank computes what those of `scenario` must observe."""
    return Scenario(
        "replica/REPLICA/of-another", ("REPLICA",), "replica", model=scenario.model, dtype=scenario.dtype, world_size=1,
        seed=scenario.seed, arguments={"scenario": scenario.to_json()}, deadline_s=_DEADLINE_S, recorded=False,
    )  # fmt: skip


def _expected_by(replica: Observation) -> dict[int, Facts]:
    disturbed = (*replica.hygiene, *replica.device_reports)
    if replica.fate.kind != "returned" or disturbed:
        why = replica.raised.traceback if replica.raised else replica.stack or ", ".join(disturbed)
        raise ReplicaError(f"the rank that computes the truth {replica.fate}: {why}".strip())
    return unpacked(replica.facts)


@program("replica", invariants=(), judged=False)
def replica(ctx: RankContext) -> None:
    """Compute the expectation of the scenario in argument `scenario` on this rank's device, and observe it."""
    scenario = Scenario.from_json(ctx.arguments["scenario"])
    with on_device(ctx.device):
        expected = expected_of(scenario)
    for name, value in packed(expected).items():
        ctx.observe(name, value)
