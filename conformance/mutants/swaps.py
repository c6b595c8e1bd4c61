"""Swaps: whether anything is alike in scenarios that a requirement speaks of as different.

A swap lets the definition take one thing for another: another rank for the source, the first hook for every hook, the
default for an option. Where a requirement speaks of the thing, some scenario of it must notice.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

from conformance.mutants.truth_trace import Trace, facts_of, in_fork
from conformance.scenario import Scenario
from conformance.spec.catalogue import Requirement
from conformance.truth.plain_ddp import PlainDDP

#: At most so many scenarios of each requirement are tried.
_MOST_SCENARIOS = 12


class Swap(NamedTuple):
    """What is taken for what, the words of requirements that speak of it, and what a method of the definition does.

    `wrong` gets the usual method and its arguments, and an object of this scenario to remember things in.
    """

    name: str
    speaks: str
    method: str
    wrong: Callable[..., Any]


def _default(speaks: str, *options: str) -> Swap:
    def init(usual: Any, _: Any, ddp: Any, *args: Any, **given: Any) -> None:
        usual(ddp, *args, **{name: value for name, value in given.items() if name not in options})

    return Swap(f"default {options[0]}", speaks, "__init__", init)


def _round_0(usual: Any, seen: dict[Any, Any], ddp: Any, ranks: Any) -> Any:
    means = usual(ddp, ranks)
    return means if means[0] is None else seen.setdefault(ddp._number, means)


def _always_synchronised(usual: Any, _: Any, ddp: Any, *inputs: Any, **kwargs: Any) -> Any:
    ddp.require_backward_grad_sync = True
    return usual(ddp, *inputs, **kwargs)


def _ignoring_nothing(usual: Any, _: Any, ddp: Any, module: Any, *args: Any, **options: Any) -> None:
    module._ddp_params_and_buffers_to_ignore = ()
    usual(ddp, module, *args, **options)


#: No value depends on whether the definition searches for unused parameters, or on `static_graph`.
SWAPS = (
    Swap("another source rank", r"rank 0|joined last|still has data", "_share",
         lambda usual, _, ddp, what, tensors, root: usual(ddp, what, tensors, (root - 1) % ddp.place.size())),
    Swap("round 0 for every round", r"(?i)\b(each|every|later|next) (step|iteration|backward)|step to step", "_means",
         _round_0),
    Swap("no hook", r"(?i)(?<!buffer )(?<!comm_)\bhooks? ", "register_comm_hook", lambda *_: None),
    Swap("the first hook for every hook", r"(?i)several wrap.*hook|second hook", "register_comm_hook",
         lambda usual, seen, ddp, state, hook: usual(ddp, *seen.setdefault("first", (state, hook)))),
    Swap("no buffer hook", r"(?i)buffer hook", "_register_buffer_comm_hook", lambda *_, **__: None),
    Swap("synchronised although no_sync", r"no_sync", "forward", _always_synchronised),
    Swap("divided by the initial world size", r"divide_by_initial_world_size=False", "join_hook",
         lambda usual, _, ddp, **given: usual(ddp, **{**given, "divide_by_initial_world_size": True})),
    Swap("rank 0 for the last joiner", r"joined last", "take_last_state",
         lambda usual, _, ddp, **__: usual(ddp, is_mine=ddp.place.rank() == 0)),
    Swap("no ignored parameters", r"(?i)\bignored\b", "__init__", _ignoring_nothing),
    _default(r"(forward_sync|broadcast)_buffers|not synchronised", "forward_sync_buffers", "broadcast_buffers"),
    _default(r"init_sync", "init_sync"),
    _default(r"param_dtype|buffer_dtype|reduce_dtype", "mixed_precision"),
)  # fmt: skip


def unnoticed(
    swap: Swap, requirements: Iterable[Requirement], traces: Sequence[Trace], scenarios: Mapping[str, Scenario]
) -> Iterator[str]:
    """Yield the ids of the requirements that speak of what is swapped, and of which no scenario notices the swap."""
    of_each = {
        one.id: [each for each in traces if each.lines and one.id in scenarios[each.id].requirements][:_MOST_SCENARIOS]
        for one in requirements
        if re.search(swap.speaks, one.statement)
    }
    todo = [(id_, each) for id_, some in of_each.items() for each in some]
    usual = getattr(PlainDDP, swap.method)

    def work() -> Iterator[bool]:
        for _, each in todo:
            seen: dict[Any, Any] = {}
            wrong = lambda ddp, *args, seen=seen, **given: swap.wrong(usual, seen, ddp, *args, **given)  # noqa: E731
            with mock.patch.object(PlainDDP, swap.method, wrong):
                yield bool(each.differing(facts_of(scenarios[each.id])))

    noticing = {id_ for (id_, _), answer in zip(todo, in_fork(work), strict=False) if answer is not False}
    yield from (id_ for id_, some in of_each.items() if some and id_ not in noticing)
