"""`Training`: a module composed of blocks and the actions of a training loop, as one frozen value that is JSON too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conformance.codec import MismatchError, decode, encode
from conformance.errors import ScenarioError
from conformance.scenario import Scenario

#: What a block does to the hidden rows; `modules` builds them.
KINDS = (
    "linear", "branch", "shared", "counted", "sparse", "float64", "complex", "transposed", "gain", "empty",
    "float16",
)  # fmt: skip
#: A block with a tensor of a class of its own: its weight, or a buffer that is made of two tensors.
CLASSES = ("subclass", "composite")
#: Which ranks run a block, and in which forwards.
WHEN = ("always", "rank_0", "not_rank_0", "even_forwards", "not_first", "never")
#: With one that tells most beside others: all ranks in the first forward, then rank 0 alone.
WHEN_IN_COMPANY = (*WHEN, "rank_0_later")
WHEN_BY_RANK = ("rank_0", "not_rank_0", "rank_0_later")
CHECKPOINTS = ("", "non_reentrant", "reentrant")
#: What forward returns.
OUTPUTS = ("tensor", "tuple", "dict", "dataclass", "unused_tail", "parameter")
#: What forward may return besides, and gets its rows in an object with a field that nobody sets.
CONTAINERS = ("unset", "itself", "slots")
#: Whether the group's store has served an earlier run.
STORES = ("", "served")
#: Whose forwards use no parameter at all: rank 0's at every other time, or one half of the ranks' in turn.
IDLE = ("", "rank_0", "by_turns")
#: What reduces buckets: the DDP by itself, torch's hook that does the same, or one that sends wider numbers.
COMM_HOOKS = ("", "allreduce", "wider")
#: What is computed or sent in half precision: torch's hooks that compress (`overflow`: gradients that float16 has no
#: room for), its built-in one, and mixed precision in a dtype, or for gradients alone; `numerics` sets them up.
COMPRESSING = ("fp16_hook", "bf16_hook", "fp16_builtin", "overflow")
MIXED = ("bf16", "fp16", "reduce_bf16")
PRECISIONS = ("", *COMPRESSING, *MIXED)
#: What steps the parameters: the loop, or optimizers that were applied to the backward.
OPTIMIZERS = ("", "in_backward")
#: What the loop has around forward and, but for autocast and saved tensors, around backward; `surroundings` makes them.
AROUND = ("", "autocast", "anomaly", "saved_tensors", "dispatch_mode", "thread")
#: Where the user communicates: behind a block in forward, in its backward, in both, or in a hook of the rows; and
#: around backward. `exchanges` runs them.
EXCHANGES = ("forward", "backward", "both", "tensor_hook", "before_backward", "after_backward")
WITHIN_BACKWARD = ("backward", "both", "tensor_hook")
#: When the backward of a wrapper beside runs: with the first one's, or by itself while the first one awaits its own,
#: which the loop may have within `no_sync`.
TURNS = ("", "apart", "apart_local")
#: In which order a rank runs the blocks: that in which they are listed, or one of its own.
ORDERS = ("", "own")
#: Who makes gradients final: backward, or the loop after each synchronised one.
FINALIZES = ("", "by_hand")
#: Of how many elements: one, those of a weight, and those of a first layer and a block, each of which may be a bucket.
SIZES = (1, 4, 12)

#: What a training loop can do, and the ways in which it can do it.
ACTIONS: Mapping[str, tuple[str, ...]] = {
    "forward": ("plain", "eval_mode", "no_grad", "inference", "functional"),
    "backward": ("together", "apart", "reversed", "twice"),
    "no_sync": ("whole", "nested", "forward_only", "backward_only", "exception"),
    "zero_grad": ("none", "zeros"),
    "step": ("all",),
    "freeze": ("every_rank", "rank_0"),
    "unfreeze": ("every_rank", "rank_0"),
    "replace": ("block", "parameter", "data"),
    "relayout": ("every_rank", "rank_0"),
    "append": ("block", "parameter"),
    "penalty": ("every_rank", "rank_0"),
    "head": ("every_rank", "rank_0"),
    "autograd_grad": ("first_order", "second_order"),
    "fail": ("forward", "backward"),
    "hook": ("tensor", "post_accumulate", "module", "remove"),
    "load": ("first_state", "by_checkpoint"),
    "copy": ("deepcopy", "pickle"),
    "join": ("rank_0_first", "rank_0_last"),
    "regroup": ("same_ranks",),
    "mode": ("eval", "train"),
    "gradients": ("set", "clone", "double", "drop"),
}

#: What only a loop does that handles its wrapper. It lets go of the wrapper, whose outputs may await their backward: it
#: wraps the module anew before (`again`; where only rank 0 keeps the wrapper: `kept`) or when it needs one (`dropped`),
#: and the bare module may have its own backward meanwhile (`bare`). Or it calls the wrapper within a transform of a
#: function, which brings no gradients. Or it changes an output in place, and a loss also comes by way of what the
#: module returned, which it kept, or a view of it.
HANDLING: Mapping[str, tuple[str, ...]] = {
    "wrapper": ("dropped", "again", "kept", "bare"),
    "transform": ("grad", "jvp", "vmap", "stand_ins"),
    "in_place": ("kept", "view"),
}
#: What becomes of the parameters of a block that is wrapped by itself: the wrapper around ignores them, or they are
#: frozen by then.
NESTED = ("", "ignored", "frozen")

#: What a training's JSON names only where there is some: ids that were given before stay.
_NAMED_IF_THERE = ("exchange", "beside", "precision", "optimizer", "nested", "order", "finalizes", "store")
#: The values of a training's fields.
_KNOWN: Mapping[str, tuple[str, ...]] = {
    "output": (*OUTPUTS, *CONTAINERS), "idle": IDLE, "comm_hook": COMM_HOOKS, "around": AROUND, "precision": PRECISIONS,
    "optimizer": OPTIMIZERS, "nested": NESTED, "order": ORDERS, "finalizes": FINALIZES,
    "store": STORES,
}  # fmt: skip
#: The ways of forward that a backward may follow.
WITH_BACKWARD = ("plain", "eval_mode", "functional")


def _check(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ScenarioError(f"{what} must be one of {', '.join(filter(None, known))}; got {value!r}")


@dataclass(frozen=True, slots=True)
class Block:
    """One part of the module: its kind, when it runs, how it is checkpointed, and whether it is trained."""

    kind: str = "linear"
    when: str = "always"
    checkpoint: str = ""
    trainable: bool = True

    def __post_init__(self) -> None:
        _check("kind of block", self.kind, (*KINDS, *CLASSES))
        _check("when", self.when, WHEN_IN_COMPANY)
        _check("checkpoint", self.checkpoint, CHECKPOINTS)


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that the loop does, in the way `how`; some act on the block of number `block`, modulo their number."""

    kind: str
    how: str
    block: int = 0

    def __post_init__(self) -> None:
        known = {**ACTIONS, **HANDLING}
        _check("action", self.kind, tuple(known))
        _check(f"way of {self.kind}", self.how, known[self.kind])
        if self.block < 0:
            raise ScenarioError(f"block must be >= 0, got {self.block}")

    def __str__(self) -> str:
        return f"{self.kind}:{self.how}"


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective of the user's over the DDP's group: where, of how many elements, and behind which block if any.

    The number of the block is modulo their number.
    """

    place: str = "forward"
    size: int = 1
    block: int = 0

    def __post_init__(self) -> None:
        _check("place", self.place, EXCHANGES)
        if self.size < 1 or self.block < 0:
            raise ScenarioError(f"size must be >= 1 and block >= 0, got {self.size} and {self.block}")

    @property
    def within_module(self) -> bool:
        """Whether it is part of forward, and so only of forwards that run the module's blocks."""
        return self.place in ("forward", *WITHIN_BACKWARD)


