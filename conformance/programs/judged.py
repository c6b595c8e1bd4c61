"""Programs in which each rank judges its own results: several trials, each of which returns a judgement."""

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

import conformance
from conformance.checkers.explanation import shorten
from conformance.errors import certain
from conformance.observation import Facts
from conformance.programs.operations.lifetimes import comes_late
from conformance.programs.operations.store_messages import all_publish, introduce
from conformance.programs.rank_context import RankContext, Unsupported
from conformance.programs.registry import Program, program_without_truth
from conformance.scenario import Scenario
from conformance.truth.expected import Right

#: How the names of files begin that are no backend's: those of torch, of the suite and of what is in no file.
_NOT_ITS_OWN = (*(f"{Path(str(package.__file__)).parent}/" for package in (torch, conformance)), "<")
#: A trial returns what is wrong, as a clause; an empty text if nothing is.
Trial = Callable[[], str]
Trials = Callable[[RankContext], Mapping[str, Trial]]


def judged(
    name: str, names: Callable[[Scenario], Iterable[str]], *, speaks_for: Mapping[str, tuple[str, ...]] | None = None
) -> Callable[[Trials], Program]:
    """Register the decorated function as program `name`; it returns the trials of a rank, which run in their order.

    `names` returns the names of a scenario's trials. An error that every rank raises in a trial is a judgement; one
    that some ranks raise ends the program. A trial of several calls enters a phase for each: its name, a comma and
    words such as `at root 1`. All ranks run it. A scenario with the argument `trials` tries only the named trials.
    """

    def chosen(scenario: Scenario) -> list[str]:
        return [trial for trial in names(scenario) if trial in scenario.arguments.get("trials", (trial,))]

    def made(trials: Trials) -> Program:
        def body(ctx: RankContext) -> None:
            introduce()
            found = trials(ctx)
            certain(list(found) == list(names(ctx.scenario)), f"the trials of {name} have other names than expected")
            for trial in chosen(ctx.scenario):
                with ctx.phase(trial):
                    ctx.observe(trial, tried(ctx, trial, range(ctx.world_size), found[trial]))

        body.__doc__ = trials.__doc__
        registered = program_without_truth(name, invariants=(), speaks_for=speaks_for or {}, without_ddp=True)(body)

        def expected(scenario: Scenario) -> Mapping[int, Facts]:
            return {rank: dict.fromkeys(chosen(scenario), Right()) for rank in range(scenario.world_size)}

        registered.expects(expected)
        return registered

    return made


def always(*names: str) -> Callable[[Scenario], Iterable[str]]:
    """Return a function that names the same trials in every scenario."""
    return lambda scenario: names


def unlike(what: str, got: object, expected: object) -> str:
    """Return what is wrong if `got` is not `expected`, the elements of a tensor or of a list of tensors.

    Wrong elements are compared again a little later: if they are right then, the operation had not finished.
    """
    first = _elements(got)
    if first == expected:
        return ""
    wrong = f"{what} {first}, expected {expected}"
    if first is got or not comes_late(lambda: _elements(got) == expected):
        return wrong
    return f"{wrong}; the right values came later, so that it counted as done too early"


def _elements(value: object) -> object:
    """Return the elements of a tensor, or of each in a list; anything else as it is."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, list) and any(isinstance(one, Tensor) for one in value):
        return [_elements(one) for one in value]
    return value


def first_wrong(*clauses: str) -> str:
    """Return the first clause that says that something is wrong."""
    return next(filter(None, clauses), "")


def tried(ctx: RankContext, name: str, members: Sequence[int], trial: Trial) -> str:
    """Return what `trial` of the ranks `members` finds wrong, including an error that all of them raise.

    An error of some members is raised: the others would wait for them.
    """
    try:
        return trial()
    except Unsupported:
        raise
    except Exception as error:
        if not all_publish(f"raised in {name}", ctx.rank, members):
            raise
        where = ctx.current_phase.removeprefix(name).removeprefix(",")
        return f"raised {type(error).__name__}{where}: {shorten(str(error))}{_place(error)}"


def _place(error: Exception) -> str:
    """Return the line of the backend's own code in which `error` was raised; empty if only torch and we had a part."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(_NOT_ITS_OWN)]
    return f" ({frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""
