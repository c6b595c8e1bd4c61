"""What scenarios are run with, each set of options under one name for all chapters.

A `Variant` says what it adds to a scenario, and to the scenario's slug. `VIEW | UNUSED` is both at once: where they
contradict each other, the later one decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from conformance.models.catalogue import get_fixture


@dataclass(frozen=True)
class Variant:
    """What is added to a scenario: part of its slug, options of the DDP, arguments of the program, needs, ...

    `also` are requirements for which such scenarios give evidence too, `fields` are further fields of `Scenario`, and
    `worlds` are the world sizes that it is run at, where these are not the grid's.
    """

    slug: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    worlds: tuple[int, ...] = ()

    def __or__(self, other: Variant) -> Variant:
        return Variant(
            slug="-".join(part for part in (self.slug, other.slug) if part),
            options={**self.options, **other.options},
            arguments={**self.arguments, **other.arguments},
            needs=(*self.needs, *other.needs),
            also=(*self.also, *other.also),
            fields={**self.fields, **other.fields},
            worlds=other.worlds or self.worlds,
        )

    def at(self, *worlds: int) -> Variant:
        return replace(self, worlds=worlds)

    def named(self, slug: str) -> Variant:
        return replace(self, slug=slug)


def options(slug: str = "", **values: Any) -> Variant:
    """Return options of the DDP."""
    return Variant(slug, options=values)


def arguments(slug: str = "", **values: Any) -> Variant:
    """Return arguments of the program."""
    return Variant(slug, arguments=values)


def fields(slug: str = "", **values: Any) -> Variant:
    """Return other fields of the scenario, such as its schedule."""
    return Variant(slug, fields=values)


def capped(slug: str, bucket_cap_mb: float) -> Variant:
    """Return buckets of at most so many MiB, or a gradient more."""
    return options(slug, bucket_cap_mb=bucket_cap_mb)


def dashed(name: str) -> str:
    """Return `name` as slugs spell it."""
    return name.replace("_", "-")


def each(argument: str, values: Iterable[str]) -> tuple[Variant, ...]:
    """Return a variant for each value of an argument of the program, called like the value."""
    return tuple(Variant(dashed(value), arguments={argument: value}) for value in values)


def model(name: str) -> Variant:
    """Return a model in its usual dtype, and the search for unused parameters if it has any."""
    fixture = get_fixture(name)
    needed = UNUSED.options if fixture.has_unused else {}
    return Variant(dashed(name), options=needed, fields={"model": name, "dtype": fixture.dtypes[0]})


def models(*names: str) -> tuple[Variant, ...]:
    """Return a variant for each model."""
    return tuple(map(model, names))


def dtypes(*names: str) -> tuple[Variant, ...]:
    """Return a variant for each dtype that a scenario is run in."""
    return tuple(fields(name, dtype=name) for name in names)


PLAIN = Variant()
VIEW = options("view", gradient_as_bucket_view=True)
#: The default, said aloud.
NO_VIEW = options(gradient_as_bucket_view=False)
UNUSED = options("unused", find_unused_parameters=True)
NO_UNUSED = options(find_unused_parameters=False)
STATIC = options("static", static_graph=True)
SKIPPING = options("skipping", skip_all_reduce_unused_params=True)
LOCAL_BUFFERS = options("local-buffers", forward_sync_buffers=False)
#: Ten bytes: each gradient is a bucket of its own, but for those of one or two elements.
EACH_ALONE = capped("each-alone", 0.00001)
#: One byte: each gradient is a bucket of its own, even one of a single element.
SCALARS_ALONE = capped("each-alone", 0.000001)
#: What no rank used is not sent.
SKIPPING_ALONE = SKIPPING | EACH_ALONE.named("") | Variant(needs=("skip_all_reduce_unused_params",))
#: For programs in which the ranks of a wrong DDP wait for each other: they are ended before the usual deadline.
ENDS_SOON = fields(deadline_s=8.0)
