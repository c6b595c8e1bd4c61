"""How the chapters about backends make their scenarios: many cells in each, and all of them with the same needs."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import count, groupby, product
from typing import Any

from conformance.chapters.grid import Grid, Worlds
from conformance.chapters.variants import ENDS_SOON, Variant, arguments, each, fields
from conformance.programs.operations.cell import Cell, distinct
from conformance.programs.operations.description import OPERATIONS, Operation
from conformance.scenario import Scenario

#: What needs no capability; and elements of a part, up to more than a MiB of them. No two of the numbers have a factor
#: in common, so that all meet.
_DTYPES, _SIZES, _MOST_BEFORE = ("float32", "int64", "float64", "int32"), (7, 1, 5000, 70_001, 300_007), 3
#: So many cells at most are in one scenario: a cell that hangs costs those behind it.
MOST_CELLS = 40
#: About these two ranks disagree, too; about the others only three, since many backends then die and are made anew.
OF_TWO = {name: OPERATIONS[name] for name in ("all_reduce", "broadcast", "all_gather")}


def every_cell(operations: Iterable[str], dtypes: Iterable[str], **axes: Any) -> list[Cell]:
    """Return a cell for each combination, the last axis varying fastest; what is no tuple is the same for all."""
    values = [value if isinstance(value, tuple) else (value,) for value in axes.values()]
    return [
        Cell(operation, dtype, **dict(zip(axes, chosen, strict=True)))
        for operation, dtype, *chosen in product(operations, dtypes, *values)
    ]


def each_operation(operations: Mapping[str, Operation]) -> tuple[Variant, ...]:
    """Return a variant for each operation as the program's argument, with what it needs."""
    return tuple(
        called | Variant(needs=tuple(filter(None, [what.needs])))
        for called, what in zip(each("operation", operations), operations.values(), strict=True)
    )


def tensors_by_turns() -> Iterator[Mapping[str, Any]]:
    """Yield without end what the tensors of a call that is going to fail are: a backend may lose an error of some."""
    for number in count():
        dtype, numel = _DTYPES[number % len(_DTYPES)], _SIZES[number % len(_SIZES)]
        yield {"dtype": dtype, "numel": numel, "before": number % _MOST_BEFORE}


def of_subgroup(cells: Iterable[Cell]) -> list[Cell]:
    """Return the same cells in a group of all ranks that is not the world.

    What is tried with several numbers of ranks is so with one of them: some mistakes are of both, a dtype and a group.
    """
    return [replace(cell, group="permuted") for cell in cells]


class BackendGrid(Grid):
    """Makes the scenarios of one chapter. They are not recorded: nothing stands between torch and the backend."""

    def __init__(self, chapter: str) -> None:
        super().__init__(chapter, ENDS_SOON | fields(recorded=False, min_collectives=0))

    def disagreements(
        self, requirement: str, about: str, operations: Mapping[str, Operation], worlds: Worlds
    ) -> Iterator[Scenario]:
        """Yield scenarios in which ranks disagree about a call of each of `operations`."""
        given = arguments(about if about == "split" else "", about=about) | Variant(needs=("timeouts",))
        yield from self(requirement, "", "ranks_that_disagree", worlds, each_operation(operations), given)

    def cells(
        self,
        requirement: str,
        cells: Iterable[Cell],
        *world_sizes: int,
        by: str = "operation",
        slug: str = "",
        also: tuple[str, ...] = (),
        refusable: bool = False,
        undeclared: str = "",
        together: bool = False,
    ) -> Iterator[Scenario]:
        """Yield scenarios of `cells` at each world size: one for each value of the axis `by` and set of needs.

        Names begin with `slug`. With `refusable`, an error that says so is as good as the right values. So it is where
        a capability is `undeclared`; the scenarios are about backends that do not declare it. Cells are `together`
        whatever they need besides the operation: those that need nothing come first, and those that need what is not
        declared are not tried.
        """

        def key(cell: Cell) -> tuple[str, tuple[str, ...]]:
            needs = {cell.what.needs} - {""} if together else cell.needs
            return str(getattr(cell, by)) or "copies", tuple(sorted(needs - {undeclared}))

        for world_size in world_sizes:
            alone = world_size == 1  # then there is nobody to send to
            possible = [one for one in distinct(cells) if not (alone and one.what.of_pairs)]
            possible.sort(key=lambda cell: (key(cell), (len(cell.needs), sorted(cell.needs)) if together else ()))
            names: dict[str, int] = {}
            for (value, needs), group in groupby(possible, key):
                members = list(group)
                for start in range(0, len(members), MOST_CELLS):
                    part = members[start : start + MOST_CELLS]
                    extra = [need for need in needs if need != value and need not in (part[0].what.needs,)]
                    name = "-".join([*filter(None, [slug or undeclared]), value, *extra]).replace("_", "-").lower()
                    names[name] = names.get(name, 0) + 1
                    if names[name] > 1:
                        name += f"-part{names[name]}"
                    given: dict[str, Any] = {"cells": [cell.to_json() for cell in part]}
                    if together:
                        given["has_undeclared"] = True
                    besides = also
                    if refusable or undeclared:
                        given["refusable"] = True
                        besides += ("ERR-03",)
                    if undeclared:
                        given["undeclared"] = [undeclared]
                    yield from self(
                        requirement, name, "operation_cells", world_size, also=besides, needs=needs, arguments=given
                    )
