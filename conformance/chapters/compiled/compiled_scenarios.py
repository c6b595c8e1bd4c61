"""How the chapters on compiled modules make their scenarios."""

from collections.abc import Iterator
from typing import Any

from conformance.chapters.compiled.any_backward import BACKWARDS, HOOKS, STATES
from conformance.chapters.grid import Axis, Grid, Worlds
from conformance.chapters.variants import (
    PLAIN,
    SCALARS_ALONE,
    Variant,
    arguments,
    capped,
    dashed,
    each,
    fields,
    options,
)
from conformance.scenario import Scenario

#: Long, because compiling is slow without a cache; short enough to detect a rank that hangs.
_DEADLINE_S = 60.0
#: Generating and compiling C++ for the first time on a machine takes longer.
_INDUCTOR_DEADLINE_S = 150.0

#: The layers of a `compiled_case` fill a bucket each.
ONE_MIB = capped("", 1)


class CompiledScenarios:
    """Makes the scenarios of one chapter; `reduction` is what its scenarios order unless they say otherwise.

    `way` is what a scenario's module is wrapped with, or are several such variants; `also` are further requirements.
    """

    def __init__(self, chapter: str, reduction: str, backend: str) -> None:
        """Set the chapter's name, who averages gradients, and the compiler backend that most scenarios use."""
        self._grid = Grid(chapter)
        self._defaults = {"reduction": reduction, "backend": backend}

    def written(
        self,
        requirement: str,
        slug: str,
        program: str,
        worlds: Worlds = 2,
        /,
        *axes: Axis,
        way: Axis = PLAIN,
        compile_: dict[str, Any] | None = None,
        also: tuple[str, ...] = (),
        requirements: tuple[str, ...] = (),
        **given: Any,
    ) -> Iterator[Scenario]:
        """Yield scenarios of a program that compiles by itself; `given` are its own arguments."""
        order = {**self._defaults, **(compile_ or {})}
        deadline = fields(deadline_s=_INDUCTOR_DEADLINE_S if order["backend"] == "inductor" else _DEADLINE_S)
        asked = {"compile": order, **given}
        shown = {"also": also, "requirements": requirements}
        yield from self._grid(requirement, slug, program, worlds, deadline, *axes, way, arguments=asked, **shown)

    def compiled(
        self, requirement: str, slug: str, program: str, worlds: Worlds = 2, *, trained: Variant = PLAIN, **rest: Any
    ) -> Iterator[Scenario]:
        """Yield scenarios that run another program compiled; `trained` is that program's model, schedule, ...

        `rest` is as for `written`, and arguments of that program.
        """
        yield from self.written(requirement, slug, "compiled", worlds, trained, program=program, **rest)

    def case(
        self,
        requirement: str,
        case: str,
        slug: str = "",
        worlds: Worlds = 2,
        *,
        way: Axis = ONE_MIB,
        also: tuple[str, ...] = (),
        **rest: Any,
    ) -> Iterator[Scenario]:
        """Yield scenarios of a `compiled_case`; `rest` is as for `written`."""
        name = dashed(case) + (f"-{slug}" if slug else "")
        also += ("GRAD-07",) * (case == "plain")  # an ordinary training; what others warn of fails them, too
        yield from self.written(requirement, name, "compiled_case", worlds, way=way, case=case, also=also, **rest)

    def members(self, requirement: str, phases: list[list[int]], worlds: Worlds, **rest: Any) -> Iterator[Scenario]:
        """Yield a course of program `membership` with two steps in each of `phases`, compiled once."""
        given = {"phases": [[members, ["step", "step"]] for members in phases], "num_captured": [1, 1], **rest}
        yield from self.compiled(requirement, f"{len(phases)}-phases", "membership", worlds, **given)

    def backwards(self, requirement: str, *, whole: bool = False) -> Iterator[Scenario]:
        """Yield all ways to run a backward, all hooks, and what `.grad` holds, for what is compiled in any way.

        With `whole` a backward can be captured as a whole, too.
        """
        once, nobody = arguments(backward="once"), arguments(hook="nobody")
        empty, own = each("state", ["none", "own"])
        run, states, hooks = (
            each("backward", [name for name in BACKWARDS if name != "twofold"]),
            each("state", STATES),
            each("hook", list(HOOKS)[1:]),
        )
        alone = [hook | arguments("rank-0", rank_0_alone=True) for hook in hooks]

        def crossed(*axes: Axis, slug: str = "", **order: Any) -> Iterator[Scenario]:
            small = SCALARS_ALONE.named("")
            yield from self.written(
                requirement, slug, "compiled", 2, *axes, way=small, compile_=order, program="any_backward"
            )

        yield from crossed(run, (empty, own), nobody)
        # What compiled autograd captures tells a graph that averages nothing of the backward at run time.
        captured = {"backend": "aot_eager", "compiled_autograd": True, "whole_backward": False}
        several = each("backward", ["two_losses", "two_forwards", "local_first", "local_late", "local_joint"])
        yield from crossed(several, empty, nobody, slug="captured", **captured)
        zeros = arguments("zeros", state="zeros")
        yield from crossed(
            arguments("again", backward="again_into_nothing"), zeros, nobody, slug="captured", **captured
        )
        if whole:
            growing = arguments("growing", backward="growing")
            yield from crossed(growing, empty, nobody, slug="whole", **{**captured, "whole_backward": True})
        # AOTAutograd refuses to differentiate twice.
        yield from crossed(each("backward", ["twofold"]), (empty, own), nobody, slug="callable", backend="callable")
        yield from crossed(once, states, hooks)
        yield from crossed(once, empty, alone)
        for way in ("in_place", "before", "inner", "function"):
            yield from crossed(each("backward", ["by_inputs_first"]), own, nobody, slug=dashed(way), way=way)

    def mixed_precision(self, requirement: str, dtype: str) -> Iterator[Scenario]:
        """Yield a training in mixed precision of parameters in `dtype`, in however many graphs."""
        way = options(dtype, mixed_precision={"param_dtype": dtype})
        yield from self.compiled(requirement, "", "mixed_precision_training", way=way, num_captured=[0, 99])

    def sharded(
        self, requirement: str, slug: str, mesh: tuple[int, int], program: str = "sharded_training", **rest: Any
    ) -> Iterator[Scenario]:
        """Yield a training of a module that is spread over the second dimension of `mesh` and wrapped over the first.

        `rest` are arguments of a `ShardedPlan`, or as for `compiled`; the optimizer is Adam unless they say otherwise.
        """
        rows, columns = mesh
        given = {"mesh": list(mesh), "model": "mlp", "optimizer": "adam", **rest}
        yield from self.compiled(requirement, f"{slug}-{rows}x{columns}", program, rows * columns, **given)
