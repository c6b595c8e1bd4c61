"""Draws the company of a DDP: the user's collectives, another wrapper, or both."""

from dataclasses import replace

from conformance.composed.choose import Choose
from conformance.composed.features import BESIDE_TRAITS, KINDS_BESIDE, OPTIONS
from conformance.composed.training import (
    EXCHANGES,
    ORDERS,
    SIZES,
    TURNS,
    WHEN_IN_COMPANY,
    WITHIN_BACKWARD,
    Beside,
    Block,
    Exchange,
    Training,
    depends_on_rank,
    may_miss_gradients,
)

#: When a block runs, if the DDP is not alone: unused parameters find most bugs.
WHEN_TO_DRAW_IN_COMPANY = ("always",) * len(WHEN_IN_COMPANY) + WHEN_IN_COMPANY


def in_company(training: Training, choose: Choose, must: tuple[str, ...]) -> Training:
    """Return `training` with company, including the features in `must`."""
    exchanges = any(feature.startswith(("exchange ", "elements ")) for feature in must)
    has_beside = any(feature.startswith("beside ") for feature in must)
    if not has_beside:
        has_beside = choose((False, True))
    if not exchanges:
        exchanges = not has_beside or choose((False, False, True))
    training = replace(
        training,
        exchange=_exchange(choose, must, len(training.blocks)) if exchanges else None,
        beside=_beside(choose, must) if has_beside else None,
    )
    return _in_order(training, choose, must) if len(training.blocks) > 1 else training


def _in_order(training: Training, choose: Choose, must: tuple[str, ...]) -> Training:
    """Return `training` with an order of blocks; different orders on ranks find most bugs in plain trainings."""
    orders = [order for order in ORDERS if order and f"order {order}" in must]
    order = choose(orders or ("", "", *ORDERS))
    if not order or choose((False, True)) or any(name.startswith(("runs", "exchange", "block")) for name in must):
        return replace(training, order=order)
    kinds = [block.kind if block.kind != "branch" else "linear" for block in training.blocks]
    exchange = replace(training.exchange or Exchange(), place=choose(WITHIN_BACKWARD))
    return replace(training, order=order, exchange=exchange, blocks=tuple(map(Block, kinds)))


def _exchange(choose: Choose, must: tuple[str, ...], num_blocks: int) -> Exchange:
    places = [place for place in EXCHANGES if f"exchange {place}" in must]
    sizes = [size for size in SIZES if f"elements {size}" in must]
    return Exchange(choose(places or EXCHANGES), choose(sizes or SIZES), choose(range(num_blocks)))


def _beside(choose: Choose, must: tuple[str, ...]) -> Beside:
    kinds = [kind for kind in KINDS_BESIDE if f"beside block {kind}" in must]
    whens = [when for when in WHEN_IN_COMPANY if f"beside runs {when}" in must]
    block = Block(choose(kinds or KINDS_BESIDE), choose(whens or WHEN_TO_DRAW_IN_COMPANY))
    options: dict[str, object] = {}
    for name, values in OPTIONS.items():
        wanted = [value for value in values if f"beside option {name}={value}" in must]
        if (chosen := choose(wanted or (None, None, None, *values))) is not None:
            options[name] = chosen
    second = Training((block,))
    if depends_on_rank(second) or may_miss_gradients(second):
        options["find_unused_parameters"] = True
        options.pop("static_graph", None)
    traits = {trait: f"beside {trait}" in must or choose((False, False, True)) for trait in BESIDE_TRAITS}
    turns = [turn for turn in TURNS if turn and f"beside turn {turn}" in must]
    return Beside(block, options, turn=choose(turns or ("", *TURNS)), **traits)
