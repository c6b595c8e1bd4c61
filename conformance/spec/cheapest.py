"""The cost of scenarios, and the cheapest of them."""

from collections.abc import Iterable

from conformance.scenario import Scenario


def work(scenario: Scenario) -> int:
    """Return an estimate of a scenario's cost, in forward passes over all ranks, including its start."""
    passes = sum(step.local_backwards + step.synchronised for step in scenario.schedule)
    return scenario.world_size * (2 + passes)


def cheapest_first(scenarios: Iterable[Scenario]) -> tuple[Scenario, ...]:
    """Return `scenarios` by ascending cost; scenarios of a single rank, which detect little, are last."""
    return tuple(sorted(scenarios, key=lambda scenario: (scenario.world_size == 1, work(scenario))))


def one_per_requirement(scenarios: Iterable[Scenario]) -> tuple[Scenario, ...]:
    """Return for each requirement the cheapest scenario that tests it, in the order of `scenarios`.

    A scenario whose id names the requirement is preferred; of equally cheap scenarios the first is chosen.
    """
    scenarios = tuple(scenarios)
    chosen: dict[str, Scenario] = {}
    cheapest = cheapest_first(scenarios)
    for scenario in cheapest:
        chosen.setdefault(scenario.id.split("/")[1], scenario)
    for scenario in cheapest:
        for requirement_id in scenario.requirements:
            chosen.setdefault(requirement_id, scenario)
    ids = {scenario.id for scenario in chosen.values()}
    return tuple(scenario for scenario in scenarios if scenario.id in ids)
