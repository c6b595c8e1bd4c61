"""Features of a composed training, and which pairs of them a set of trainings covers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product

from conformance.composed.training import ACTIONS, AROUND, CHECKPOINTS, COMM_HOOKS, IDLE, KINDS, OUTPUTS, WHEN, Training
from conformance.scenario import Scenario

#: The options of DDP that trainings are composed with, and the values that they take besides the default.
OPTIONS: dict[str, tuple[object, ...]] = {
    "gradient_as_bucket_view": (True,),
    "find_unused_parameters": (True,),
    "static_graph": (True,),
    "skip_all_reduce_unused_params": (True,),
    "batched_grad_copy": (True,),
    "forward_sync_buffers": (False,),
    "bucket_cap_mb": (0.00001, 0.0001),
}
WORLD_SIZES = (1, 2, 3, 4)
#: By these numbers of ranks gradients that were rounded to bfloat16 are divided without a rest.
EXACT_UNDER_AUTOCAST = (1, 2, 4)

#: What lets ranks differ in the parameters that they use: `static_graph` promises that none of it happens.
_BY_RANK = {
    "block branch", "runs rank_0", "runs not_rank_0", *(f"idle {idle}" for idle in IDLE),
    *(f"action {kind}:rank_0" for kind, ways in ACTIONS.items() if "rank_0" in ways),
}  # fmt: skip

Pair = tuple[str, str]


def features(scenario: Scenario) -> frozenset[str]:
    """Return the names of what `scenario` is composed of: `option static_graph`, `action freeze:rank_0`, ..."""
    training = Training.of(scenario)
    found = {f"option {name}={value}" for name, value in scenario.options.items() if value in OPTIONS.get(name, ())}
    found |= {f"action {action}" for action in training.actions}
    found |= {f"output {training.output}", f"world size {scenario.world_size}"}
    found |= {f"idle {training.idle}"} if training.idle else set()
    found |= {f"hook {training.comm_hook}"} if training.comm_hook else set()
    found |= {f"around {training.around}"} if training.around else set()
    found |= {"delayed blocks"} if training.delays else set()
    for block in training.blocks:
        found |= {f"block {block.kind}", f"runs {block.when}"}
        found |= {f"checkpoint {block.checkpoint}"} if block.checkpoint else set()
        found |= set() if block.trainable else {"frozen block"}
    return frozenset(found)


def groups(world_sizes: Iterable[int] = WORLD_SIZES) -> tuple[tuple[str, ...], ...]:
    """Return all features. Those of one group exclude each other; a group of one is a feature by itself."""
    world_sizes = tuple(world_sizes)
    around = [around for around in AROUND if around and (around != "autocast" or may_autocast(world_sizes))]
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


def may_autocast(world_sizes: Iterable[int]) -> bool:
    """Whether a training under autocast has an exact truth with some of these numbers of ranks."""
    return not set(EXACT_UNDER_AUTOCAST).isdisjoint(world_sizes)


def possible_pairs(world_sizes: Iterable[int] = WORLD_SIZES) -> frozenset[Pair]:
    """Return all pairs of features that one training can have, each in alphabetical order."""
    world_sizes = tuple(world_sizes)
    inexact = {f"world size {world_size}" for world_size in world_sizes if world_size not in EXACT_UNDER_AUTOCAST}
    return frozenset(
        ordered(first, second)
        for one, other in combinations(groups(world_sizes), 2)
        for first, second in product(one, other)
        if not ("option static_graph=True" in (first, second) and {first, second} & _BY_RANK)
        and not ("around autocast" in (first, second) and {first, second} & inexact)
    )


def pairs_of(scenario: Scenario) -> frozenset[Pair]:
    """Return the pairs of features that `scenario` has."""
    return frozenset(ordered(first, second) for first, second in combinations(features(scenario), 2))


def ordered(first: str, second: str) -> Pair:
    """Return the pair in alphabetical order."""
    return (first, second) if first < second else (second, first)
