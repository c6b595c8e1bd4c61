"""What a DDP may refuse in a training, with an error on every rank; it must get everything else right."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conformance.composed.training import (
    COMPRESSING,
    MIXED,
    WITH_BACKWARD,
    Action,
    Training,
    depends_on_rank,
    may_miss_gradients,
)

#: Actions that change the parameters of which a DDP was constructed.
_CHANGES_PARAMETERS = {"freeze", "unfreeze", "append"}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a DDP may refuse, empty if it may not; `late`: it may refuse only in the forward after the backward."""

    reasons: tuple[str, ...] = ()
    late: bool = False

    def __bool__(self) -> bool:
        return bool(self.reasons)


def refusal(training: Training, options: Mapping[str, Any]) -> Refusal:
    """Return why a DDP with `options` may refuse `training`."""
    kinds = _ways(training)
    finds = bool(options.get("find_unused_parameters"))
    reasons = [
        *(f"{kind} changes parameters that were handed over" for kind, _ in kinds if kind in _CHANGES_PARAMETERS),
        *(f"replace:{how} takes a parameter away" for kind, how in kinds if kind == "replace" and how != "data"),
        *(f"backward:{how} runs several backwards" for kind, how in kinds if (kind, how) in _SEVERAL_BACKWARDS),
    ]
    if ("fail", "backward") in kinds:
        reasons.append("a backward was not finished")
    if any(block.checkpoint == "reentrant" for block in training.blocks):
        reasons.append("a reentrant checkpoint runs backwards of its own")
    if _sets_dense(training):
        reasons.append("a dense gradient was set where sparse ones come")
    if kinds & _OUTSIDE:
        reasons.append("a loss uses parameters outside of forward")
    if _interleaves(training.all_actions):
        reasons.append("a local backward comes between a forward and its backward")
    missing = may_miss_gradients(training)
    if missing and not finds:
        reasons.append(f"{missing}, without find_unused_parameters")
    if options.get("static_graph") and (changes := _changes_graph(training) or missing):
        reasons.append(f"{changes}, with static_graph")
    # Parameters in a reentrant checkpoint get no gradient if its inputs require none, as after a frozen layer.
    freezes = any(kind == "freeze" for kind, _ in kinds) or any(not block.trainable for block in training.blocks)
    if not missing and freezes and any(block.checkpoint == "reentrant" for block in training.blocks):
        missing = "a reentrant checkpoint may have inputs without a gradient"
    # A DDP can find a parameter that was added after a forward only in the next one.
    comes = any(kind in ("append", "unfreeze") or (kind, how) in _NEW_PARAMETERS for kind, how in kinds)
    return Refusal(tuple(reasons), late=comes or (bool(missing) and not finds))


def not_judged(training: Training, options: Mapping[str, Any]) -> str:
    """Return why a special `training` has no truth, empty if it has one."""
    return (
        _not_judged_in_company(training, options)
        or _not_judged_with_numerics(training, options)
        or _not_judged_in_handling(training, options)
        or _not_judged_under_autocast(training)
        or _not_judged_in_sparse_sums(training)
        or _not_judged_with_a_tail(training)
    )


def _not_judged_in_sparse_sums(training: Training) -> str:
    """Return why not, if a failed backward may leave sparse sums in flight.

    Without any DDP, gloo of torch 2.13 corrupts memory if a sparse all_reduce overlaps with another collective: a rank
    dies once in some hundred such trainings (docs/decisions/sparse_sums.md).
    """
    fails = ("fail", "backward") in _ways(training)
    is_sparse = any(block.kind == "sparse" for block in training.blocks)
    return "gloo corrupts memory where sparse sums overlap" if fails and is_sparse else ""


