"""Features of composed trainings, and the pairs of them that a training covers."""

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain, combinations, product

from conformance.composed.training import (
    ACTIONS,
    AROUND,
    CHECKPOINTS,
    COMM_HOOKS,
    COMPRESSING,
    EXCHANGES,
    HANDLING,
    IDLE,
    KINDS,
    NESTED,
    OPTIMIZERS,
    ORDERS,
    OUTPUTS,
    PRECISIONS,
    SIZES,
    TURNS,
    WHEN,
    WHEN_IN_COMPANY,
    Exchange,
    Training,
)
from conformance.scenario import Scenario

#: The options of DDP in trainings, and their values besides the default.
OPTIONS: dict[str, tuple[object, ...]] = {
    "gradient_as_bucket_view": (True,),
    "find_unused_parameters": (True,),
    "static_graph": (True,),
    "skip_all_reduce_unused_params": (True,),
    "batched_grad_copy": (True,),
    "forward_sync_buffers": (False,),
    "bucket_cap_mb": (0.00001, 0.0001),
}
#: The kinds of blocks in a wrapper beside another, and its other traits.
KINDS_BESIDE = ("linear", "branch", "counted")
BESIDE_TRAITS = ("shares", "own_group", "stays")
WORLD_SIZES = (1, 2, 3, 4)
#: The numbers of ranks that divide gradients in bfloat16 exactly.
EXACT_IN_HALVES = (1, 2, 4)

#: Features by which ranks may use different parameters: `static_graph` promises that none occurs.
_BY_RANK = {
    "block branch", "runs rank_0", "runs not_rank_0", *(f"idle {idle}" for idle in IDLE),
    *(f"action {kind}:rank_0" for kind, ways in ACTIONS.items() if "rank_0" in ways),
}  # fmt: skip

#: Features that a DDP may refuse in any training (see `refusal`).
REFUSABLE = frozenset({
    *(f"action {kind}:{way}" for kind in ("freeze", "unfreeze", "append", "penalty", "head") for way in ACTIONS[kind]),
    "action replace:block", "action replace:parameter", "action fail:backward", "action backward:apart",
    "action backward:reversed", "action backward:twice", "checkpoint reentrant",
})  # fmt: skip

Pair = tuple[str, str]


def features(scenario: Scenario) -> frozenset[str]:
    """Return the names of the features of `scenario`: `option static_graph=True`, `action freeze:rank_0`, ..."""
    training = Training.of(scenario)
    found = {f"option {name}={value}" for name, value in scenario.options.items() if value in OPTIONS.get(name, ())}
    found |= {f"action {action}" for action in training.actions}
    found |= {f"output {training.output}", f"world size {scenario.world_size}"}
    named = {
        "idle": training.idle, "hook": training.comm_hook, "around": training.around, "precision": training.precision,
        "optimizer": training.optimizer, "nested": training.nested, "finalizes": training.finalizes,
        "store": training.store,
    }  # fmt: skip
    found |= {f"{what} {value}" for what, value in named.items() if value}
    found |= {"delayed blocks"} if training.delays else set()
    found |= {"lazy buckets"} if scenario.options.get("lazy_bucket_allocation") else set()
    found |= set(_company(training))
    for block in training.blocks:
        found |= {f"block {block.kind}", f"runs {block.when}"}
        found |= {f"checkpoint {block.checkpoint}"} if block.checkpoint else set()
        found |= set() if block.trainable else {"frozen block"}
    return frozenset(found)


def _company(training: Training) -> Iterator[str]:
    if training.order:
        yield f"order {training.order}"
    if (exchange := training.exchange) is not None:
        yield from (f"exchange {exchange.place}", f"elements {exchange.size}")
    if (beside := training.beside) is not None:
        yield from (f"beside block {beside.block.kind}", f"beside runs {beside.block.when}")
        yield from (f"beside option {name}={value}" for name, value in beside.options.items())
        yield from (f"beside {trait}" for trait in BESIDE_TRAITS if getattr(beside, trait))
        if beside.turn:
            yield f"beside turn {beside.turn}"


def company() -> tuple[tuple[str, ...], ...]:
    """Return the features of trainings whose DDP is not alone in its group, in groups as `groups`."""
    return (
        tuple(f"exchange {place}" for place in EXCHANGES),
        tuple(f"elements {size}" for size in SIZES),
        tuple(f"beside block {kind}" for kind in KINDS_BESIDE),
        tuple(f"beside runs {when}" for when in WHEN_IN_COMPANY),
        *((f"beside {trait}",) for trait in BESIDE_TRAITS),
        tuple(f"beside turn {turn}" for turn in TURNS if turn),
        *(tuple(f"beside option {name}={value}" for value in values) for name, values in OPTIONS.items()),
        *((f"runs {when}",) for when in WHEN_IN_COMPANY if when not in WHEN),
        tuple(f"order {order}" for order in ORDERS if order),
    )


def numerics() -> tuple[tuple[str, ...], ...]:
    """Return the features of trainings in half precision or with an optimizer in backward, in groups as `groups`."""
    return (
        tuple(f"precision {precision}" for precision in PRECISIONS if precision),
        tuple(f"optimizer {optimizer}" for optimizer in OPTIMIZERS if optimizer),
    )


def handling() -> tuple[tuple[str, ...], ...]:
    """Return the features of trainings that do more with wrappers than train with one, in groups as `groups`."""
    return (
        *((f"action {kind}:{how}",) for kind, ways in HANDLING.items() for how in ways),
        tuple(f"nested {nested}" for nested in NESTED if nested),
    )


