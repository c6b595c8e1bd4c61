"""Scenarios of chapter fusion: one reduction for many gradients, but never for gradients that must stay separate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conformance.chapters.compiled.compiled_scenarios import EACH_ALONE, CompiledScenarios
from conformance.scenario import Scenario

_make = CompiledScenarios("fusion", "in_graph", "watched")

#: Sixty gradients of 40 bytes, ten to a bucket.
_SIXTY = [10] * 60
_TEN_EACH: dict[str, Any] = {"bucket_cap_mb": 400 / 2**20}
_FUSIONS = {"concat": "FUSE-01", "coalesced": "FUSE-02"}
_TWO_DTYPES = ["float32", "float64"]


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _counted()
    yield from _pairs()
    yield from _compressed()
    yield from _captured()


def _count(requirement: str, slug: str, fusion: str, *also: str, world_size: int = 2, **rest: Any) -> Scenario:
    scenario = _make.written(
        requirement, f"{slug}-{fusion}", "compiled_collectives", world_size, compile_={"fusion": fusion}, **rest
    )
    return scenario.replace(requirements=tuple(dict.fromkeys((requirement, *also))))


def _counted() -> Iterator[Scenario]:
    for fusion, requirement in _FUSIONS.items():
        yield _count(requirement, "sixty", fusion, "FUSE-05", "FUSE-06", sizes=_SIXTY, options=_TEN_EACH)
        for world_size in (2, 3):
            yield _count(requirement, "twelve", fusion, "FUSE-05", "FUSE-06", sizes=[10] * 12, world_size=world_size,
                         options={"bucket_cap_mb": 120 / 2**20})  # fmt: skip
        yield _count("FUSE-03", "dtypes", fusion, requirement, sizes=[10] * 12, dtypes=_TWO_DTYPES,
                     options={"bucket_cap_mb": 120 / 2**20})  # fmt: skip
        sizes = [4, 5, 6, 7, 8, 9]
        for slug, options in (
            ("default", {}),
            ("each-alone", EACH_ALONE),
            ("44-bytes", {"bucket_cap_mb": 44 / 2**20}),
            ("list", {"bucket_cap_mb_list": [16 / 2**20, 60 / 2**20]}),
        ):
            if fusion == "concat" or slug == "list":
                yield _count("FUSE-04", slug, fusion, requirement, sizes=sizes, options=options)


def _pairs() -> Iterator[Scenario]:
    for fusion in _FUSIONS:
        for groups, world_size in (((2, 2), 2), ((2, 1), 2), ((4, 2), 4)):
            for dtypes in (_TWO_DTYPES, ["float32", "float32"]):
                if (world_size == 4 or fusion == "coalesced") and dtypes != _TWO_DTYPES:
                    continue
                yield _pair(groups, dtypes, world_size, {"fusion": fusion}, f"-{fusion}")
    yield _pair((2, 1), _TWO_DTYPES, 2, {"reduction": "split", "backend": "callable"}, "-split")


def _pair(groups: tuple[int, int], dtypes: list[str], world_size: int, order: dict[str, Any], slug: str) -> Scenario:
    kinds = "two-dtypes" if len(set(dtypes)) == 2 else "one-dtype"
    requirements = ["FUSE-07"] + (["FUSE-08"] if len(set(groups)) == 2 else [])
    requirements += ["FUSE-09"] if len(set(dtypes)) == 2 else []
    name = f"groups-of-{groups[0]}-and-{groups[1]}-{kinds}{slug}"
    scenario = _make.written(requirements[-1], name, "compiled_pair", world_size, compile_=order,
                             groups=list(groups), dtypes=dtypes)  # fmt: skip
    return scenario.replace(requirements=tuple(requirements))


def _captured() -> Iterator[Scenario]:
    """Yield backwards that compiled autograd captures once more."""
    for fusion in _FUSIONS:
        for slug, dtypes in (("captured", ["float32"]), ("captured-dtypes", _TWO_DTYPES)):
            yield _make.written("FUSE-11", f"{slug}-{fusion}", "compiled_collectives",
                                compile_={"fusion": fusion, "compiled_autograd": True}, sizes=[10] * 6, dtypes=dtypes,
                                options={"bucket_cap_mb": 120 / 2**20})  # fmt: skip


def _compressed() -> Iterator[Scenario]:
    for fusion in _FUSIONS:
        for hook in ("fp16", "bf16"):
            yield _make.compiled("FUSE-10", f"{hook}-{fusion}", "ready_made_hook", compile_={"fusion": fusion},
                                 judged={"averages": "graph", "num_in_graphs": 1},
                                 arguments={"hook": hook, "gradients": "small"})  # fmt: skip
