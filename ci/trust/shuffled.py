"""Runs scenarios in ever new orders on a machine that is busy with other things, and counts verdicts that change.

    python ci/trust/shuffled.py [--runs 20000] [--seconds 3600] [--load 8] [--profile full]

A run is one scenario in one column. The verdicts of the first round, in the listed order, are what later ones are
compared with. Exits with 1 if any changed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time

from conformance.backends.gloo import GLOO
from conformance.programs.registry import preloads_of
from conformance.run.scenario_runner import ScenarioRunner
from conformance.spec.catalogue import load_catalogue
from conformance.spec.profile import in_profile
from conformance.subjects.subject import KNOWN
from conformance.suite import load_scenarios
from conformance.workers.controller import Controller

TELL_EVERY_S = 60.0


def tell(line: str) -> None:
    """Print a line at once, wherever the output goes: a run takes an hour, and may be killed."""
    print(line, flush=True)


def burn() -> None:
    """Keep a processor busy until the parent is gone."""
    parent = os.getppid()
    while os.getppid() == parent:
        sum(range(1_000_000))


def main() -> None:
    """Run what the arguments ask for and print the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--load", type=int, default=8)
    parser.add_argument("--profile", default="full")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    arguments = parser.parse_args()
    scenarios = list(in_profile(arguments.profile, load_scenarios(), load_catalogue()))
    chooser = random.Random(arguments.seed)
    started = told_at = time.monotonic()
    first: dict[tuple[str, str], str] = {}
    runs, changed, loads = 0, 0, []
    burners = [multiprocessing.Process(target=burn, daemon=True) for _ in range(arguments.load)]
    with Controller(GLOO, preload=preloads_of(scenarios)) as controller:
        runner = ScenarioRunner(KNOWN["ddp_impl"], GLOO, controller)
        while runs < arguments.runs and time.monotonic() - started < arguments.seconds:
            for scenario in scenarios:
                outcome = runner.run(scenario)
                for result in outcome.results:
                    runs += 1
                    before = first.setdefault((result.subject, scenario.id), result.verdict.value)
                    if before != result.verdict.value or outcome.contaminated_by:
                        changed += 1
                        told = [finding.summary for finding in result.findings][:1]
                        tell(f"CHANGED {result.subject} {scenario.id}: {before}, {result.verdict.value} {told}")
                loads.append(os.getloadavg()[0])
                if time.monotonic() - told_at >= TELL_EVERY_S:
                    told_at = time.monotonic()
                    tell(f"{runs} runs, {told_at - started:.0f} s, load {loads[-1]:.0f}: {changed} changed")
                if runs >= arguments.runs or time.monotonic() - started >= arguments.seconds:
                    break
            else:
                for burner in burners:
                    if burner.pid is None:
                        burner.start()
                chooser.shuffle(scenarios)
    loads.sort()
    print(
        f"{runs} runs, {len(first)} different, at a load of {loads[len(loads) // 2]:.1f} (median), "
        f"{time.monotonic() - started:.0f} s, seed {arguments.seed}: {changed} changed verdicts"
    )
    for burner in burners:
        if burner.pid is not None:
            burner.terminate()
    sys.exit(changed > 0)


if __name__ == "__main__":
    main()