def groups(world_sizes: Iterable[int] = WORLD_SIZES) -> tuple[tuple[str, ...], ...]:
    """Return all features that are not special, in groups of features that exclude each other."""
    world_sizes = tuple(world_sizes)
    around = [around for around in AROUND if around and (around != "autocast" or may_be_in_halves(world_sizes))]
    return (
        *((f"action {kind}:{how}",) for kind, ways in ACTIONS.items() for how in ways),
        *((f"block {kind}",) for kind in KINDS),
        *((f"runs {when}",) for when in WHEN),
        *((f"checkpoint {checkpoint}",) for checkpoint in CHECKPOINTS if checkpoint),
        ("frozen block",),
        ("delayed blocks",),
        tuple(f"idle {idle}" for idle in IDLE if idle),
        tuple(f"hook {hook}" for hook in COMM_HOOKS if hook),
        tuple(f"around {one}" for one in around),
        tuple(f"output {output}" for output in OUTPUTS),
        tuple(f"world size {world_size}" for world_size in world_sizes),
        *(tuple(f"option {name}={value}" for value in values) for name, values in OPTIONS.items()),
    )


def may_be_in_halves(world_sizes: Iterable[int]) -> bool:
    """Whether a training with autocast or in half precision has an exact truth for some of these world sizes."""
    return not set(EXACT_IN_HALVES).isdisjoint(world_sizes)


def possible_pairs(world_sizes: Iterable[int] = WORLD_SIZES) -> frozenset[Pair]:
    """Return all pairs of features that one training can have, each in alphabetical order."""
    world_sizes = tuple(world_sizes)
    inexact = {f"world size {world_size}" for world_size in world_sizes if world_size not in EXACT_IN_HALVES}
    return frozenset(
        ordered(first, second)
        for one, other in combinations(groups(world_sizes), 2)
        for first, second in product(one, other)
        if not ("option static_graph=True" in (first, second) and {first, second} & _BY_RANK)
        and not ("around autocast" in (first, second) and {first, second} & inexact)
        and {first, second} != {"action fail:backward", "block sparse"}  # see `refusal.not_judged`
    )


#: The kinds of special trainings: their DDP is not alone, they have numerics, or do more with wrappers than train one.
SPECIAL = {"company": company, "numerics": numerics, "handling": handling}


def possible_pairs_with(special: str, world_sizes: Iterable[int] = WORLD_SIZES) -> frozenset[Pair]:
    """Return the pairs, of which at least one feature is `special`, that one training can have and be judged with."""
    own = SPECIAL[special]()
    with_others = product(own, groups(world_sizes))
    return frozenset(
        ordered(first, second)
        for one, other in chain(with_others, combinations(own, 2))
        for first, second in product(one, other)
        if not any((first in these and second in those) or (second in these and first in those)
                   for these, those in _apart())
    )  # fmt: skip


def all_possible_pairs(world_sizes: Iterable[int] = WORLD_SIZES) -> frozenset[Pair]:
    """Return all pairs of features that one training can have and be judged with."""
    world_sizes = tuple(world_sizes)
    return possible_pairs(world_sizes).union(*(possible_pairs_with(special, world_sizes) for special in SPECIAL))


@cache
def _apart() -> tuple[tuple[frozenset[str], frozenset[str]], ...]:
    """Return pairs of sets whose features exclude each other (see `refusal.not_judged`)."""
    everything = frozenset(chain(*groups(), *company(), *numerics(), *handling()))

    def starting(*starts: str) -> frozenset[str]:
        return frozenset(feature for feature in everything if feature.startswith(starts))

    changing = starting("action no_sync", "action autograd_grad", "action fail", "action hook", "action mode",
                        "action copy", "action load", "action replace", "action regroup")  # fmt: skip
    by_turns = starting("beside runs") - {"beside runs always"} | {"beside block branch"}
    compressing = frozenset(f"precision {one}" for one in COMPRESSING)
    static, static_beside = frozenset({"option static_graph=True"}), frozenset({"beside option static_graph=True"})
    within = frozenset(f"exchange {place}" for place in EXCHANGES if Exchange(place).within_module)
    return (
        (frozenset(chain(*company())), REFUSABLE | starting("action join")),
        (static, frozenset(_BY_RANK | {"runs rank_0_later"})),
        (static_beside, by_turns | changing | {"beside turn apart_local"}),
        (within, starting("idle")),
        (within - {"exchange forward"}, frozenset({"around thread"})),
        (frozenset({"beside shares"}), starting("action copy")),
        (frozenset(chain(*numerics())), REFUSABLE),
        (compressing, starting("hook", "block sparse", "block complex")),
        (starting("precision"), starting("world size") - {f"world size {size}" for size in EXACT_IN_HALVES}),
        (starting("optimizer"), starting("action copy", "action replace")),
        (frozenset(chain(*handling())), REFUSABLE),
        (starting("action transform"), starting("checkpoint", "around saved_tensors")),
        (starting("action wrapper"), frozenset({"action relayout:rank_0"})),
        (frozenset({"action wrapper:kept"}), frozenset({"action wrapper:bare"})),
        (frozenset({"action transform:jvp"}), frozenset({"block counted"})),
        (starting("order"), frozenset({"action forward:functional", "action fail:forward"})),
        (starting("nested"), starting("idle", "action join", "action load:by_checkpoint", "order")),
    )


def pairs_of(scenario: Scenario) -> frozenset[Pair]:
    """Return the pairs of features that `scenario` has."""
    return frozenset(ordered(first, second) for first, second in combinations(features(scenario), 2))


def ordered(first: str, second: str) -> Pair:
    """Return the pair in alphabetical order."""
    return (first, second) if first < second else (second, first)
