"""How a chapter makes its scenarios: every combination of what is crossed, at every world size."""

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import product
from operator import or_
from typing import Any

from conformance.chapters.variants import PLAIN, Variant
from conformance.scenario import Scenario

#: World sizes, or one of them.
Worlds = int | Sequence[int]
#: Variants of which each scenario has one; a single variant is what all of them have.
Axis = Variant | Sequence[Variant]


class Grid:
    """Makes the scenarios of one chapter; `always` is what all of them are run with."""

    def __init__(self, chapter: str, always: Variant = PLAIN) -> None:
        self._chapter = chapter
        self._always = always

    def __call__(
        self,
        requirement: str,
        slug: str,
        program: str,
        worlds: Worlds,
        *axes: Axis,
        requirements: tuple[str, ...] = (),
        **fields: Any,
    ) -> Iterator[Scenario]:
        """Yield a scenario for every choice of one variant of each axis, and of a world size; the last varies fastest.

        Each is called `<chapter>/<requirement>/<slug>-<slugs of variants>-world<size>`. `fields` are as for `Variant`
        and `Scenario`; `requirements` are all those that it gives evidence for, if the one in the id is not the first.
        """
        own = {name: fields.pop(name) for name in ("options", "arguments", "needs", "also") if name in fields}
        given = Variant(slug, fields=fields, **own)
        for chosen in product(*([axis] if isinstance(axis, Variant) else axis for axis in axes)):
            variant = reduce(or_, chosen, self._always | given)
            for world_size in variant.worlds or ([worlds] if isinstance(worlds, int) else worlds):
                # With a world size of 1, a DDP may communicate nothing.
                least = {"min_collectives": 0 if world_size == 1 else 1}
                yield Scenario(
                    id=f"{self._chapter}/{requirement}/{(variant | Variant(f'world{world_size}')).slug}",
                    requirements=requirements or (requirement, *variant.also),
                    program=program,
                    world_size=world_size,
                    options=variant.options,
                    needs=variant.needs,
                    arguments=variant.arguments,
                    **{**least, **variant.fields},
                )