def _not_judged_under_autocast(training: Training) -> str:
    """Return why not, if ranks wait for each other between two uses of one weight under autocast.

    Plain ranks share autocast's cache of cast weights. The first rank that leaves autocast empties it; another rank
    then casts the weight again, and rounds the sum of its two gradients differently.
    """
    is_cached_twice = training.around == "autocast" and any(block.kind == "shared" for block in training.blocks)
    waits = training.nested or (training.exchange is not None and training.exchange.place in ("forward", "both"))
    return "plain ranks share what autocast has cast" if is_cached_twice and waits else ""


def _not_judged_with_a_tail(training: Training) -> str:
    """Return why not, if a rank's loss may have no output that requires a gradient, though another output does.

    Such a rank has no backward of the wrapper, but an idle rank, whose outputs all require a gradient, has.
    """
    freezes = any(action.kind == "freeze" for action in training.actions)
    is_frozen = freezes or not all(block.trainable for block in training.blocks)
    is_alone = training.output == "unused_tail" and is_frozen
    return "only a tail that no loss uses may be trained" if training.idle and is_alone else ""


def _not_judged_with_numerics(training: Training, options: Mapping[str, Any]) -> str:
    """Return why not, if something is in half precision or steps within backward; nothing may be refused."""
    if not training.has_numerics:
        return ""
    if may := refusal(training, options):
        return may.reasons[0]
    if training.precision in COMPRESSING:
        if training.comm_hook:
            return "a DDP has one comm hook"
        if any(block.kind in ("sparse", "complex") for block in training.blocks):
            return "float16 has no sparse sums on the CPU, and no imaginary part"
    is_shared = any(block.kind == "shared" for block in training.blocks)
    fails = ("fail", "forward") in _ways(training)
    if training.precision in MIXED and is_shared and (fails or _has_several_forwards(training)):
        return "the sum over several uses of a weight depends on their order in half precision"
    if training.optimizer:
        for action in training.actions:
            if action.kind in ("copy", "replace"):
                return "an optimizer steps the parameters that it was given"
        if training.beside is not None and training.beside.shares:
            return "two wrappers would step one parameter"
    return ""


def _not_judged_in_company(training: Training, options: Mapping[str, Any]) -> str:
    """Return why not, if the DDP is not alone.

    Nothing may be refused, because another rank may wait in a collective of the user or of another wrapper. And all
    ranks must issue the user's collectives in the same order.
    """
    if not training.in_company:
        return ""
    kinds = {action.kind for action in training.actions}
    if may := refusal(training, options):
        return may.reasons[0]
    if "join" in kinds:
        return "a rank that has joined answers its own DDP's collectives alone"
    if training.order and ("forward", "functional") in _ways(training):
        return "gradients become ready last after a functional call, and in each rank's own order after another forward"
    if training.order and ("fail", "forward") in _ways(training):
        return "some ranks have communicated when forward fails, and others have not"
    exchange, beside = training.exchange, training.beside
    blocks = (*training.blocks, beside.block) if beside is not None else training.blocks
    if _has_several_forwards(training) and (training.idle or any(block.kind == "branch" for block in blocks)):
        return "one backward computes a shared gradient at another place on each rank"
    if exchange is not None and exchange.within_module:
        if training.idle:
            return "a forward that runs no block communicates nothing"
        if training.around == "thread" and exchange.place != "forward":
            return "autograd orders the forwards of several threads as it likes"
    if beside is not None:
        second = Training((beside.block,), actions=training.actions)
        if may := refusal(second, beside.options):
            return f"the wrapper beside: {may.reasons[0]}"
        if beside.turn == "apart_local" and beside.options.get("static_graph"):
            return "the wrapper beside: no_sync changes the iteration, with static_graph"
        if beside.shares and "copy" in kinds:
            return "a copy shares nothing with the wrapper beside"
        if beside.shares and not all(block.trainable for block in training.blocks if block.kind == "shared"):
            return "the wrapper beside may train nothing on some rank"
        if depends_on_rank(second) and not beside.options.get("find_unused_parameters"):
            return "ranks would wait for each other's gradients"
    return ""


