"""Simpler scenarios than a given one, the largest steps first, for shrinking."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from conformance.composed.refusal import not_judged
from conformance.composed.training import Beside, Block, Training, depends_on_rank, trains
from conformance.scenario import Scenario

#: Fields of a training that shrinking sets to their defaults, in this order.
_PLAIN = (
    "idle", "comm_hook", "delays", "around", "precision", "optimizer", "finalizes", "nested", "output", "store",
)  # fmt: skip


def shrink(scenario: Scenario, still_fails: Callable[[Scenario], bool], most: int = 200) -> Scenario:
    """Return the simplest scenario found for which `still_fails`, which is called `most` times."""
    asked = 0
    found = True
    while found:
        found = False
        for candidate in islice(simpler(scenario), most - asked):
            asked += 1
            if still_fails(candidate):
                scenario, found = candidate, True
                break
    return scenario


def simpler(scenario: Scenario) -> Iterator[Scenario]:
    """Yield scenarios that lack a part of `scenario` or have it simpler, each with the id of its contents.

    All can be judged.
    """
    for candidate in _simpler(scenario):
        if not not_judged(Training.of(candidate), candidate.options):
            yield candidate


def _simpler(scenario: Scenario) -> Iterator[Scenario]:
    for training in _simpler_training(Training.of(scenario)):
        yield renamed(scenario.replace(arguments=training.to_json()))
    by_rank = depends_on_rank(Training.of(scenario))
    for name in scenario.options:
        if by_rank and name == "find_unused_parameters":
            continue
        options = {other: value for other, value in scenario.options.items() if other != name}
        yield renamed(scenario.replace(options=options, needs=tuple(need for need in scenario.needs if need != name)))
    if scenario.world_size > 2:
        yield renamed(scenario.replace(world_size=2))
    if scenario.world_size > 1:
        yield renamed(scenario.replace(world_size=scenario.world_size - 1))


def renamed(scenario: Scenario) -> Scenario:
    """Return `scenario` with an id from its contents."""
    chapter, requirement, _ = scenario.id.split("/")
    blank = scenario.replace(id=f"{chapter}/{requirement}/composed")
    return blank.replace(id=f"{chapter}/{requirement}/{blank.digest[:12]}")


def _simpler_training(training: Training) -> Iterator[Training]:
    actions = training.actions
    size = len(actions)
    while size:
        for start in range(0, len(actions), size):
            yield replace(training, actions=actions[:start] + actions[start + size :])
        size //= 2
    for index in range(len(training.blocks)):
        rest = training.blocks[:index] + training.blocks[index + 1 :]
        if trains(rest):
            renumbered = (replace(one, block=one.block - (one.block > index)) for one in actions)
            yield replace(training, blocks=rest, actions=tuple(renumbered))
    yield from _simpler_company(training)
    for name in _PLAIN:
        if getattr(training, name) != (plain := getattr(Training(), name)):
            yield replace(training, **{name: plain})
    for index, block in enumerate(training.blocks):
        for plain in _simpler_block(block):
            yield replace(training, blocks=(*training.blocks[:index], plain, *training.blocks[index + 1 :]))
    for index, action in enumerate(actions):
        if action.block:
            nearer = replace(action, block=action.block - 1)
            yield replace(training, actions=(*actions[:index], nearer, *actions[index + 1 :]))


def _simpler_company(training: Training) -> Iterator[Training]:
    if training.order:
        yield replace(training, order="")
    if (exchange := training.exchange) is not None:
        yield replace(training, exchange=None)
        if exchange.place == "both":
            yield from (replace(training, exchange=replace(exchange, place=place)) for place in ("forward", "backward"))
        if exchange.size > 1:
            yield replace(training, exchange=replace(exchange, size=1))
        if exchange.block:
            yield replace(training, exchange=replace(exchange, block=exchange.block - 1))
    if (beside := training.beside) is not None:
        yield replace(training, beside=None)
        for name in ("shares", "own_group", "stays", "turn"):
            if getattr(beside, name):
                yield replace(training, beside=replace(beside, **{name: getattr(Beside(), name)}))
        for plain in _simpler_block(beside.block):
            yield replace(training, beside=replace(beside, block=plain))
        for name in beside.options:
            rest = {other: value for other, value in beside.options.items() if other != name}
            yield replace(training, beside=replace(beside, options=rest))


def _simpler_block(block: Block) -> Iterator[Block]:
    for name in ("checkpoint", "when", "trainable", "kind"):
        if getattr(block, name) != (plain := getattr(Block(), name)):
            yield replace(block, **{name: plain})
