"""What the user gives: how to make a training, its batches and its step; and what is wrong with what was given."""

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from conformance.errors import ConformanceError
from conformance.parity.random_state import seed_all

#: Methods of wrappers that steps call: in one process nothing wraps the module, so that they do nothing there.
_NULL_METHODS = {
    "no_sync": contextlib.nullcontext,
    "set_requires_gradient_sync": lambda *_, **__: None,
    "set_is_last_backward": lambda *_, **__: None,
}
_LEARNING_RATE = 0.1


class ParityError(ConformanceError):
    """`parity` was given what it cannot run: a function of another form, a batch that cannot be split, a number."""


@dataclass(frozen=True)
class Training:
    """A training for `steps` steps, of which every rank gets one of `shares` shares of each batch.

    `dtype` is the precision to which modules and batches are cast, None for their own; they move to `device`.
    """

    make: Callable[..., Any]
    make_batch: Callable[..., Any]
    train_step: Callable[..., Any]
    steps: int
    shares: int
    dtype: torch.dtype | None
    device: str = "cpu"

    def check(self) -> None:
        """Raise `ParityError` unless make and make_batch can be called as they will be, and train_step at all."""
        wrap = [None] if takes(self.make, "wrap") else []
        _check_call("make", self.make, "make(wrap) or make_model()", *wrap)
        numbers = [0, 0, 1] if takes(self.make_batch, "rank") else [0]
        _check_call("make_batch", self.make_batch, "make_batch(step) or make_batch(step, rank, ranks)", *numbers)
        if not callable(self.train_step):
            raise ParityError(_expected("train_step", "a function (model, optimizer, ..., batch)", self.train_step))

    def batches(self, share: int, shares: int) -> list[Any]:
        """Return the batches of all steps: a share's, or whole ones if `shares` is 1. Seeds RNGs."""
        found = []
        for step in range(self.steps):
            seed_all(step)
            if takes(self.make_batch, "rank"):
                batch = self.make_batch(step, share, shares)
            else:
                batch = self.make_batch(step)
                if self.shares > 1:
                    _check_divisible(batch, self.shares)
                if shares > 1:
                    batch = tree_map(lambda leaf: _share(leaf, share, shares), batch)
            if batch is None:
                raise ParityError(f"make_batch returned None for step {step}: expected a batch.")
            found.append(tree_map(self._cast, batch))
        return found

    def build(self, wrap: Callable[[nn.Module], Any] | None) -> dict[str, Any]:
        """Return what the step gets, by the names of its parameters; in one process `wrap` is None."""

        def wrapped(module: nn.Module) -> Any:
            if not isinstance(module, nn.Module):
                raise ParityError(_expected("wrap", "a torch.nn.Module", module))
            module._apply(self._cast)  # as `module.to`, which makes complex parameters real
            return _unwrapped(module) if wrap is None else wrap(module)

        made = self.make(wrapped) if takes(self.make, "wrap") else self.make()
        alone = isinstance(made, nn.Module) and not takes(self.make, "wrap")
        if alone:
            model = wrapped(made)
            made = (model, torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE))
        if made is None:
            raise ParityError("make returned None: expected a module, or a tuple with all that train_step needs.")
        values = made if isinstance(made, tuple) else (made,)
        added = " (added, since make returns a module alone, no tuple)" if alone else ""
        form = f"a function of {', '.join(type(value).__name__ for value in values)}{added} and a batch"
        bound = _check_call("train_step", self.train_step, form, *values, None)
        names = list(bound.arguments)[:-1] if bound else []
        if len(names) != len(values):  # it takes them as *arguments
            names = [f"argument{at}" for at in range(len(values))]
        return dict(zip(names, values, strict=True))

    def _cast(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        dtype = self.dtype.to_complex() if self.dtype and leaf.is_complex() else self.dtype
        return leaf.to(device=self.device, dtype=dtype if leaf.is_floating_point() or leaf.is_complex() else None)


def _unwrapped(module: nn.Module) -> nn.Module:
    """Give the module what steps ask of a wrapper: `model.module`, `model.no_sync()` and the like."""
    for name, method in _NULL_METHODS.items():
        if not hasattr(module, name):
            module.__dict__[name] = method
    if not hasattr(module, "module"):
        module.__dict__["module"] = module  # not registered: else it were a module of its own
    return module


def _share(leaf: Any, share: int, shares: int) -> Any:
    return leaf.tensor_split(shares)[share] if isinstance(leaf, Tensor) and leaf.dim() else leaf


def _check_divisible(batch: Any, shares: int) -> None:
    rows = [len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    own = "Write make_batch(step, rank, ranks), which returns a rank's share, and the whole batch for (step, 0, 1)."
    if not rows:
        raise ParityError(f"The batch, a {type(batch).__name__}, holds no tensor to split among {shares} ranks. {own}")
    if min(rows) < shares:
        raise ParityError(f"A tensor of the batch has {min(rows)} rows, too few for {shares} ranks. {own}")


def _check_call(what: str, function: Any, form: str, *arguments: object) -> inspect.BoundArguments | None:
    """Return how a call binds the arguments; None for a builtin, which does not say. Raises `ParityError`."""
    if not callable(function):
        raise ParityError(_expected(what, form, function))
    try:
        signature = inspect.signature(function)
    except ValueError:
        return None
    try:
        return signature.bind(*arguments)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        advice = "Name its parameters so, and bind others with functools.partial."
        raise ParityError(f"{what}: expected {form}, got {name}{signature}: {error}. {advice}") from None


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of this name: forms are recognised by names, since classes have defaults."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # no function, or a builtin
        return False


def _expected(what: str, expected: str, got: object) -> str:
    return f"{what}: expected {expected}, got {type(got).__name__} ({str(got)[:60]})."
