"""Programs about registering comm hooks: invalid hooks, errors inside a hook, and copies of a DDP with a hook."""

import copy
import io
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

from conformance.errors import present
from conformance.models.integers import with_integer_weights
from conformance.observation import Facts
from conformance.programs import RankContext, program, rank_step, step_on, truth_of
from conformance.programs.autograd_uses import WIDTH, layers
from conformance.scenario import Scenario
from conformance.truth.expected import AnyOf, Anything, Raises, Satisfies
from conformance.truth.steps import gradients

_step = step_on(5, WIDTH)


def _answer(value: Any) -> Callable[[Any, Any], Any]:
    def hook(state, bucket):  # type: ignore[no-untyped-def]
        future: Future[Any] = Future()
        future.set_result(value(bucket) if callable(value) else value)
        return future

    return hook


def _raising(state, bucket):  # type: ignore[no-untyped-def]
    raise ValueError("the hook of the user is broken")


def _failing_later(state, bucket):  # type: ignore[no-untyped-def]
    def fail(_: Any) -> Tensor:
        raise ValueError("the future of the user is broken")

    return _answer(bucket.buffer())(state, bucket).then(fail)


def _annotated_bucket(state: object, bucket: Any) -> Any: ...


def _annotated_return(state: object, bucket: Any) -> Any: ...


_annotated_bucket.__annotations__ = {"bucket": int}
_annotated_return.__annotations__ = {"return": int}


def _twice(model: Any, group: Any) -> None:
    model.register_comm_hook(group, allreduce_hook)
    model.register_comm_hook(group, allreduce_hook)


def _builtin_then_hook(model: Any, group: Any) -> None:
    model._register_builtin_comm_hook(BuiltinCommHookType.ALLREDUCE)
    model.register_comm_hook(group, allreduce_hook)


def _hook_then_builtin(model: Any, group: Any) -> None:
    model.register_comm_hook(group, allreduce_hook)
    model._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)


def _registering(hook: Any) -> Callable[[Any, Any], None]:
    return lambda model, _: model.register_comm_hook(None, hook)


@dataclass(frozen=True)
class Misuse:
    """A registration that must raise, or a hook that must make its first backward raise; `raised` is the error."""

    register: Callable[[Any, Any], None]
    raised: Raises
    in_backward: bool = False


_WRONG_TYPE = ("RuntimeError", "TypeError")
#: What a program does that makes no mistake.
_NOTHING = Misuse(lambda model, group: None, Raises())

MISUSES: Mapping[str, Misuse] = {
    "twice": Misuse(_twice, Raises(("RuntimeError",), ("once",))),
    "builtin_then_hook": Misuse(_builtin_then_hook, Raises(("RuntimeError",), ("once",))),
    "hook_then_builtin": Misuse(_hook_then_builtin, Raises(("RuntimeError",), ("once",))),
    "not_callable": Misuse(_registering(1), Raises(("TypeError",), ("callable",))),
    "bucket_annotation": Misuse(_registering(_annotated_bucket), Raises(("ValueError",), ("bucket annotation",))),
    "return_annotation": Misuse(_registering(_annotated_return), Raises(("ValueError",), ("return annotation",))),
    "returns_number": Misuse(_registering(lambda state, bucket: 1), Raises(_WRONG_TYPE, ("Future",)), True),
    "returns_nothing": Misuse(_registering(lambda state, bucket: None), Raises(_WRONG_TYPE, ("Future",)), True),
    "returns_tensor": Misuse(
        _registering(lambda state, bucket: bucket.buffer()), Raises(_WRONG_TYPE, ("Future",)), True
    ),
    "future_of_text": Misuse(_registering(_answer("text")), Raises(("Exception",), ("tensor",)), True),
    "future_of_wrong_size": Misuse(
        _registering(_answer(lambda bucket: torch.zeros(bucket.buffer().numel() + 3))), Raises(("RuntimeError",)), True
    ),
    "raises": Misuse(_registering(_raising), Raises(("Exception",), ("the hook of the user is broken",)), True),
    "future_raises": Misuse(
        _registering(_failing_later), Raises(("Exception",), ("the future of the user is broken",)), True
    ),
}  # fmt: skip


@program("hook_misuse", invariants=("leaves_no_trace",))
def hook_misuse(ctx: RankContext) -> None:
    """Do what argument `misuse` names (see `MISUSES`). All ranks run it and must get the same error.

    Observes `raised`; after a failed registration also the gradients of a step, which the DDP must still average.
    Without the argument nothing is registered.
    """
    misuse = MISUSES.get(ctx.arguments.get("misuse", ""), _NOTHING)
    module = with_integer_weights(layers(), ctx.scenario.seed).to(ctx.device)
    model = ctx.wrap(module)
    if misuse.in_backward:
        misuse.register(model, ctx.process_group)
        with ctx.catching("raised"):
            _step(model, rank_step(ctx, 0))
        return
    with ctx.catching("raised"):
        misuse.register(model, ctx.process_group)
    _step(model, rank_step(ctx, 0))
    ctx.observe_gradients("step0", module)


