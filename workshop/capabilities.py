"""The page of a backend's capabilities: what each makes judged, with what gloo declares as an example."""

from collections import Counter
from collections.abc import Iterable, Mapping

from conformance.backends.backend import CAPABILITIES, Backend
from conformance.checkers.explanation import some
from conformance.run.needs import needs_of
from conformance.scenario import Scenario, leading_requirement

_MOST_SHOWN = 12
_HEAD = """# What each capability makes judged

A backend declares under `capabilities` what it has beyond what every DDP needs
([reference](adapter_reference.md#capabilities-of-a-backend)). Scenarios that need an undeclared capability are
UNSUPPORTED. The table counts the scenarios that need each capability, in profile `backend` and with a DDP, and names
the requirements that no scenario tries without it. gloo, which every torch has, declares:

    capabilities=CAPABILITIES - {%(lacking)s}

| capability | gloo declares it | scenarios of the backend | with a DDP | judged only with it |
|---|---|---|---|---|
"""


def capabilities_page(example: Backend, scenarios: Iterable[Scenario], levels: Mapping[str, str]) -> str:
    """Return the page in Markdown; `levels` are those of the requirements, by id."""
    alone: Counter[str] = Counter()
    with_ddp: Counter[str] = Counter()
    always: dict[str, frozenset[str]] = {}
    for scenario in scenarios:
        needs = needs_of(scenario) & CAPABILITIES
        requirement = leading_requirement(scenario.id, scenario.requirements)
        (alone if levels[requirement] == "backend" else with_ddp).update(needs)
        always[requirement] = always.get(requirement, needs) & needs
    rows = []
    for name in sorted(CAPABILITIES):
        only = sorted(requirement for requirement, needs in always.items() if name in needs)
        declared = "yes" if name in example.capabilities else "no"
        rows.append(f"| `{name}` | {declared} | {alone[name]} | {with_ddp[name]} | {some(only, _MOST_SHOWN)} |")
    lacking = ", ".join(f'"{name}"' for name in sorted(CAPABILITIES - example.capabilities))
    return _HEAD % {"lacking": lacking} + "\n".join(rows) + "\n"
