"""The page of systems: what each part of a complete DDP gives, what it is for, and which requirements show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workshop.behaviour_rows import Behaviour

_HEAD = """# Systems

Each system of a DDP is judged twice: by the values that it gives, and by what it is there for. A DDP that reduces all
gradients when backward is over, or casts every parameter of a module of which it uses one, has the right values.
In brackets: how many [mutants](detection.md) are there to show that a requirement can fail.
Made by `python -m workshop renew`; the rows are in `workshop/behaviours.toml`.

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
