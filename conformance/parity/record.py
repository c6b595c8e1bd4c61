"""Runs a training in this process and records what the optimizers see and what each step leaves behind."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import optimizer as optimizers
from torch.utils._pytree import tree_leaves, tree_map

from conformance.parity.random_state import Draws, random_state, seed_all
from conformance.parity.tensors import Key, Names, Value, restore, snapshot
from conformance.parity.tolerance import Nudge
from conformance.parity.training import ParityError, Training

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_BatchNorm = nn.modules.batchnorm._BatchNorm


@dataclass
class Run:
    """What was seen of one training in one process."""

    seen: dict[Key, Value] = field(default_factory=dict)  # in the order in which it was seen
    start: dict[str, Value] = field(default_factory=dict)  # parameters before the first step
    trained: dict[str, None] = field(default_factory=dict)  # names of what optimizers hold, in their order
    used_by: dict[str, str] = field(default_factory=dict)  # gradients: the optimizer, and which of its steps
    strangers: set[str] = field(default_factory=set)  # tensors of optimizers that no module has: copies, or left over
    unheld: set[str] = field(default_factory=set)  # parameters with a gradient that no optimizer holds
    uncleared: set[str] = field(default_factory=set)  # stepped with a gradient that holds an earlier step's
    dtypes: set[torch.dtype] = field(default_factory=set)  # that modules return or compute in
    batch_norms: set[str] = field(default_factory=set)  # classes that normalise by a rank's own batch
    sent: Counter[str] = field(default_factory=Counter)  # elements by collective, in the first step
    backwards: int = 0  # in the first step
    dropouts: int = 0  # calls that did nothing
    draws: bool = False  # whether a step drew random numbers, or seeded their generators
    drawn_in: list[str] = field(default_factory=list)  # where, if `record` was given a seed
    seconds: float = 0.0

    @property
    def held(self) -> set[str]:
        """Names of the parameters that optimizers train: all of them where optimizers hold copies."""
        return set(self.trained) - self.strangers or set(self.start)

    def moved(self, name: str) -> bool:
        """Whether parameter `name` is another after the last step than at the start."""
        start = self.start.get(name)
        last = next((value for key, value in reversed(self.seen.items()) if key[1:] == ("parameter", name)), None)
        return not (isinstance(start, Tensor) and isinstance(last, Tensor) and torch.equal(start, last))


def record(
    training: Training,
    batches: list[Any],
    wrap: Callable[[nn.Module], Any] | None,
    *,
    nudge: Nudge | None = None,
    statistics_of: int = 0,
    seed: int = 0,
    follow: Run | None = None,
) -> Run:
    """Make the training, take a step with each batch, and return what was seen.

    In one process `wrap` is None; then gathering is the identity with its gradient. `nudge` moves parameters, batches
    and gradients. With `statistics_of` n, BatchNorm normalises each of n shares of a batch by itself. `seed`
    is that of the random numbers which steps draw; the training is always made with the same ones. Optimizers use the
    gradients of the run `follow`, so that a later optimizer of a step finds the same parameters.
    """
    run, began = Run(), time.monotonic()
    seed_all(0)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(training.dtype or usual)
    try:
        made = training.build(wrap)
        names = Names(made)
        if not names.modules:
            kinds = ", ".join(type(value).__name__ for value in made.values())
            raise ParityError(f"make returned no torch.nn.Module, but {kinds}.")
        if nudge:
            with torch.no_grad():
                for tensor in names.parameters().values():
                    tensor.copy_(nudge(tensor))
        run.start = {name: snapshot(tensor) for name, tensor in names.parameters().items()}
        with _Recorder(run, names, wrap is None, nudge, statistics_of, follow) as recorder:
            if seed:
                seed_all(seed)
                drawn = recorder.enter_context(Draws())
            for step, batch in enumerate(batches):
                given = *made.values(), tree_map(nudge, batch) if nudge else batch
                recorder.step(step, partial(training.train_step, *given))
            run.drawn_in = [*drawn.places] if seed else []
    finally:
        torch.set_default_dtype(usual)
    run.seconds = time.monotonic() - began
    return run


class _Recorder(contextlib.ExitStack):
    """Hooks that last for a training: optimizers' steps, forwards, backwards, dropout, BatchNorm, gathering."""

    def __init__(
        self, run: Run, names: Names, alone: bool, nudge: Nudge | None, statistics_of: int, follow: Run | None
    ) -> None:
        super().__init__()
        self._run, self._names, self._alone, self._nudge, self._follow = run, names, alone, nudge, follow
        self._at, self._depth = 0, 0
        self._stepped: set[str] = set()  # whose gradient has been used and not cleared since
        self._stale: set[str] = set()  # to whose used gradient a backward has added
        self._steps: Counter[str] = Counter()  # by optimizer, in this step
        for name in _DROPOUTS:
            self._replace(functional, name, self._no_dropout)
        attention = functional.scaled_dot_product_attention
        self._replace(functional, "scaled_dot_product_attention", lambda *a, **k: self._attention(attention, *a, **k))
        backward, forward = torch.autograd.backward, _BatchNorm.forward
        self._replace(torch.autograd, "backward", lambda *a, **k: self._backward(backward, *a, **k))
        if alone:  # a group of one loses the gradient, too: with it the mistake would stand in both runs
            self._replace(dist, "all_gather", _gather_list)
            self._replace(dist, "all_gather_into_tensor", _gather)
        if statistics_of:
            by_share = lambda layer, x: _by_share(layer, x, statistics_of) if layer.training else forward(layer, x)  # noqa: E731
            self._replace(_BatchNorm, "forward", by_share)
        for handle in (
            optimizers.register_optimizer_step_pre_hook(self._before_step),
            optimizers.register_optimizer_step_post_hook(self._after_step),
            nn.modules.module.register_module_forward_hook(self._after_forward),
        ):
            self.callback(handle.remove)

    def step(self, at: int, train_step: Callable[[], Any]) -> None:
        """Take step `at` and record what it leaves behind."""
        run, self._at = self._run, at
        self._steps.clear()
        before = random_state()
        listening = at == 0 and not self._alone
        with torch.autograd.profiler.profile(enabled=listening, record_shapes=True, use_kineto=False) as profile:
            said = train_step()
        for event in profile.function_events or () if listening else ():
            if event.name.startswith("gloo:"):
                run.sent[event.name[5:]] += sum(torch.Size(shape).numel() for shape in event.input_shapes if shape)
        run.draws |= random_state() != before
        run.seen[Key(at, "optimizer steps", "count")] = torch.tensor(self._steps.total())
        parameters = self._names.parameters()
        for name, tensor in parameters.items():
            run.seen[Key(at, "parameter", name)] = snapshot(tensor)
            if tensor.grad is not None and name not in run.trained:
                run.unheld.add(name)
        for name, tensor in self._names.buffers().items():
            run.seen[Key(at, "buffer", name)] = snapshot(tensor)
        for name, value in (said if isinstance(said, dict) else {"loss": said}).items():
            if value is not None:
                run.seen[Key(at, "number", str(name))] = _number(name, value)

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        self.enter_context(mock.patch.object(owner, name, function))

    def _no_dropout(self, input: Tensor, *_: Any, **__: Any) -> Tensor:  # named as torch names it
        self._run.dropouts += 1
        return input

    def _attention(self, attention: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        return attention(*args, **(kwargs | {"dropout_p": 0.0} if "dropout_p" in kwargs else kwargs))

    def _after_forward(self, module: nn.Module, _: Any, output: Any) -> None:
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        self._run.dtypes |= {leaf.dtype for leaf in leaves}
        for device in {leaf.device.type for leaf in leaves if leaf.dtype is not torch.float64}:
            if torch.is_autocast_enabled(device):  # its modules compute in it, also where they return float32
                self._run.dtypes.add(torch.get_autocast_dtype(device))
        if isinstance(module, _BatchNorm) and module.training and "Sync" not in type(module).__name__:
            self._run.batch_norms.add(type(module).__name__)

    def _backward(self, backward: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._run.backwards += self._at == 0
        used: dict[str, tuple[Tensor, int]] = {}
        parameters = self._names.parameters() if self._alone else {}
        for name, tensor in parameters.items():
            gradient = tensor.grad
            if gradient is None or not gradient.detach().to_dense().any():
                self._stepped.discard(name)
                self._stale.discard(name)
            elif name in self._stepped:
                used[name] = gradient, gradient._version
        backward(*args, **kwargs)
        for name, (gradient, version) in used.items():
            if parameters[name].grad is not gradient or gradient._version != version:
                self._stale.add(name)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        self._depth += 1
        if self._depth > 1:  # an optimizer within another, as ZeRO has it
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            return self._see_step(optimizer)
        unseen = [optimizer]

        def seen() -> Any:  # a closure makes the gradients; some optimizers call it again
            loss = closure()
            while unseen:
                self._see_step(unseen.pop())
            return loss

        return args[:1], {**kwargs, "closure": seen}

    def _see_step(self, optimizer: torch.optim.Optimizer) -> None:
        label = self._names.optimizer(optimizer)
        again = f" (its step {self._steps[label] + 1})" if self._steps[label] else ""
        self._steps[label] += 1
        known = {id(tensor): name for name, tensor in self._names.parameters().items()}
        for number, group in enumerate(optimizer.param_groups):
            rate = torch.tensor(float(group.get("lr", 0.0)), dtype=torch.float64)
            self._run.seen[Key(self._at, "learning rate", f"{label}, group {number}{again}")] = rate
            for index, tensor in enumerate(group["params"]):
                name = known.get(id(tensor), f"{label}[{number}][{index}]")
                decay = torch.tensor(float(group.get("weight_decay", 0.0)), dtype=torch.float64)
                self._run.seen[Key(self._at, "weight decay", name + again)] = decay
                self._run.trained[name] = None
                gradient, key = tensor.grad, Key(self._at, "gradient", name + again)
                if id(tensor) in known:
                    self._run.seen[key] = None if gradient is None else snapshot(gradient)
                    self._run.used_by[key.name] = label + again
                else:
                    self._run.strangers.add(name)
                if name in self._stale:
                    self._run.uncleared.add(name)
                self._stepped.add(name)
                if self._nudge and gradient is not None:
                    self._nudge.gradient(gradient)
                if self._follow and isinstance(whole := self._follow.seen.get(key), Tensor) and gradient is not None:
                    restore(gradient, whole)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        known = {id(tensor): name for name, tensor in self._names.parameters().items()}
        for tensor, state in optimizer.state.items():
            for key, value in state.items() if id(tensor) in known and isinstance(state, dict) else ():
                if isinstance(value, Tensor):
                    self._run.seen[Key(self._at, "optimizer state", f"{known[id(tensor)]} {key}")] = snapshot(value)


def _number(name: object, value: Any) -> Value:
    if isinstance(value, Tensor) and value.numel() == 1:
        return snapshot(value)
    if isinstance(value, int | float):
        return torch.tensor(value, dtype=torch.float64)
    raise ParityError(
        f"train_step returned {name!r}: expected a number, got {type(value).__name__}."
        ' Return the loss, {"loss": ..., "grad_norm": ...} of single numbers, or None.'
    )


def _gather(output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
    output_tensor.copy_(input_tensor.reshape(output_tensor.shape))
    return dist.barrier(async_op=True) if async_op else None


def _gather_list(tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
    return _gather(tensor_list[0], tensor, group, async_op)


def _by_share(layer: Any, x: Tensor, shares: int) -> Tensor:
    """Do what so many ranks do, each with statistics of its own; those of rank 0 are kept, as DDP broadcasts them."""
    layer.num_batches_tracked += 1
    rest = layer.weight, layer.bias, True, layer.momentum, layer.eps
    first, *others = x.tensor_split(shares)
    kept = functional.batch_norm(first, layer.running_mean, layer.running_var, *rest)
    return torch.cat([kept, *(functional.batch_norm(part, None, None, *rest) for part in others)])
