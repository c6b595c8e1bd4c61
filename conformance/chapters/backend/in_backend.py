"""How the chapters about backends make their scenarios: many cells in each, and all of them with the same needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from conformance.programs.operations.cell import Cell, distinct
from conformance.scenario import Scenario

#: Ranks that wait for what does not come are ended after so many seconds without progress; each cell is progress.
DEADLINE_S = 8.0
#: So many cells at most are in one scenario: a cell that hangs costs those behind it.
MOST_CELLS = 40


class InChapter:
    """Makes the scenarios of one chapter. They are not recorded: nothing stands between torch and the backend."""

    def __init__(self, chapter: str) -> None:
        """Take the chapter's name."""
        self._chapter = chapter

    def scenario(
        self, requirement: str, slug: str, program: str, world_size: int, *, also: tuple[str, ...] = (), **rest: Any
    ) -> Scenario:
        """Return the scenario `<chapter>/<requirement>/<slug>-world<world_size>`; it also tests those in `also`."""
        rest.setdefault("deadline_s", DEADLINE_S)
        return Scenario(
            id=f"{self._chapter}/{requirement}/{slug}-world{world_size}", requirements=(requirement, *also),
            program=program, world_size=world_size, recorded=False, min_collectives=0, **rest,
        )  # fmt: skip

    def cells(
        self,
        requirement: str,
        cells: Iterable[Cell],
        *world_sizes: int,
        by: str = "operation",
        also: tuple[str, ...] = (),
        refusable: bool = False,
    ) -> Iterator[Scenario]:
        """Yield scenarios of `cells` at each world size: one for each value of the axis `by` and set of needs.

        With `refusable`, an error that says so is as good as the right values.
        """

        def key(cell: Cell) -> tuple[str, tuple[str, ...]]:
            return str(getattr(cell, by)) or "copies", tuple(sorted(cell.needs))

        for world_size in world_sizes:
            alone = world_size == 1  # then there is nobody to send to
            possible = sorted((one for one in distinct(cells) if not (alone and one.what.of_pairs)), key=key)
            names: dict[str, int] = {}
            for (value, needs), group in groupby(possible, key):
                members = list(group)
                for start in range(0, len(members), MOST_CELLS):
                    part = members[start : start + MOST_CELLS]
                    extra = [need for need in needs if need != value and need not in (part[0].what.needs,)]
                    slug = "-".join([value, *extra]).replace("_", "-").lower()
                    names[slug] = names.get(slug, 0) + 1
                    if names[slug] > 1:
                        slug += f"-part{names[slug]}"
                    arguments: dict[str, Any] = {"cells": [cell.to_json() for cell in part]}
                    if refusable:
                        arguments["refusable"] = True
                    yield self.scenario(
                        requirement, slug, "operation_cells", world_size, also=also, needs=needs, arguments=arguments
                    )
