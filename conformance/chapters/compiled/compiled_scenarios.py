"""How the chapters on compiled modules make their scenarios."""

from __future__ import annotations

from typing import Any

from conformance.chapters.in_chapter import ScenarioOf, in_chapter
from conformance.scenario import Scenario

#: Long, because compiling is slow without a cache; short enough to detect a rank that hangs.
_DEADLINE_S = 60.0
#: Generating and compiling C++ for the first time on a machine takes longer.
_INDUCTOR_DEADLINE_S = 150.0

#: Every vector, and every layer of the small models, is a bucket of its own.
EACH_ALONE: dict[str, Any] = {"bucket_cap_mb": 0.00001}
#: The layers of a `compiled_case` fill a bucket each.
ONE_MIB: dict[str, Any] = {"bucket_cap_mb": 1}
FIND: dict[str, Any] = {"find_unused_parameters": True}
VIEW: dict[str, Any] = {"gradient_as_bucket_view": True}
STATIC: dict[str, Any] = {"static_graph": True}


class CompiledScenarios:
    """Makes the scenarios of one chapter; `reduction` is what its scenarios order unless they say otherwise."""

    def __init__(self, chapter: str, reduction: str, backend: str) -> None:
        """Set the chapter's name, who averages gradients, and the compiler backend that most scenarios use."""
        self._of_chapter: ScenarioOf = in_chapter(chapter)
        self._defaults = {"reduction": reduction, "backend": backend}

    def written(
        self, requirement: str, slug: str, program: str, world_size: int = 2, *, compile_: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None, **arguments: Any,
    ) -> Scenario:  # fmt: skip
        """Return a scenario of a program that compiles by itself; `arguments` are its own."""
        order = {**self._defaults, **(compile_ or {})}
        deadline_s = _INDUCTOR_DEADLINE_S if order["backend"] == "inductor" else _DEADLINE_S
        return self._of_chapter(
            requirement, slug, program, world_size, options=options or {}, deadline_s=deadline_s,
            arguments={"compile": order, **arguments},
        )  # fmt: skip

    def compiled(
        self, requirement: str, slug: str, program: str, world_size: int = 2, *, compile_: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None, arguments: dict[str, Any] | None = None,
        judged: dict[str, Any] | None = None, **fields: Any,
    ) -> Scenario:  # fmt: skip
        """Return a scenario that runs another program compiled: `arguments` and `fields` are that program's.

        `judged` are arguments of program `compiled` itself.
        """
        scenario = self.written(requirement, slug, "compiled", world_size, compile_=compile_, options=options)
        more = {"program": program, **(judged or {}), **(arguments or {})}
        return scenario.replace(arguments={**scenario.arguments, **more}, **fields)

    def case(self, requirement: str, case: str, slug: str = "", world_size: int = 2, **rest: Any) -> Scenario:
        """Return a scenario of a `compiled_case`; `rest` is as for `written`."""
        rest.setdefault("options", ONE_MIB)
        name = case.replace("_", "-") + (f"-{slug}" if slug else "")
        return self.written(requirement, name, "compiled_case", world_size, case=case, **rest)

    def members(self, requirement: str, phases: list[list[int]], world_size: int, **arguments: Any) -> Scenario:
        """Return a course of program `membership` with two steps in each of `phases`, compiled once."""
        course = [[members, ["step", "step"]] for members in phases]
        return self.compiled(
            requirement, f"{len(phases)}-phases", "membership", world_size,
            arguments={"phases": course, **arguments}, judged={"num_captured": [1, 1]},
        )  # fmt: skip

    def mixed_precision(self, requirement: str, dtype: str) -> Scenario:
        """Return a training in mixed precision of parameters in `dtype`, in however many graphs."""
        return self.compiled(
            requirement, dtype, "mixed_precision_training", model="mlp",
            options={"mixed_precision": {"param_dtype": dtype}}, judged={"num_captured": [0, 99]},
        )  # fmt: skip

    def sharded(
        self, requirement: str, slug: str, mesh: tuple[int, int], program: str = "sharded_training", *,
        compile_: dict[str, Any] | None = None, options: dict[str, Any] | None = None,
        judged: dict[str, Any] | None = None, **arguments: Any,
    ) -> Scenario:  # fmt: skip
        """Return a training of a module that is spread over the second dimension of `mesh` and wrapped over the first.

        `arguments` are those of a `ShardedPlan`; the optimizer is Adam unless they say otherwise.
        """
        rows, columns = mesh
        return self.compiled(
            requirement, f"{slug}-{rows}x{columns}", program, rows * columns, compile_=compile_, options=options,
            arguments={"mesh": list(mesh), "model": "mlp", "optimizer": "adam", **arguments}, judged=judged,
        )  # fmt: skip