def _not_judged_in_handling(training: Training, options: Mapping[str, Any]) -> str:
    """Return why not, if wrappers are dropped, nested, or called within a transform; nothing may be refused."""
    if not training.is_handled:
        return ""
    kinds = {action.kind for action in training.actions}
    ways = _ways(training)
    if may := refusal(training, options):
        return may.reasons[0]
    if training.has_numerics:
        return "a wrapper has its optimizers and its hooks for good"
    branches = any(block.kind == "branch" for block in training.blocks)
    if "wrapper" in kinds and _has_several_forwards(training) and (training.idle or branches):
        return "one backward computes gradients of several wrappers, at another place on each rank"
    if "wrapper" in kinds and ("relayout", "rank_0") in ways:
        return "parameters that ranks lay out differently may not be wrapped"
    if "in_place" in kinds and ("head" in kinds or (training.idle and training.beside is not None)):
        return "autograd has saved the rows, which another layer has read"
    if ("transform", "jvp") in ways and any(block.kind == "counted" for block in training.blocks):
        return (
            "a process has one level of forward-mode derivatives, which plain ranks that share buffers would share, too"
        )
    if {("wrapper", "bare"), ("wrapper", "kept")} <= ways:
        return "a kept wrapper that awaits its backward takes the bare module's for it"
    if ("wrapper", "bare") in ways and training.beside is not None and training.beside.shares:
        return "the bare module's backward brings gradients that the wrapper beside awaits"
    checkpoints = any(block.checkpoint for block in training.blocks)
    if "transform" in kinds and (checkpoints or training.around == "saved_tensors"):
        return "function transforms take no hooks of saved tensors"
    return _not_judged_nested(training, ways) if training.nested else ""


def _not_judged_nested(training: Training, ways: set[tuple[str, str]]) -> str:
    if training.nested_block is None:
        return "no block has parameters of its own"
    if not all(block.trainable for block in training.blocks if block.kind == "shared"):
        return "on some rank nothing before the wrapper within may be trained"
    if training.order:
        return "the wrapper within would communicate in another order on each rank"
    if training.idle:
        return "an idle forward does not reach the wrapper within"
    if any(kind == "join" for kind, _ in ways):
        return "a rank that has joined answers the collectives of the wrapper around alone"
    if ("load", "by_checkpoint") in ways:
        return "torch's checkpoints rename the contents of torch's wrappers"
    return ""


_SEVERAL_BACKWARDS = {("backward", "apart"), ("backward", "reversed"), ("backward", "twice")}
_NEW_PARAMETERS = {("replace", "block"), ("replace", "parameter")}
_OUTSIDE = {(kind, how) for kind in ("head", "penalty") for how in ("every_rank", "rank_0")}


def _ways(training: Training) -> set[tuple[str, str]]:
    return {(action.kind, action.how) for action in training.actions}


def _sets_dense(training: Training) -> bool:
    kinds = [block.kind for block in training.blocks]
    return any(
        (action.kind, action.how) == ("gradients", "set") and kinds[action.block % len(kinds)] == "sparse"
        for action in training.actions
    )


def _changes_graph(training: Training) -> str:
    """Return why one iteration's graph may differ from another's, empty if it cannot."""
    for action in training.actions:
        if action.kind in ("no_sync", "autograd_grad", "fail", "hook", "mode", "copy", "load", "replace", "regroup"):
            return f"{action} changes the iteration"
    return "an iteration has several forwards" if _has_several_forwards(training) else ""


def _has_several_forwards(training: Training) -> bool:
    forwards = 0
    for action in training.all_actions:
        if action.kind == "forward" and action.how in WITH_BACKWARD:
            forwards += 1
        elif action.kind == "backward":
            if forwards > 1:
                return True
            forwards = 0
    return False


def _interleaves(actions: tuple[Action, ...]) -> bool:
    pending = False
    for action in actions:
        if action.kind == "forward" and action.how in WITH_BACKWARD:
            pending = True
        elif action.kind == "backward":
            pending = False
        elif action.kind in ("no_sync", "fail") and pending:
            return True
    return False
