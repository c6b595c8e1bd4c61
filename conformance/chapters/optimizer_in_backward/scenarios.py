"""Scenarios of chapter optimizer_in_backward: an optimizer steps each parameter once its gradient is averaged."""

from collections.abc import Iterator
from typing import Any

from conformance.chapters.grid import Axis, Grid, Worlds
from conformance.chapters.optimizer_in_backward.hooked_parameters import HOOKS
from conformance.chapters.variants import EACH_ALONE, PLAIN, STATIC, UNUSED, VIEW, Variant, arguments, capped, each
from conformance.composed.training import Action, Block, Training
from conformance.scenario import Scenario

_grid = Grid("optimizer_in_backward", Variant(needs=("optimizer_in_backward",)))
#: Of optimizers that a loop attaches itself.
_by_hand = Grid("optimizer_in_backward")

_ALL = [["a b c d"]]
_THREE = [_ALL] * 3
_HOOK = Variant(needs=("comm_hook",))


_MOMENTUM = arguments(optimizers={"*": ["momentum"]})


def _train(
    requirement: str, slug: str, worlds: Worlds, *axes: Axis, steps: list[Any] = _THREE, **given: Any
) -> Iterator[Scenario]:
    asked = {"steps": steps, **given}
    yield from _grid(requirement, slug, "optimizer_in_backward", worlds, *axes, arguments=asked)


def scenarios() -> Iterator[Scenario]:
    """Yield every scenario of the chapter."""
    yield from _plain()
    yield from _choices()
    yield from _accumulating()
    momentum = arguments(optimizer="momentum")
    optimizers = each("optimizer", ("sgd", "momentum", "adam", "adamw"))
    yield from _grid("OPTIM-15", "", "fused_optimizer", (2, 3), optimizers, _HOOK)
    yield from _grid("OPTIM-15", "momentum", "fused_optimizer", 2, (VIEW, EACH_ALONE), momentum, _HOOK)
    parts = each("only", ("a", "bd"))
    yield from _grid("OPTIM-15", "only", "fused_optimizer", (2, 3), parts, momentum, _HOOK)
    yield from _grid("OPTIM-16", "refused", "fused_optimizer_refusal", (2, 3))
    orders = each("order", ("before", "after", "later"))
    for hook in each("hook", HOOKS):
        for way in (PLAIN, VIEW, EACH_ALONE, VIEW | EACH_ALONE, UNUSED, STATIC):
            yield from _by_hand("OPTIM-17", "", "hooked_parameters", 2, hook, orders, way)


def _plain() -> Iterator[Scenario]:
    for name in ("sgd", "momentum", "adam", "adamw", "rmsprop"):
        worlds = (1, 2, 3, 4) if name in ("momentum", "adam") else (2, 3)
        stepped = arguments(name, optimizers={"*": [name]})
        yield from _train("OPTIM-01", "", worlds, stepped | Variant(also=("OPTIM-02",)))
    for world_size in (2, 3):
        yield from _train("OPTIM-02", "never-zeroed", world_size, _MOMENTUM, zero_grad=False)
        ways = (PLAIN.named("plain"), VIEW, STATIC, STATIC | VIEW)
        alone = EACH_ALONE.named("")
        yield from _train("OPTIM-18", "", world_size, ways, alone, _MOMENTUM, watch="a.weight")
        yield from _train("OPTIM-03", "kept", world_size, keep_gradients=True)
        yield from _train("OPTIM-03", "kept-partly", world_size, keep_gradients=True, optimizers={"a": ["sgd"]})
        twice = [[["a a b c d"]]] * 3
        yield from _train("OPTIM-04", "used-twice", world_size, steps=twice, optimizers={"*": ["adam"]})
        yield from _train("OPTIM-06", "after-wrapping", world_size, _MOMENTUM, after=True)
    yield from _train("OPTIM-03", "kept", 2, VIEW, keep_gradients=True)
    yield from _train("OPTIM-06", "after-wrapping", 2, VIEW, after=True)
    others = (VIEW, EACH_ALONE, VIEW | EACH_ALONE, STATIC, STATIC | VIEW, UNUSED)
    yield from _train("OPTIM-08", "", (2, 3), others, _MOMENTUM)
    never_zeroed = arguments("never-zeroed", optimizers={"*": ["adam"]})
    yield from _train("OPTIM-08", "", (2, 3), VIEW, never_zeroed, zero_grad=False)


