"""Scenarios of chapter fusion: one reduction for many gradients, but never for gradients that must stay separate."""

from collections.abc import Iterator
from typing import Any

from conformance.chapters.compiled.compiled_scenarios import CompiledScenarios
from conformance.chapters.grid import Worlds
from conformance.chapters.variants import EACH_ALONE, PLAIN, arguments, capped, options
from conformance.scenario import Scenario

_make = CompiledScenarios("fusion", "in_graph", "watched")

#: Gradients of 40 bytes, three or ten to a bucket.
_THREE_EACH, _TEN_EACH = capped("", 120 / 2**20), capped("", 400 / 2**20)
_FUSIONS = {"concat": "FUSE-01", "coalesced": "FUSE-02"}
_TWO_DTYPES = ["float32", "float64"]


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _counted()
    for fusion in _FUSIONS:
        for groups, world_size in (((2, 2), 2), ((2, 1), 2), ((4, 2), 4)):
            for dtypes in (_TWO_DTYPES, ["float32", "float32"]):
                if (world_size == 4 or fusion == "coalesced") and dtypes != _TWO_DTYPES:
                    continue
                yield from _pair(groups, dtypes, world_size, {"fusion": fusion}, fusion)
    yield from _pair((2, 1), _TWO_DTYPES, 2, {"reduction": "split", "backend": "callable"}, "split")
    yield from _compressed()
    yield from _captured()


def _count(
    requirement: str, slug: str, fusion: str, worlds: Worlds = 2, backend: str = "watched", **rest: Any
) -> Iterator[Scenario]:
    order = {"fusion": fusion, "backend": backend}
    yield from _make.written(requirement, slug, "compiled_collectives", worlds, compile_=order, **rest)


def _counted() -> Iterator[Scenario]:
    for fusion, requirement in _FUSIONS.items():
        several: dict[str, Any] = {"way": _THREE_EACH, "sizes": [10] * 12}
        also: tuple[str, ...] = ("FUSE-05", "FUSE-06")
        yield from _count(requirement, f"sixty-{fusion}", fusion, also=also, way=_TEN_EACH, sizes=[10] * 60)
        yield from _count(requirement, f"twelve-{fusion}", fusion, (2, 3), also=also, **several)
        coded: dict[str, Any] = {"backend": "inductor", "also": ("FUSE-03",), "dtypes": _TWO_DTYPES}
        yield from _count(requirement, f"inductor-{fusion}", fusion, way=_THREE_EACH, sizes=[10] * 6, **coded)
        yield from _count("FUSE-03", f"dtypes-{fusion}", fusion, also=(requirement,), dtypes=_TWO_DTYPES, **several)
        caps = (
            PLAIN.named("default"),
            EACH_ALONE,
            capped("44-bytes", 44 / 2**20),
            options("list", bucket_cap_mb_list=[16 / 2**20, 60 / 2**20]),
        )
        for cap in caps if fusion == "concat" else caps[-1:]:
            way = cap.named(f"{cap.slug}-{fusion}")
            ways = (way, way | arguments("crossed", order=[2, 5, 0, 3, 1, 4]))
            also = (requirement, "FUSE-05")
            yield from _count("FUSE-04", "", fusion, also=also, way=ways, sizes=[4, 5, 6, 7, 8, 9])


def _pair(
    groups: tuple[int, int], dtypes: list[str], world_size: int, order: dict[str, Any], slug: str
) -> Iterator[Scenario]:
    kinds = "two-dtypes" if len(set(dtypes)) == 2 else "one-dtype"
    shown = ["FUSE-07"] + (["FUSE-08"] if len(set(groups)) == 2 else [])
    shown += ["FUSE-09"] if len(set(dtypes)) == 2 else []
    name = f"groups-of-{groups[0]}-and-{groups[1]}-{kinds}-{slug}"
    pair: dict[str, Any] = {"groups": list(groups), "dtypes": dtypes, "requirements": tuple(shown)}
    yield from _make.written(shown[-1], name, "compiled_pair", world_size, compile_=order, **pair)


def _captured() -> Iterator[Scenario]:
    """Yield backwards that compiled autograd captures once more."""
    for fusion in _FUSIONS:
        order = {"fusion": fusion, "compiled_autograd": True}
        six: dict[str, Any] = {"compile_": order, "way": _THREE_EACH, "sizes": [10] * 6}
        for slug, dtypes in (("captured", ["float32"]), ("captured-dtypes", _TWO_DTYPES)):
            yield from _make.written("FUSE-11", f"{slug}-{fusion}", "compiled_collectives", dtypes=dtypes, **six)


def _compressed() -> Iterator[Scenario]:
    for fusion in _FUSIONS:
        for hook in ("fp16", "bf16"):
            given: dict[str, Any] = {"averages": "graph", "num_in_graphs": 1, "hook": hook, "gradients": "small"}
            order = {"fusion": fusion}
            yield from _make.compiled("FUSE-10", f"{hook}-{fusion}", "ready_made_hook", compile_=order, **given)
