"""Profile quick: few scenarios that kill the mutants which profile full kills, for a run at every push.

A mutant is a DDP or backend that is wrong on purpose. `kills.toml` beside this module says which scenarios of a profile
are known to kill it, and how many seconds of a processor each takes the ranks of a DDP or backend that is right:

    [full.NoDivision]
    "gradients/GRAD-01/mlp-world2" = 0.052

A mutant without any has not been run since then. `ddp-conformance mutants --kills FILE` writes the file.
"""

from __future__ import annotations

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

#: What a scenario takes besides its ranks' work: to fork ranks, to compute the truth, to judge.
_FIXED_S = 0.15


#: The profiles of which `kills.toml` says what kills: mutants of DDPs, and those of backends.
PROFILES = ("full", "backend")


def load_kills(profile: str = "full") -> Kills:
    """Return which scenarios of one of `PROFILES` are known to kill which mutant."""
    return _stored().get(profile, {})


def load_all_kills() -> Kills:
    """Return which scenarios of any profile are known to kill which mutant."""
    return {name: of_one for profile in PROFILES for name, of_one in load_kills(profile).items()}


@cache
def _stored() -> Mapping[str, Kills]:
    return tomllib.loads(PATH.read_text(encoding="utf-8"))


def quick(scenarios: Iterable[Scenario], catalogue: Catalogue, kills: Kills) -> tuple[Scenario, ...]:
    """Return those of `scenarios` that profile quick holds, in their order.

    They kill every mutant that any of `scenarios` is known to kill, and give evidence for every requirement of level
    core.
    """
    scenarios = tuple(scenarios)
    chosen = cover(known_kills(scenarios, kills))
    judged = {name for one in scenarios if one.id in chosen for name in one.requirements}
    for requirement in catalogue:
        if requirement.level == "core" and requirement.id not in judged:
            counting = [one for one in scenarios if requirement.id in one.requirements]
            named = [one for one in counting if one.id.split("/")[1] == requirement.id]
            chosen |= {one.id for one in cheapest_first(named or counting)[:1]}
    return tuple(scenario for scenario in scenarios if scenario.id in chosen)


def known_kills(scenarios: Iterable[Scenario], kills: Kills) -> Kills:
    """Return those of `kills` that any of `scenarios` is known to do."""
    ids = {scenario.id for scenario in scenarios}
    return {name: {id_: cpu_s for id_, cpu_s in of_one.items() if id_ in ids} for name, of_one in kills.items()}


def num_killed(scenarios: Iterable[Scenario], kills: Kills) -> int:
    """Return how many mutants `scenarios` are known to kill."""
    ids = {scenario.id for scenario in scenarios}
    return sum(not ids.isdisjoint(of_one) for of_one in kills.values())


def sentence(scenarios: Collection[Scenario], kills: Kills) -> str:
    """Return what profile quick, which holds `scenarios`, is worth."""
    return (
        f"Profile quick: {len(scenarios)} scenarios of levels core and full; they are known to kill"
        f" {num_killed(scenarios, kills)} of the {len(kills)} mutants that profile full is to kill. What every DDP owes"
        " is profile core."
    )


def cover(kills: Kills) -> set[str]:
    """Return scenarios that kill every mutant which any kills: always the one that costs least for each further kill.

    Then those go without which the others kill as much, the dearest first.
    """
    costs = {id_: _FIXED_S + cpu_s for of_one in kills.values() for id_, cpu_s in of_one.items()}
    killed_by = {id_: {name for name, of_one in kills.items() if id_ in of_one} for id_ in costs}
    left = {name for name, of_one in kills.items() if of_one}
    chosen: set[str] = set()
    while left:
        best = min(_that_kill(left, killed_by), key=lambda id_: (costs[id_] / len(killed_by[id_] & left), id_))
        chosen.add(best)
        left -= killed_by[best]
    for id_ in sorted(chosen, key=lambda one: (-costs[one], one)):
        others = chosen - {id_}
        if all(not others.isdisjoint(kills[name]) for name in killed_by[id_]):
            chosen = others
    return chosen


def _that_kill(mutants: set[str], killed_by: Mapping[str, set[str]]) -> Iterable[str]:
    return (id_ for id_, names in killed_by.items() if names & mutants)


def written(kills: Mapping[str, Kills]) -> str:
    """Return the text of `kills.toml`, by profile."""
    head = "# Written by `ddp-conformance mutants --kills`; conformance/spec/quick.py says what for.\n"
    return head + "".join(
        f"\n[{profile}.{name}]\n{_lines(of_one)}"
        for profile, of_profile in kills.items()
        for name, of_one in of_profile.items()
    )


def _lines(of_one: Mapping[str, float]) -> str:
    return "".join(f'"{id_}" = {cpu_s:.3f}\n' for id_, cpu_s in sorted(of_one.items()))
