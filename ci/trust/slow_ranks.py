"""Makes one rank slow before one collective of each scenario, and counts verdicts that change with that.

    python ci/trust/slow_ranks.py [--runs 4000] [--seconds 3600] [--at-once 4] [--profile full] [SELECTION ...]

A rank may be slow anywhere, and no verdict may depend on it. Load makes all ranks slow, by chance; here rank and place
are a choice. Every scenario of several ranks runs as it is, and then with a rank that sleeps for half a second
before one of its collectives, both drawn with the seed. Exits with 1 if a verdict changed, in either column.
"""

import argparse
import random
import sys
import textwrap
import time
from concurrent.futures import ProcessPoolExecutor

from conformance.backends.gloo import GLOO
from conformance.programs.registry import preloads_of
from conformance.run.scenario_runner import ScenarioRunner
from conformance.scenario import Fault, Scenario
from conformance.spec.catalogue import load_catalogue
from conformance.spec.profile import in_profile
from conformance.subjects.subject import KNOWN
from conformance.suite import Selection, load_scenarios
from conformance.verdict import ScenarioResult, Verdict
from conformance.workers.controller import Controller


def main() -> None:
    """Run what the arguments ask for and print what changed, and the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("selection", nargs="*")
    parser.add_argument("--runs", type=int, default=4000)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--profile", default="full")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    arguments = parser.parse_args()
    chooser = random.Random(arguments.seed)
    catalogue = load_catalogue()
    chosen = Selection(names=tuple(arguments.selection)).apply(load_scenarios(), catalogue)
    several = [one for one in in_profile(arguments.profile, chosen, catalogue) if _can_be_slow(one)]
    chooser.shuffle(several)
    several = several[: arguments.runs]
    until = time.monotonic() + arguments.seconds
    parts = [[one.id for one in several[number :: arguments.at_once]] for number in range(arguments.at_once)]
    seeds = [f"{arguments.seed} {number}" for number in range(arguments.at_once)]
    with ProcessPoolExecutor(arguments.at_once) as processes:
        counts = list(processes.map(_run, parts, seeds, [until] * arguments.at_once))
    runs, changed = (sum(each) for each in zip(*counts, strict=True))
    print(f"{runs} of {2 * len(several)} verdicts with a slow rank, seed {arguments.seed}: {changed} changed")
    sys.exit(changed > 0)


def _can_be_slow(scenario: Scenario) -> bool:
    return scenario.world_size > 1 and scenario.recorded and not scenario.faults


def _run(ids: list[str], seed: str, until: float) -> tuple[int, int]:
    """Return how many verdicts were compared, and how many changed; print those."""
    chooser = random.Random(seed)
    known = {scenario.id: scenario for scenario in load_scenarios()}
    scenarios = [known[each] for each in ids]
    runs, num_changed = 0, 0
    with Controller(GLOO, preload=preloads_of(scenarios)) as controller:
        runner = ScenarioRunner(KNOWN["ddp_impl"], GLOO, controller)
        for scenario in scenarios:
            if time.monotonic() > until:
                break
            before = runner.run(scenario).results
            shortest = min(each.num_collectives for each in before)
            if shortest == 0:
                continue
            fault = Fault("slow", chooser.randrange(scenario.world_size), "collective", chooser.randrange(shortest))
            after = {each.subject: each for each in runner.run(scenario.replace(faults=(fault,))).results}
            for one in before:
                other = after.get(one.subject)
                if other is None or _was_not_reached(other):
                    continue
                runs += 1
                if one.verdict is not other.verdict:
                    changed = f"{one.verdict.value}, with rank {fault.rank} slow before its #{fault.occurrence}"
                    told = other.summary or one.summary
                    num_changed += 1
                    print(f"CHANGED {one.subject} {scenario.id}: {changed} {other.verdict.value} [{told}]", flush=True)
                    for finding in (*other.deciding_findings, *one.deciding_findings)[:1]:
                        print(textwrap.indent(finding.explanation, "    "), flush=True)
    return runs, num_changed


def _was_not_reached(result: ScenarioResult) -> bool:
    """Whether that rank issued fewer collectives than another, so that the fault did not fire."""
    gravest = result.findings[0]
    return gravest.verdict is Verdict.HARNESS_ERROR and gravest.checker == "exercised"


if __name__ == "__main__":
    main()
