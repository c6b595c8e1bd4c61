"""Profile quick: few scenarios that kill the mutants which profile full kills, for a run at every push.

A mutant is a DDP or backend with a deliberate bug. `kills.toml` beside this module lists the scenarios of a profile
that kill it, with the processor seconds of the ranks of a correct DDP or backend:

    [full.NoDivision]
    "gradients/GRAD-01/mlp-world2" = 0.052

`ddp-conformance mutants --kills FILE` writes the file.
"""

import tomllib
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path

from conformance.scenario import Scenario
from conformance.spec.catalogue import Catalogue
from conformance.spec.cheapest import cheapest_first

QUICK = "quick"
PATH = Path(__file__).with_name("kills.toml")

#: By the mutant's name, then by the scenario's id: the processor's seconds.
Kills = Mapping[str, Mapping[str, float]]

#: The overhead of a scenario: to fork ranks, to compute the truth, to judge.
_FIXED_S = 0.15
#: The profiles in `kills.toml`: mutants of DDPs, and of backends.
PROFILES = ("full", "backend")


def load_kills(profile: str = "full") -> Kills:
    """Return the scenarios of one of `PROFILES` that kill each mutant."""
    return _stored().get(profile, {})


def load_all_kills() -> Kills:
    """Return the scenarios of any profile that kill each mutant."""
    return {name: of_one for profile in PROFILES for name, of_one in load_kills(profile).items()}


@cache
def _stored() -> Mapping[str, Kills]:
    return tomllib.loads(PATH.read_text(encoding="utf-8"))


def quick(scenarios: Iterable[Scenario], catalogue: Catalogue, kills: Kills) -> tuple[Scenario, ...]:
    """Return the scenarios of profile quick among `scenarios`, in their order.

    They kill every mutant that any of `scenarios` kills, and test every requirement of level core. Those whose ranks
    are apart are left out: each rank imports torch, which takes as long as forty other scenarios.
    """
    scenarios = tuple(scenario for scenario in scenarios if not scenario.apart)
    chosen = cover(known_kills(scenarios, kills))
    judged = {name for one in scenarios if one.id in chosen for name in one.requirements}
    for requirement in catalogue:
        if requirement.level == "core" and requirement.id not in judged:
            counting = [one for one in scenarios if requirement.id in one.requirements]
            named = [one for one in counting if one.id.split("/")[1] == requirement.id]
            chosen |= {one.id for one in cheapest_first(named or counting)[:1]}
    return tuple(scenario for scenario in scenarios if scenario.id in chosen)


def known_kills(scenarios: Iterable[Scenario], kills: Kills) -> Kills:
    """Return the kills of `scenarios`."""
    ids = {scenario.id for scenario in scenarios}
    return {name: {id_: cpu_s for id_, cpu_s in of_one.items() if id_ in ids} for name, of_one in kills.items()}


def num_killed(scenarios: Iterable[Scenario], kills: Kills) -> int:
    """Return how many mutants `scenarios` kill."""
    ids = {scenario.id for scenario in scenarios}
    return sum(not ids.isdisjoint(of_one) for of_one in kills.values())


def sentence(scenarios: Collection[Scenario], kills: Kills) -> str:
    """Return a sentence about profile quick, which has these scenarios."""
    return (
        f"Profile quick: {len(scenarios)} scenarios of levels core and full; they are known to kill"
        f" {num_killed(scenarios, kills)} of the {len(kills)} mutants that profile full is to kill. What every DDP owes"
        " is profile core."
    )


def cover(kills: Kills) -> set[str]:
    """Return scenarios that kill every killed mutant, by repeated choice of the lowest cost for each further kill.

    Then redundant scenarios are removed, the most expensive first.
    """
    costs = {id_: _FIXED_S + cpu_s for of_one in kills.values() for id_, cpu_s in of_one.items()}
    killed_by = {id_: {name for name, of_one in kills.items() if id_ in of_one} for id_ in costs}
    left = {name for name, of_one in kills.items() if of_one}
    chosen: set[str] = set()
    while left:
        killing = [id_ for id_, names in killed_by.items() if names & left]
        best = min(killing, key=lambda id_: (costs[id_] / len(killed_by[id_] & left), id_))
        chosen.add(best)
        left -= killed_by[best]
    for id_ in sorted(chosen, key=lambda one: (-costs[one], one)):
        others = chosen - {id_}
        if all(not others.isdisjoint(kills[name]) for name in killed_by[id_]):
            chosen = others
    return chosen


def written(kills: Mapping[str, Kills]) -> str:
    """Return the text of `kills.toml`, by profile."""
    text = "# Written by `ddp-conformance mutants --kills`; conformance/spec/quick.py says what for.\n"
    for profile, of_profile in kills.items():
        for name, of_one in of_profile.items():
            lines = (f'"{id_}" = {cpu_s:.3f}\n' for id_, cpu_s in sorted(of_one.items()))
            text += f"\n[{profile}.{name}]\n" + "".join(lines)
    return text
