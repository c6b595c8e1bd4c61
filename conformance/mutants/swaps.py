"""Swaps: whether anything is alike in scenarios that a requirement speaks of as different.

A swap lets the definition take one thing for another: the last rank for the first, the first wrapper's hook for every
wrapper's, the default for an option. Where a requirement speaks of the thing, some scenario of it must notice.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from conformance.mutants.asked import Asked, facts_of, in_fork
from conformance.scenario import Scenario
from conformance.spec.catalogue import Requirement
from conformance.truth.plain_ddp import PlainDDP

#: Of each requirement so many scenarios are asked, at most.
_MOST_SCENARIOS = 12
_Call = Callable[..., Any]


@dataclass(frozen=True)
class Swap:
    """What is taken for what; the pattern of words with which a requirement speaks of it; the method that does it."""

    name: str
    speaks: str
    method: str
    wrong: _Call

    def make(self) -> None:
        """Let every instance do it."""
        usual: _Call = getattr(PlainDDP, self.method)

        def swapped(ddp: PlainDDP, *args: Any, **more: Any) -> Any:
            return self.wrong(usual, ddp, *args, **more)

        mock.patch.object(PlainDDP, self.method, swapped).start()


def _without(*options: str) -> _Call:
    def init(usual: _Call, ddp: Any, *args: Any, **given: Any) -> None:
        usual(ddp, *args, **{name: value for name, value in given.items() if name not in options})

    return init


def _from_the_last(usual: _Call, ddp: Any, what: str, tensors: Mapping[str, Any], root: int) -> None:
    usual(ddp, what, tensors, (root - 1) % ddp.place.size())


def _of_the_world(usual: _Call, ddp: Any, what: str, tensors: Mapping[str, Any], root: int) -> None:
    members = getattr(ddp.place, "members", range(ddp.place.size()))
    usual(ddp, what, tensors, members.index(min(members)) if root == 0 else root)


_means_of_round_0: dict[tuple[Any, ...], Any] = {}


def _round_0(usual: _Call, ddp: Any, ranks: Sequence[Any]) -> Any:
    usual_means = usual(ddp, ranks)
    return usual_means if usual_means[0] is None else _means_of_round_0.setdefault((ddp._number,), usual_means)


_first_hooks: list[Any] = []


def _first_hook(usual: _Call, ddp: Any, state: Any, hook: Any) -> None:
    _first_hooks.append((state, hook))
    usual(ddp, *_first_hooks[0])


def _nothing(usual: _Call, ddp: Any, *args: Any, **more: Any) -> None:
    """Do nothing."""


def _by_all(usual: _Call, ddp: Any, **kwargs: Any) -> Any:
    return usual(ddp, **{**kwargs, "divide_by_initial_world_size": True})


def _never_last(usual: _Call, ddp: Any, *, is_mine: bool) -> None:
    usual(ddp, is_mine=ddp.place.rank() == 0)


def _always_synchronised(usual: _Call, ddp: Any, *args: Any, **more: Any) -> Any:
    ddp.require_backward_grad_sync = True
    return usual(ddp, *args, **more)


def _ignoring_nothing(usual: _Call, ddp: Any, module: Any, *args: Any, **more: Any) -> None:
    module._ddp_params_and_buffers_to_ignore = ()
    usual(ddp, module, *args, **more)


SWAPS = (
    Swap("another source rank", r"rank 0|joined last|still has data", "_share", _from_the_last),
    Swap("rank 0 of the world", r"rank 0.*group|group.*rank 0", "_share", _of_the_world),
    Swap("round 0 for every round", r"(?i)\b(each|every|later|next|first) (step|iteration|backward)|step to step",
         "_means", _round_0),
    Swap("no hook", r"(?i)(?<!buffer )(?<!comm_)\bhooks? ", "register_comm_hook", _nothing),
    Swap("no buffer hook", r"(?i)buffer hook", "_register_buffer_comm_hook", _nothing),
    Swap("synchronised although no_sync", r"no_sync", "forward",
         _always_synchronised),
    Swap("divided by the initial world size", r"divide_by_initial_world_size=False", "join_hook", _by_all),
    Swap("rank 0 for the last joiner", r"joined last", "take_last_state", _never_last),
    Swap("no ignored parameters", r"(?i)\bignored\b", "__init__",
         _ignoring_nothing),
    Swap("default find_unused_parameters", r"find_unused_parameters", "__init__", _without("find_unused_parameters")),
    Swap("default static_graph", r"static_graph", "__init__", _without("static_graph")),
    Swap("default of the buffers' options", r"(forward_sync|broadcast)_buffers|not synchronised", "__init__",
         _without("forward_sync_buffers", "broadcast_buffers")),
    Swap("default init_sync", r"init_sync", "__init__", _without("init_sync")),
    Swap("default mixed_precision", r"param_dtype|buffer_dtype|reduce_dtype", "__init__", _without("mixed_precision")),
)  # fmt: skip


def unnoticed(
    swap: Swap, requirements: Iterable[Requirement], asked: Sequence[Asked], scenarios: Mapping[str, Scenario]
) -> Iterator[str]:
    """Yield the ids of the requirements that speak of what is swapped, and of which no scenario notices the swap."""
    speaking = [one for one in requirements if re.search(swap.speaks, one.statement)]
    of_each = {
        one.id: [each for each in asked if each.lines and one.id in scenarios[each.id].requirements][:_MOST_SCENARIOS]
        for one in speaking
    }
    todo = [(id_, each) for id_, some in of_each.items() for each in some]

    def work() -> Iterator[bool]:
        swap.make()
        for _, each in todo:
            _means_of_round_0.clear()
            _first_hooks.clear()
            yield bool(each.differing(facts_of(scenarios[each.id])))

    noticing = Counter(id_ for (id_, _), answer in zip(todo, in_fork(work), strict=False) if answer is not False)
    yield from (id_ for id_, some in of_each.items() if some and not noticing[id_])