@hook_misuse.expects
def _misuse(scenario: Scenario) -> Mapping[int, Facts]:
    misuse = MISUSES[scenario.arguments["misuse"]]
    if misuse.in_backward:
        return {rank: {"raised": misuse.raised} for rank in range(scenario.world_size)}
    without = truth_of(scenario.replace(arguments={}))
    return {rank: {**facts, "raised": misuse.raised} for rank, facts in without.items()}


class Doubling:
    """The state of `doubling_hook`; can be pickled."""

    def __init__(self) -> None:
        self.num_calls = 0


def doubling_hook(state, bucket):  # type: ignore[no-untyped-def]
    """Average over the default group and double, so that gradients show whether the DDP used the hook."""
    state.num_calls += 1
    buffer = bucket.buffer().mul_(2).div_(dist.get_world_size())
    work = present(dist.all_reduce(buffer, async_op=True))
    return work.get_future().then(lambda _: buffer)


def _pickled(model: Any) -> Any:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


_COPIES: Mapping[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy, "pickle": _pickled}


@program("hook_copy", invariants=("same_collectives", "leaves_no_trace"))
def hook_copy(ctx: RankContext) -> None:
    """Copy a wrapped module that has a hook, before or after a first step, and train both. All ranks run it.

    Arguments: `copy`, "deepcopy" or "pickle"; `after_steps`; `builtin`, to register the built-in fp16 hook instead.
    Observes `original`, gradients of a step after copying, and `outcome`: those of the copy, or the refusal; of the
    built-in hook also `half_on_the_wire`: whether the copy communicated in half precision (None: there is no copy).
    """
    module = with_integer_weights(layers(), ctx.scenario.seed).to(ctx.device)
    model: Any = ctx.wrap(module)
    if ctx.arguments.get("builtin"):
        model._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)
    else:
        model.register_comm_hook(Doubling(), doubling_hook)
    for index in range(ctx.arguments["after_steps"]):
        module.zero_grad()
        _step(model, rank_step(ctx, index))
    number = ctx.arguments["after_steps"]
    twin = None
    with ctx.catching("refused"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a DDP may warn that the copy uses the default group
        twin = _COPIES[ctx.arguments["copy"]](model)
    outcome, half_on_the_wire = ctx.facts.pop("refused"), None
    module.zero_grad()
    _step(model, rank_step(ctx, number))
    original = gradients("step", module)
    if twin is not None:
        twin.module.zero_grad()
        before = len(ctx.collectives())
        _step(twin, rank_step(ctx, number))
        outcome = gradients("step", twin.module)
        half_on_the_wire = "float16" in {dtype for each in ctx.collectives()[before:] for dtype in each.dtypes}
    refusal = Raises(("RuntimeError", "TypeError", "PicklingError"), ("hook",))
    ctx.observe("outcome", outcome, must=AnyOf(original, refusal))
    if ctx.arguments.get("builtin"):
        ctx.observe("half_on_the_wire", half_on_the_wire)
    else:
        ctx.observe("original", original)


@hook_copy.expects
def _copied(scenario: Scenario) -> Mapping[int, Facts]:
    """Return the truth; of the built-in hook, whose gradients are rounded, that they went in half precision."""
    if not scenario.arguments.get("builtin"):
        return truth_of(scenario)
    facts = {"half_on_the_wire": AnyOf(True, None)} if scenario.recorded else {"outcome": Anything()}
    return dict.fromkeys(range(scenario.world_size), facts)


@program("hook_in_logging", invariants=("same_collectives", "leaves_no_trace"))
def hook_in_logging(ctx: RankContext) -> None:
    """Read the comm hook's name in the logging data, without a hook and with one. All ranks run it."""
    for kind in ("none", "hook", "builtin"):
        model: Any = ctx.wrap(with_integer_weights(layers(), ctx.scenario.seed).to(ctx.device))
        if kind == "hook":
            model.register_comm_hook(ctx.process_group, allreduce_hook)
        elif kind == "builtin":
            model._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)
        _step(model, rank_step(ctx, 0))
        ctx.observe(kind, str(model._get_ddp_logging_data().get("comm_hook", "")))


@hook_in_logging.expects
def _in_logging(scenario: Scenario) -> Mapping[int, Facts]:
    facts = {
        "none": "",
        "hook": Satisfies("the hook's name", _mentions, ("allreduce_hook",)),
        "builtin": Satisfies("the built-in hook's name", _mentions, ("fp16_compress",)),
    }
    return {rank: dict(facts) for rank in range(scenario.world_size)}


def _mentions(got: str, name: str) -> bool:
    return name in got.lower()