@dataclass(frozen=True, slots=True)
class Beside:
    """A second DDP beside the first: around a first layer and `block`; its output is added to every loss.

    `options` are its own. With `shares` its first layer is the first wrapper's; with `own_group` it averages over
    another group of the same ranks. With `stays` it synchronises where the first wrapper is within `no_sync`. `turn`
    says when its backward runs, of `TURNS`.
    """

    block: Block = Block()
    options: Mapping[str, Any] = field(default_factory=dict)
    shares: bool = False
    own_group: bool = False
    stays: bool = False
    turn: str = ""

    def __post_init__(self) -> None:
        _check("turn", self.turn, TURNS)
        if not self.block.trainable:
            raise ScenarioError("what is beside needs a block that is trained")


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained and how.

    `idle` says whose forwards use no parameter, `comm_hook` what reduces buckets, `around` what every forward and
    backward runs within. With `delays` the gradients of all
    blocks are reduced after that of the first layer. After `actions` every training does `CLOSING`, so that nothing
    stays unnoticed; its last forward is there for a DDP that says only then what it missed in the backward before.
    In company: the user communicates, too (`exchange`), or another wrapper is there (`beside`), and each rank may run
    the blocks in an `order` of its own. `precision` says what is in half precision, `optimizer` what steps within
    backward. `nested` says whether a block is wrapped by itself, `finalizes` who makes gradients final, `store` what
    the group's store has served.
    """

    blocks: tuple[Block, ...] = (Block(),)
    output: str = "tensor"
    actions: tuple[Action, ...] = ()
    idle: str = ""
    comm_hook: str = ""
    delays: bool = False
    around: str = ""
    exchange: Exchange | None = None
    beside: Beside | None = None
    precision: str = ""
    optimizer: str = ""
    nested: str = ""
    order: str = ""
    finalizes: str = ""
    store: str = ""

    def __post_init__(self) -> None:
        for name, known in _KNOWN.items():
            _check(name.replace("_", " "), getattr(self, name), known)
        if not trains(self.blocks):
            raise ScenarioError("a training needs a block that is trained")

    @property
    def in_company(self) -> bool:
        """Whether the DDP is not alone in its group."""
        return self.exchange is not None or self.beside is not None

    @property
    def has_numerics(self) -> bool:
        """Whether something is in half precision, or steps within backward."""
        return bool(self.precision or self.optimizer)

    @property
    def is_handled(self) -> bool:
        """Whether something is done with wrappers besides training with one."""
        return bool(self.nested) or any(action.kind in HANDLING for action in self.actions)

    @property
    def nested_block(self) -> int | None:
        """The number of the block that is wrapped by itself: the first whose parameters are its own, and trained."""
        own = (index for index, block in enumerate(self.blocks) if block.trainable and block.kind != "shared")
        return next(own, None) if self.nested else None

    @property
    def all_actions(self) -> tuple[Action, ...]:
        """The actions and those that close every training."""
        return (*self.actions, *CLOSING)

    def to_json(self) -> dict[str, object]:
        """Return the arguments of a scenario; `of` gives back an equal training."""
        encoded = encode(self)
        without = {name for name in _NAMED_IF_THERE if not encoded[name]}
        if self.beside is not None and not self.beside.turn:
            del encoded["beside"]["turn"]
        return {"training": {name: value for name, value in encoded.items() if name not in without}}

    @staticmethod
    def of(scenario: Scenario) -> Training:
        """Read the training from a scenario's arguments; raises `ScenarioError`, which names the wrong field."""
        try:
            return decode(scenario.arguments.get("training"), Training)
        except MismatchError as error:
            raise ScenarioError(f"{scenario.id}: training: {error}") from error


