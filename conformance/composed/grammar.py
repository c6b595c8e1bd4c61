"""The grammar of composed trainings: draws one by the choices of a random generator or Hypothesis."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Literal

from conformance.composed.choose import Choose, chosen_by
from conformance.composed.company import WHEN_TO_DRAW_IN_COMPANY, in_company
from conformance.composed.features import (
    OPTIONS,
    REFUSABLE,
    WORLD_SIZES,
    Pair,
    features,
    may_be_in_halves,
    pairs_of,
    possible_pairs,
    possible_pairs_with,
)
from conformance.composed.handling import handled
from conformance.composed.refusal import not_judged, refusal
from conformance.composed.simpler import renamed
from conformance.composed.training import (
    ACTIONS,
    AROUND,
    CHECKPOINTS,
    CLASSES,
    COMM_HOOKS,
    COMPRESSING,
    CONTAINERS,
    IDLE,
    KINDS,
    MIXED,
    OPTIMIZERS,
    OUTPUTS,
    PRECISIONS,
    STORES,
    WHEN,
    Action,
    Block,
    Training,
    depends_on_rank,
    may_miss_gradients,
    trains,
)
from conformance.errors import certain
from conformance.scenario import Scenario

#: The requirements of every composed training.
REQUIREMENTS = ("COMPOSED-01", "COMPOSED-02")

_MAX_BLOCKS = 3
_MAX_ACTIONS = 9
#: What is special about a training, see `features.SPECIAL`.
Special = Literal["", "company", "numerics", "handling"]
_SPECIAL: tuple[Special, ...] = ("company", "numerics", "handling")
#: How often a special training is drawn until it can be judged.
_MOST_DRAWN = 10_000
#: How often a training is drawn again that a DDP may refuse, and how often that is avoided.
_REDRAWN = 10
_MOSTLY = (True,) * 9 + (False,)
#: The weights of actions other than 1: a loop mostly runs forward and backward.
_WEIGHTS = {"forward": 6, "backward": 6, "no_sync": 2, "zero_grad": 3, "step": 3, "head": 2, "penalty": 2}
_ACTIONS = tuple(
    (kind, ways[turn % len(ways)])
    for kind, ways in ACTIONS.items()
    for turn in range(len(ways) * _WEIGHTS.get(kind, 1))
)
_WHEN = ("always",) * 2 * len(WHEN) + WHEN
_CHECKPOINTS = ("",) * 4 + CHECKPOINTS
# A tame training has only features that no DDP may refuse; half of all trainings are tame.
_REFUSABLE = {"freeze", "unfreeze", "append", "penalty", "head"}
_REFUSABLE_WAYS = {
    ("replace", "block"), ("replace", "parameter"), ("fail", "backward"),
    ("backward", "apart"), ("backward", "reversed"), ("backward", "twice"),
}  # fmt: skip
_TAME_ACTIONS = tuple(one for one in _ACTIONS if one[0] not in _REFUSABLE and one not in _REFUSABLE_WAYS)
_TAME_KINDS = tuple(kind for kind in KINDS if kind != "branch")
_TAME_CHECKPOINTS = ("", "", "non_reentrant")
_TAME_OUTPUTS = tuple(output for output in OUTPUTS if output != "unused_tail")
_DEADLINE_S = 5.0
#: Options that are capabilities under the same name; the others every DDP is expected to take.
_CAPABILITIES = frozenset(OPTIONS) - {"batched_grad_copy", "forward_sync_buffers", "bucket_cap_mb"}


def draw(
    choose: Choose, *, world_sizes: Sequence[int] = WORLD_SIZES, must: Iterable[str] = (), special: Special = "",
    few_refusals: bool = False,
) -> Scenario:  # fmt: skip
    """Return a scenario of program `composed` that has all features in `must` (see `features`), drawn by `choose`.

    A DDP may not refuse a `special` training, for which `must` may have special features. With `few_refusals` it may
    refuse few of the others, unless it may refuse a feature in `must`.
    """
    must = tuple(must)
    for _ in range(_REDRAWN if few_refusals and not special and choose(_MOSTLY) else 0):
        scenario = _drawn(choose, world_sizes, must, tame=True)
        if features(scenario).issuperset(must) and not refusal(Training.of(scenario), scenario.options):
            return scenario
    if not special:
        return _drawn(choose, world_sizes, must, tame=not must and choose((True, False)))
    for _ in range(_MOST_DRAWN):
        scenario = _drawn(choose, world_sizes, must, tame=True, special=special)
        is_exact = not Training.of(scenario).precision or may_be_in_halves([scenario.world_size])
        if features(scenario).issuperset(must) and is_exact and not not_judged(Training.of(scenario), scenario.options):
            return scenario
    raise AssertionError(f"the grammar drew nothing with {must} that can be judged")


#: The actions of a loop that finalizes by hand.
_MAY_FINALIZE = {"forward", "backward", "no_sync", "zero_grad", "step", "mode", "gradients", "hook", "join", "load"}

#: Actions in which torch looks up the group of the training, so that it must be one of torch's own.
_ASK_FOR_THE_GROUP = {"copy", "join"}


def with_newer_options(scenario: Scenario) -> Scenario:
    """Return the composed `scenario` with lazy buckets, and finalized by hand if each of its backwards can be."""
    training = Training.of(scenario)
    special = training.idle or training.in_company or training.is_handled or refusal(training, scenario.options)
    several = {"backward:apart", "backward:reversed", "backward:twice"} & set(map(str, training.actions))
    needs = {*scenario.needs, "lazy_bucket_allocation"}
    if not (special or several) and {action.kind for action in training.actions} <= _MAY_FINALIZE:
        training, needs = replace(training, finalizes="by_hand"), {*needs, "manual_finalization"}
    options = {**scenario.options, "lazy_bucket_allocation": True}
    return renamed(scenario.replace(options=options, arguments=training.to_json(), needs=tuple(sorted(needs))))


def with_own_classes(scenario: Scenario, choose: Choose) -> Scenario:
    """Return the composed `scenario` with a container around what forward gets and returns, or a tensor of a class.

    Its group's store may have served an earlier run, unless torch asks for the group of the training.
    """
    training = Training.of(scenario)
    kept, *rest = training.blocks
    replaceable = kept.kind in ("linear", "transposed", "counted")
    blocks = (replace(kept, kind=choose(CLASSES)), *rest) if replaceable else training.blocks
    is_known = any(action.kind in _ASK_FOR_THE_GROUP for action in training.actions)
    training = replace(
        training, blocks=blocks, output=choose((*CONTAINERS, training.output)), store="" if is_known else choose(STORES)
    )
    return renamed(scenario.replace(arguments=training.to_json(), recorded=scenario.recorded and not training.store))


def _drawn(
    choose: Choose, world_sizes: Sequence[int], must: tuple[str, ...], *, tame: bool, special: Special = ""
) -> Scenario:
    wanted = dict(feature.split(" ", 1) for feature in must if feature.split(" ", 1)[0] in ("output", "world"))
    blocks = _blocks(choose, must, tame, bool(special))
    joins = any(feature.startswith("action join") for feature in must)
    world_size = int(wanted["world"].rpartition(" ")[2]) if "world" in wanted else choose(world_sizes)
    if "around autocast" in must and not may_be_in_halves([world_size]):
        world_size = choose([one for one in world_sizes if may_be_in_halves([one])])
    arounds = [around for around in AROUND if around != "autocast" or may_be_in_halves([world_size])]
    training = Training(
        blocks=blocks,
        output=wanted["output"] if "output" in wanted else choose(_TAME_OUTPUTS if tame or joins else OUTPUTS),
        actions=tuple(_actions(choose, must, tame, bool(special), len(blocks))),
        idle=_one_of("idle", IDLE, choose, must),
        comm_hook=_one_of("hook", COMM_HOOKS, choose, must),
        delays="delayed blocks" in must or choose((False,) * 9 + (True,)),
        around=_one_of("around", arounds, choose, must),
    )
    if special == "company" or (special and choose((False,) * 4 + (True,))):
        training = in_company(training, choose, must)
    if special == "numerics":
        training = _with_numerics(training, choose, must)
    if special == "handling":
        training = handled(training, choose, must)
    options = _options(choose, must)
    # Without it ranks that use different parameters would wait for each other until a timeout.
    if depends_on_rank(training) or (special and may_miss_gradients(training)):
        options["find_unused_parameters"] = True
        options.pop("static_graph", None)  # the user's promise that this does not happen
    scenario = Scenario(
        f"composed/{REQUIREMENTS[0]}/composed", REQUIREMENTS, "composed", world_size=world_size, options=options,
        arguments=training.to_json(), seed=choose(range(4)), needs=needs_of(training, options),
        min_collectives=0, deadline_s=_DEADLINE_S,
    )  # fmt: skip
    return renamed(scenario)


def _with_numerics(training: Training, choose: Choose, must: tuple[str, ...]) -> Training:
    precisions = [one for one in PRECISIONS if f"precision {one}" in must]
    optimizers = [one for one in OPTIMIZERS if f"optimizer {one}" in must]
    return replace(
        training, precision=choose(precisions or PRECISIONS), optimizer=choose(optimizers or ("", *OPTIMIZERS))
    )


def cover(seed: int, *, world_sizes: Sequence[int] = WORLD_SIZES, few_refusals: bool = False) -> Iterator[Scenario]:
    """Yield trainings until every pair of features that one training can have was in one of them.

    Special trainings alternate with the others. With `few_refusals` trainings that a DDP may refuse are the last.
    """
    alone = _cover(random.Random(seed), possible_pairs(world_sizes), world_sizes, few_refusals=few_refusals)
    special = [
        _cover(random.Random(f"{kind} {seed}"), possible_pairs_with(kind, world_sizes), world_sizes, special=kind)
        for kind in _SPECIAL
    ]
    for each in zip_longest(alone, *special):
        yield from filter(None, each)


def _cover(
    chooser: random.Random, pairs: Iterable[Pair], world_sizes: Sequence[int], *, special: Special = "",
    few_refusals: bool = False,
) -> Iterator[Scenario]:  # fmt: skip
    missing = sorted(pairs)
    chooser.shuffle(missing)
    if few_refusals:
        missing.sort(key=lambda pair: not REFUSABLE.isdisjoint(pair))
    left = dict.fromkeys(missing)
    while left:
        pair: Pair = next(iter(left))
        scenario = draw(
            chosen_by(chooser), world_sizes=world_sizes, must=pair, special=special, few_refusals=few_refusals
        )
        covered = pairs_of(scenario)
        certain(pair in covered, f"the grammar did not draw {pair}")
        for one in covered:
            left.pop(one, None)
        yield scenario


def needs_of(training: Training, options: Mapping[str, object]) -> tuple[str, ...]:
    """Return the capabilities that `training` with `options` needs, sorted."""
    needs = set(_CAPABILITIES & options.keys())
    needs |= {"comm_hook"} if training.comm_hook else set()
    needs |= {"delay_all_reduce"} if training.delays else set()
    needs |= {"comm_hook"} if training.precision in COMPRESSING else set()
    needs |= {"mixed_precision"} if training.precision in MIXED else set()
    needs |= {"optimizer_in_backward"} if training.optimizer else set()
    needs |= {"ignored_parameters"} if training.nested == "ignored" else set()
    if training.beside is not None:
        needs |= _CAPABILITIES & training.beside.options.keys()
        needs |= {"no_sync"} if training.beside.turn == "apart_local" else set()
    kinds = {action.kind for action in training.actions}
    return tuple(sorted(needs | {need for kind, need in _ACTIONS_NEED.items() if kind in kinds}))


#: The capabilities that actions need.
_ACTIONS_NEED = {"no_sync": "no_sync", "copy": "pickling", "regroup": "update_process_group", "join": "join"}


def _one_of(what: str, values: Sequence[str], choose: Choose, must: tuple[str, ...]) -> str:
    """Return the value that `must` names for `what`, else mostly none, and none that a static graph excludes."""
    wanted = [value for value in values if value and f"{what} {value}" in must]
    if wanted:
        return wanted[0]
    if what == "idle" and "option static_graph=True" in must:
        return ""
    return choose(("",) * 4 * len(values) + tuple(values))


def _blocks(choose: Choose, must: tuple[str, ...], tame: bool, special: bool) -> tuple[Block, ...]:
    """Draw blocks that share the features in `must`, so that the training stays small."""
    kinds = [feature.removeprefix("block ") for feature in must if feature.startswith("block ")]
    whens = [feature.removeprefix("runs ") for feature in must if feature.startswith("runs ")]
    checkpoints = [feature.removeprefix("checkpoint ") for feature in must if feature.startswith("checkpoint ")]
    frozen = ["frozen"] * ("frozen block" in must)
    static = "option static_graph=True" in must
    num_blocks = max(len(kinds), len(whens), len(checkpoints), choose(range(1, _MAX_BLOCKS + 1)))
    blocks = []
    kinds_to_draw = _TAME_KINDS if tame or static else KINDS
    whens_to_draw = ("always",) if tame or static else _WHEN
    if special and not static:
        kinds_to_draw, whens_to_draw = KINDS, WHEN_TO_DRAW_IN_COMPANY
    checkpoints_to_draw = _TAME_CHECKPOINTS if tame else _CHECKPOINTS
    for _ in range(num_blocks):
        trainable = not frozen.pop() if frozen else choose((True, True, True, True, True, False))
        blocks.append(
            Block(
                kind=kinds.pop() if kinds else choose(kinds_to_draw),
                when=whens.pop() if whens else choose(whens_to_draw),
                checkpoint=checkpoints.pop() if checkpoints else choose(checkpoints_to_draw),
                trainable=trainable,
            )
        )
    if not trains(blocks):
        blocks.append(Block())
    return tuple(blocks)


def _actions(choose: Choose, must: tuple[str, ...], tame: bool, special: bool, num_blocks: int) -> Iterator[Action]:
    wanted = [feature.removeprefix("action ") for feature in must if feature.startswith("action ")]
    kinds = _TAME_ACTIONS if tame else _ACTIONS
    drawn = [Action(*choose(kinds), choose(range(num_blocks))) for _ in range(choose(range(_MAX_ACTIONS + 1)))]
    if "option static_graph=True" in must:  # excludes actions that depend on the rank
        drawn = [action for action in drawn if action.how != "rank_0" and action.kind not in ("freeze", "join")]
    if special and any("static_graph" in feature for feature in must):
        drawn = [action for action in drawn if action.kind in _LEAVE_THE_GRAPH]
    for text in wanted:
        kind, _, how = text.partition(":")
        position = choose(range(len(drawn) + 1))
        action = Action(kind, how, choose(range(num_blocks)))
        forward, backward = Action("forward", "plain"), Action("backward", "together")
        if kind in ("head", "penalty"):  # it finds most in a second step, after one without it
            drawn[position:position] = [forward, backward, forward, action, backward]
        elif how == "kept" and kind == "wrapper" and choose(range(2)):
            again = Action("wrapper", "again")  # it finds most before other wrappers with one backward
            drawn[position:position] = [action, again, forward, again, forward, backward]
        elif kind == "wrapper":  # it finds most between a forward and its backward
            drawn[position:position] = [forward, action, backward]
        elif special and kind == "forward":  # a static graph allows one before a backward
            drawn[position:position] = [action, backward]
        else:
            drawn[position:position] = [forward, action] if kind in _NEED_FORWARD else [action]
    yield from drawn


#: The other actions that a static graph allows.
_LEAVE_THE_GRAPH = {"zero_grad", "step", "gradients", "relayout"}
#: Actions without effect unless a forward precedes them.
_NEED_FORWARD = {"backward", "autograd_grad"}


def _options(choose: Choose, must: tuple[str, ...]) -> dict[str, object]:
    options: dict[str, object] = {}
    for name, values in OPTIONS.items():
        wanted = [value for value in values if f"option {name}={value}" in must]
        chosen = wanted[0] if wanted else choose((None, None, *values))
        if chosen is not None:
            options[name] = chosen
    return options
