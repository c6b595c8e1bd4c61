"""The page of systems: what each part of a complete DDP gives, what it is for, and which requirements show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workshop.behaviour_rows import Behaviour

_HEAD = """# Systems

The suite judges each system of a DDP by the values that it gives, and by its purpose: a DDP that reduces all gradients
when backward is over has the right values, and overlaps nothing. The number in brackets says how many
[mutants](detection.md) show that the requirement can fail. The rows stand in `workshop/behaviours.toml`.

| system | value | shown by | purpose | shown by |
|---|---|---|---|---|
"""


def systems_page(rows: Sequence[Behaviour], num_mutants: Mapping[str, int]) -> str:
    """Return the page in Markdown; `num_mutants` tells for a requirement how many mutants it notices."""

    def shown(requirements: Sequence[str]) -> str:
        return ", ".join(f"{one} ({num})" if (num := num_mutants.get(one)) else one for one in requirements)

    systems = [row for row in rows if row.section == "systems"]
    cells = [
        (row.name, row.promise, shown(row.requirements), row.purpose, shown(row.purpose_requirements))
        for row in systems
    ]
    return _HEAD + "".join(f"| {' | '.join(row)} |\n" for row in cells)
