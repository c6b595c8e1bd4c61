"""Program `users_errors`: the user's own code raises in forward or backward, and the caller catches what it raised."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from conformance.models.integers import RankStep, with_integer_weights
from conformance.observation import ENDINGS
from conformance.programs import RankContext, observe_or_refused, program, rank_step, step_on
from conformance.truth.expected import Raises
from conformance.truth.steps import gradients

#: Where the module raises: in forward itself, in the backward of an autograd function, or in a hook of a tensor.
PLACES = ("forward", "function", "hook")
#: How the model is used in the step that raises.
MODES = ("training", "evaluation", "no_sync")
_ordinary = step_on(4, 3)


class BadBatch(Exception):  # noqa: N818 - a user may call it so
    """An exception whose arguments do not say how to make another one."""

    def __init__(self, *, index: int, path: str) -> None:
        super().__init__(f"batch {index}")
        self.path = path


class Preempted(BaseException):
    """A signal to the training loop, which no `except Exception` may catch."""


#: The exceptions that the module raises. Python, torch or a training loop gives most of them a meaning of their own.
KINDS: Mapping[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("no such token", 7),
    "RuntimeError": lambda: RuntimeError("the batch makes no sense"),
    "KeyError": lambda: KeyError("label"),
    "AttributeError": lambda: AttributeError("encoder"),
    "StopIteration": lambda: StopIteration("the epoch is over"),
    "OutOfMemoryError": lambda: torch.OutOfMemoryError("make the batch smaller"),
    "of the user's own": lambda: BadBatch(index=3, path="shard-7"),
    "no Exception": lambda: Preempted("go"),
    "KeyboardInterrupt": lambda: KeyboardInterrupt(),
    "SystemExit": lambda: SystemExit(3),
}

#: What is expected of every exception.
AS_IT_WAS = "the very exception that the module raised, as it was"


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, error: BaseException) -> Tensor:
        ctx.error = error
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        raise ctx.error


class Failing(nn.Module):
    """Two layers, between which it raises `error` at `place`; nothing while there is no error."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.last = nn.Linear(3, 2)
        self.place = place
        self.error: BaseException | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        output: Tensor = self.last(hidden if self.error is None else self._mined(hidden, self.error))
        return output

    def _mined(self, hidden: Tensor, error: BaseException) -> Tensor:
        if self.place == "forward":
            raise error
        if self.place == "function":
            return _Fails.apply(hidden, error)
        hidden.register_hook(partial(_raise, error))
        return hidden


def _raise(error: BaseException, _: Tensor) -> None:
    raise error


def _without_grad(model: nn.Module, inputs: Tensor) -> Any:
    with torch.no_grad():
        return model(inputs)


def _in_mode(ctx: RankContext, model: nn.Module, turn: RankStep) -> None:
    """Run forward and backward in the mode of the scenario; an evaluation that raises in forward runs without grad."""
    if ctx.arguments["mode"] == "no_sync":
        with ctx.no_sync(model):
            _ordinary(model, turn)
    elif ctx.arguments["mode"] == "training":
        _ordinary(model, turn)
    else:
        model.eval()
        if ctx.arguments["place"] == "forward":
            turn.forward(partial(_without_grad, model), turn.inputs(4, 3))  # type: ignore[arg-type]
        else:
            _ordinary(model, turn)


def _caught(run: Callable[[], None]) -> BaseException | None:
    try:
        run()
    except BaseException as error:
        return error
    return None


def _looks(error: BaseException) -> dict[str, Any]:
    """Return what a caller may look at in an exception; a DDP may add notes."""
    own = {name: value for name, value in vars(error).items() if name != "__notes__"}
    return {"args": error.args, "its cause": error.__cause__, **own}


def _report(got: BaseException | None, wanted: BaseException, before: Mapping[str, Any]) -> str:
    """Return `AS_IT_WAS`, or what was raised instead of `wanted`, which looked like `before`."""
    asked = f"{type(wanted).__name__}{wanted.args!r}"
    if got is None:
        return f"nothing, instead of {asked}"
    if got is not wanted:
        another = "another " if type(got) is type(wanted) else ""
        return f"{another}{type(got).__name__}{got.args!r} instead of {asked}"
    after = _looks(got)
    changed = [f"{name}: {value!r} before, {after.get(name)!r} after" for name, value in before.items()
               if after.get(name) != value]  # fmt: skip
    return f"the exception that the module raised, but its {'; its '.join(changed)}" if changed else AS_IT_WAS


@program("users_errors", invariants=("leaves_no_trace",))
def users_errors(ctx: RankContext) -> None:
    """For every kind of exception: wrap, train a step, have it raised, and train another step.

    Argument `place` is one of `PLACES`, `mode` one of `MODES`. The ranks raise together, but not the same kind.
    Observes for each kind `<kind>/caught`, and `<kind>/next`: the gradients of the step after it, or its error. All
    ranks run it.
    """
    makers = list(KINDS.values())
    for index, name in enumerate(KINDS):
        _raise_and_go_on(ctx, name, makers[(index + ctx.rank) % len(makers)]())


def _raise_and_go_on(ctx: RankContext, name: str, error: BaseException) -> None:
    module: Any = with_integer_weights(Failing(ctx.scenario.arguments["place"]), ctx.scenario.seed).to(ctx.device)
    model = ctx.wrap(module)
    _ordinary(model, rank_step(ctx, 0))
    module.zero_grad()
    module.error, before = error, _looks(error)
    got = _caught(lambda: _in_mode(ctx, model, rank_step(ctx, 1)))
    if isinstance(got, ENDINGS) and got is not error:
        raise got  # something else ends this process
    module.error = None
    ctx.observe(f"{name}/caught", _report(got, error, before), must=AS_IT_WAS)
    model.train()
    module.zero_grad()

    def train() -> dict[str, Any]:
        _ordinary(model, rank_step(ctx, 2))
        return gradients("step2", module)

    # What a backward left unfinished may be refused, as GRAD-17 says; a forward that raised has left nothing.
    refusal = None if ctx.arguments["place"] == "forward" else Raises(("RuntimeError",), ("finish", "reduc"))
    observe_or_refused(ctx, f"{name}/next", train, refusal)
