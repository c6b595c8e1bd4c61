"""Program `replica`: computes what the ranks of another scenario must observe, on a rank that has no DDP.

The truth contains losses, gradients and parameters. Another device or other kernels compute them with other roundings,
which are right, too. So a rank of the backend under test computes the truth, in a process like every other rank's, on
the same device. It is alone in its group, and its process never loads a subject.

The truth of a program without a DDP contains no number that a device computes, so the controller computes it, in less
time than a rank takes to start.
"""

from collections.abc import Awaitable, Callable, Mapping

from conformance.errors import ReplicaError, present
from conformance.observation import Facts, Observation
from conformance.programs.rank_context import RankContext
from conformance.programs.registry import get_program, program_without_truth
from conformance.scenario import Scenario
from conformance.truth.carried import packed, unpacked
from conformance.truth.device import on_device

#: The longest truth, of a training of several epochs on a busy machine, takes a tenth of this.
_DEADLINE_S = 120.0


async def expect(
    scenario: Scenario, observe: Callable[[Scenario], Awaitable[Mapping[int, Observation]]]
) -> Mapping[int, Facts]:
    """Have a replica compute what the ranks of `scenario` must observe; compute it here if the program has no DDP.

    `observe` runs a scenario on ranks on which no subject ever runs. Raises `ReplicaError`, with a traceback if any,
    if the replica did not return.
    """
    program = get_program(scenario.program)
    if program.without_ddp:
        return present(program.expectation)(scenario)
    return _expected_by((await observe(replica_of(scenario)))[0])


def replica_of(scenario: Scenario) -> Scenario:
    """Return the scenario in which one rank computes what the ranks of `scenario` must observe."""
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


@program_without_truth("replica", invariants=())
def replica(ctx: RankContext) -> None:
    """Compute the expectation of the scenario in argument `scenario` on this rank's device, and observe it."""
    scenario = Scenario.from_json(ctx.arguments["scenario"])
    expectation = present(get_program(scenario.program).expectation)
    with on_device(ctx.device):
        expected = expectation(scenario)
    for name, value in packed(expected).items():
        ctx.observe(name, value)
