"""Program `failed_collectives`: a training in which each collective fails in turn."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from conformance.chapters.failed_communication.failing_group import FailingGroup
from conformance.chapters.failed_communication.features import FEATURES, Feature, Training
from conformance.errors import certain, instance
from conformance.observation import ENDINGS, Facts
from conformance.programs import RankContext, program
from conformance.programs.rank_context import Unsupported
from conformance.scenario import Scenario
from conformance.truth.expected import Satisfies

#: Longer than a busy machine keeps a rank waiting; a rank that receives no report may wait in vain.
_TIMEOUT = timedelta(seconds=8)
_State = Mapping[str, Any]
_making: dist.ProcessGroup | None = None


@dataclass
class Course:
    """The result of a training: the state after each part, and the error that ended it, raised in the backward or not.

    `again`: the state after the part that failed was run again, when nothing failed any more; None if it was refused.
    """

    states: list[_State] = field(default_factory=list)
    error: str = ""
    in_backward: bool = False
    again: _State | None = None


@program(
    "failed_collectives", invariants=("leaves_no_trace",),
    speaks_for={"stale": ("FAIL-06",), "unnamed": ("FAIL-07",)},
)  # fmt: skip
def failed_collectives(ctx: RankContext) -> None:
    """Train with `feature`, and once more for each of its collectives, which fails as `failure` says. All ranks run it.

    Observes `outcomes`: the number of these `cells`, of the cells that were `right`, as if nothing had failed, of those
    that `raised`, and of the `silent` others. `silent` describes these, `stale` the cells in which the training went on
    afterwards with other values than without a failure, `unnamed` those whose error in backward names no parameter.
    """
    if ctx.device.type != "cpu":
        ctx.unsupported("a wait for an accelerator's collective does not raise on the host")
    feature, failure = FEATURES[ctx.arguments["feature"]], ctx.arguments["failure"]
    silent, stale, unnamed = [], [], []
    num_right = num_raised = 0
    timeout = ctx.at_this_load(_TIMEOUT)
    with _failing_group(ctx, timeout) as group:
        undisturbed = _run(ctx, feature, group)
        certain(not undisturbed.error, f"{ctx.scenario.id}: nothing failed, and this was raised: {undisturbed.error}")
        cells = list(group.issued)
        names = [name.removeprefix("parameter ") for name in undisturbed.states[0] if name.startswith("parameter ")]
        for position, described in enumerate(cells):
            if failure == "late" and position:  # gloo's connections do not survive a timeout
                dist.destroy_process_group(group.inner)
                group.inner = instance(dist.new_group(timeout=timeout), dist.ProcessGroup)
            group.begin(position, failure)
            course = _run(ctx, feature, group)
            changed = [
                (part, name)
                for part, (state, right) in enumerate(zip(course.states, undisturbed.states, strict=False))
                for name in _differing(state, right)
            ]
            if changed:
                part, name = changed[0]
                silent.append(f"{described}: raised nothing, and after part {part} {name} is another one")
            num_right += not changed and not course.error
            num_raised += not changed and bool(course.error)
            if course.error and course.again is not None:
                kept = {name: value for name, value in course.again.items() if not name.startswith("buffer")}
                if found := _differing(kept, undisturbed.states[-1 if feature.is_uneven else len(course.states)]):
                    stale.append(
                        f"{described}: after the error, the next forward went on, and {found[0]} is another one"
                    )
            if course.in_backward and feature.tells_parameters and not any(name in course.error for name in names):
                unnamed.append(f"{described}: names no parameter: {course.error}")
            dist.barrier(group=ctx.process_group)  # no rank starts again before all have failed
    ctx.observe("outcomes", {"cells": len(cells), "right": num_right, "raised": num_raised, "silent": len(silent)})
    ctx.observe("silent", silent)
    ctx.observe("stale", stale)
    ctx.observe("unnamed", unnamed)


def _none_is_silent(outcomes: Mapping[str, int]) -> bool:
    return outcomes["cells"] > 0 and outcomes["silent"] == 0


@failed_collectives.expects
def _expected(scenario: Scenario) -> Mapping[int, Facts]:
    outcomes = Satisfies("some cells, none silent", _none_is_silent)
    facts: Facts = {"silent": [], "stale": [], "unnamed": [], "outcomes": outcomes}
    return dict.fromkeys(range(scenario.world_size), facts)


def _run(ctx: RankContext, feature: Feature, group: FailingGroup) -> Course:
    course, training = Course(), Training(ctx, feature, group)
    parts = training.parts
    try:
        training.wrap()
        for part in parts:
            course.states.append(part())
    except (Unsupported, *ENDINGS):
        raise
    except Exception as error:
        course.error = "\n".join((f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())))
        course.in_backward = training.in_backward
    if course.error and training.model is not None:
        group.begin()
        try:
            course.again = parts[-1 if feature.is_uneven else len(course.states)]()
        except Exception:
            course.again = None
    return course


def _differing(state: _State, right: _State) -> list[str]:
    return [name for name, value in state.items() if not _is_same(value, right[name])]


def _is_same(one: Any, other: Any) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


@contextmanager
def _failing_group(ctx: RankContext, timeout: timedelta) -> Iterator[FailingGroup]:
    """Make a `FailingGroup` of all ranks, which torch has registered. All ranks must call it."""
    global _making
    if "failing" not in dist.Backend.backend_list:
        dist.Backend.register_backend("failing", _create, devices=[ctx.device.type])
    _making = instance(dist.new_group(timeout=timeout), dist.ProcessGroup)
    group = instance(dist.new_group(backend="failing"), FailingGroup)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)
        dist.destroy_process_group(group.inner)


def _create(*_: Any) -> FailingGroup:
    return FailingGroup(instance(_making, dist.ProcessGroup))