def _choices() -> Iterator[Scenario]:
    some, one = {"a": ["momentum"], "c": ["adam"]}, {"b": ["sgd"]}
    chosen = (arguments("some", optimizers=some), arguments("one", optimizers=one))
    yield from _train("OPTIM-05", "", 2, chosen, (PLAIN.at(2, 3), VIEW, EACH_ALONE))
    mixed = (
        arguments("each-its-own", optimizers={"a": ["momentum"], "b": ["adam"], "c": ["adamw"], "d": ["rmsprop"]}),
        arguments("two-each", optimizers={"*": ["momentum", "sgd"]}),
        arguments("two-on-one", optimizers={"a": ["sgd", "momentum"], "*": ["sgd"]}),
    )
    yield from _train("OPTIM-07", "", (2, 3), mixed)
    yield from _train("OPTIM-11", "hook", (2, 3), (PLAIN, VIEW, EACH_ALONE), _MOMENTUM, _HOOK, hook=True)
    ignored = (arguments("bias", ignored=["a.bias"]), arguments("branch", ignored=["c.weight", "c.bias"]))
    yield from _train("OPTIM-12", "", (2, 3), ignored, _MOMENTUM)
    for name in ("momentum", "adam"):
        for world_size in (2, 3):
            stepped = arguments(name, optimizers={"*": [name]})
            yield from _train("OPTIM-13", "", world_size, stepped, halve_rates=True)
            yield from _grid("OPTIM-14", "", "restarted_optimizer_in_backward", world_size, stepped)


_STEP = (Action("forward", "plain"), Action("backward", "together"))


def _accumulating() -> Iterator[Scenario]:
    local = ["local:a b c d"]
    last = arguments("last", steps=[[local, *_ALL]] * 3, zero_grad=True)
    several = arguments("several", steps=[_ALL, [local, local, *_ALL], _ALL], zero_grad=True)
    alone = arguments("alone", steps=[_ALL, [local], _ALL], zero_grad=False)
    first = arguments("first", steps=[[local], [local, *_ALL], _ALL], zero_grad=False)
    yield from _train("OPTIM-09", "", (2, 3), (last, several, alone, first), _MOMENTUM, may_refuse=True)
    for way in (VIEW, UNUSED):
        yield from _train("OPTIM-09", "", 2, (last, alone), way, _MOMENTUM, may_refuse=True)
    by_rank = [[["a b", "b c"]], [["a", "c d"]], [["d"]], [["a b c d"]]]
    for way in (PLAIN, VIEW, EACH_ALONE):
        searching = UNUSED.named("") | way
        yield from _train("OPTIM-10", "by-rank", (2, 3), searching, _MOMENTUM, steps=by_rank)
        yield from _train("OPTIM-10", "nobody", 2, searching, steps=[[["a b"]]] * 3, optimizers={"*": ["adamw"]})
    # What the user has put into the gradient of a parameter that no rank uses is no average.
    actions = (Action("forward", "eval_mode"), Action("gradients", "set"), Action("backward", "together"))
    given = Training((Block("branch"),), actions=actions, optimizer="in_backward").to_json()
    for way in (PLAIN, VIEW, EACH_ALONE):
        yield from _grid("OPTIM-10", "set-by-user", "composed", (1, 2, 3), UNUSED.named(""), way, arguments=given)
    # A parameter of no elements alone in its bucket, which gives its memory up once it is stepped.
    blocks = (Block("empty", when="never"), Block("branch"), Block())
    empty = Training(blocks, actions=(*_STEP, *_STEP), optimizer="in_backward").to_json()
    for way in (capped("alone", 0.0001), VIEW | capped("alone", 0.0001)):
        yield from _grid("OPTIM-08", "empty", "composed", (1, 2), UNUSED.named("") | way, arguments=empty)