def trains(blocks: Sequence[Block]) -> bool:
    """Whether some parameter of `blocks` is trained; a shared block that is frozen freezes all shared ones."""
    if all(block.trainable for block in blocks if block.kind == "shared"):
        return any(block.trainable for block in blocks)
    # The first layer is frozen: a rank that runs nothing else that is trained has no backward, and no rank learns why.
    # A reentrant checkpoint of inputs without a gradient has none either.
    return any(
        block.trainable and block.when == "always" and block.kind != "shared" and block.checkpoint != "reentrant"
        for block in blocks
    )


def may_miss_gradients(training: Training) -> str:
    """Return why some parameter may get no gradient in some backward on some rank, empty if none can."""
    if training.idle:
        return "forwards use no parameter"
    if training.output == "unused_tail":
        return "a tail is unused"
    for index, block in enumerate(training.blocks):
        if block.when != "always":
            return f"block {index} runs {block.when}"
        if block.kind == "branch":
            return f"block {index} takes turns"
    return ""


def depends_on_rank(training: Training) -> bool:
    """Whether ranks may differ in which parameters they use or train; one that has joined waits for all of them."""
    joins = any(action.kind == "join" for action in training.actions)
    freezes = any(action.kind == "freeze" for action in training.actions)
    return (
        bool(training.idle)
        or (joins and (freezes or bool(may_miss_gradients(training))))
        or any(action.how == "rank_0" for action in training.actions)
        or any(block.kind == "branch" or block.when in WHEN_BY_RANK for block in training.blocks)
    )


CLOSING = (
    Action("zero_grad", "none"), Action("forward", "plain"), Action("backward", "together"), Action("step", "all"),
    Action("forward", "plain"), Action("backward", "together"), Action("forward", "plain"),
)  # fmt: skip
