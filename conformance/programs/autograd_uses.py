"""Programs `autograd_use` and `refusable_use`: what users do with autograd and a DDP.

A use is a module and the code of one step. Where a requirement lets a DDP raise an error instead, the whole run is one
fact: the gradients, or the error.
"""

import gc
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conformance.errors import present
from conformance.models.catalogue import moved
from conformance.models.integers import UNIT, RankStep, integers, with_integer_weights
from conformance.programs import RankContext, observe_run, program, run_steps
from conformance.truth.expected import Raises

NUM_STEPS = 3
WIDTH = 4


@dataclass(frozen=True)
class Use:
    """A module, the code of one step, and how the module is wrapped (as a whole unless `wrap` says otherwise).

    A DDP may raise `refusal` instead of averaging; None: it may not raise. It must ignore the parameters `ignored`.
    """

    build: Callable[[], nn.Module]
    step: Callable[[Any, RankStep], Mapping[str, Any] | None]
    wrap: Callable[[Callable[[nn.Module], Any], nn.Module], Any] = lambda wrap, module: wrap(module)
    refusal: Raises | None = None
    num_steps: int = NUM_STEPS
    ignored: tuple[str, ...] = ()


def layers(hidden: int = 3) -> nn.Module:
    """Return two linear layers, of different sizes; `hidden` is the width between them."""
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.Linear(hidden, 2))


class Twice(nn.Module):
    """Uses one layer twice and one parameter in two places of a single forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.shared = nn.Parameter(torch.empty(WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return rows of WIDTH."""
        hidden: Tensor = self.layer(inputs * self.shared)
        output: Tensor = self.layer(hidden)
        return output + self.shared


class Tied(nn.Module):
    """Two layers that share one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.decoder = nn.Linear(WIDTH, WIDTH, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, inputs: Tensor) -> Tensor:
        """Return rows of WIDTH."""
        return self.decoder(self.encoder(inputs))


class _Twins(nn.Module):
    """Layers whose weights share memory and are two parameters, and one that begins inside the memory of another."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.decoder = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH - 1, bias=False)
        self.decoder.weight = nn.Parameter(self.encoder.weight.data)
        self.last.weight = nn.Parameter(self.encoder.weight.data[1:])

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.decoder(self.encoder(inputs)))


#: Names to ignore, and names that a DDP would also ignore if it did not compare whole names: by a prefix, a suffix or a
#: part, as a pattern, or without regard to case.
IGNORED_NAMES = ("net.layer1.weight", "net.bias", "net.w*", "net.table?")
_NEIGHBOURS_OF_IGNORED = (
    "net.layer10.weight", "net.layer1.weight2", "net.layer1.weight_orig", "net.layer1.bias", "net.layer1.w",
    "net.layer1.Weight", "net.layer1_weight", "net.layer2.weight", "net.biases", "net.bia", "net.Bias", "net.wide",
    "net.w", "net.table1", "net_.bias", "sub.net.bias", "sub.net.layer1.weight", "subnet.bias", "layer1.weight", "bias",
)  # fmt: skip


class _ManyNames(nn.Module):
    """A vector under every name, each of which has a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        for name in (*IGNORED_NAMES, *_NEIGHBOURS_OF_IGNORED):
            *path, own = name.split(".")
            owner: nn.Module = self
            for part in path:
                if part not in dict(owner.named_children()):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(own, nn.Parameter(torch.empty(WIDTH)))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.stack([inputs * vector * (1 + index) for index, vector in enumerate(self.parameters())]).sum(0)


class _Odd(nn.Module):
    """A scalar parameter, one without elements, and an ordinary one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(()))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.weight = nn.Parameter(torch.empty(WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.weight * self.scale + self.nothing.sum()


class _Idle(nn.Sequential):
    """Two layers, and one between them that forward does not use."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 3), nn.Linear(3, 3), nn.Linear(3, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return rows of 2."""
        output: Tensor = self[2](self[0](inputs))
        return output


class Checkpointed(nn.Module):
    """Two layers, the first one within `num_checkpoints` activation checkpoints."""

    def __init__(self, *, num_checkpoints: int, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 2)
        self.num_checkpoints = num_checkpoints
        self.reentrant = reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        """Return rows of 2."""
        hidden = inputs.requires_grad_()
        for _ in range(self.num_checkpoints):
            hidden = checkpoint(self.first, hidden, use_reentrant=self.reentrant)
        return self.last(hidden)


def _ordinary(model: nn.Module, turn: RankStep) -> None:
    turn.backward(turn.loss(turn.forward(model, turn.inputs(5, WIDTH))))


def _create_graph(model: nn.Module, turn: RankStep) -> Mapping[str, Any]:
    """Return as fact `kept` how many graphs of earlier steps live, which have no gradient and no loss any more."""
    inputs = vars(model).setdefault("inputs_of_steps", [])
    gc.collect()  # a gradient with a graph and its parameter hold each other, in torch as well
    kept = sum(one() is not None for one in inputs)
    rows = turn.inputs(5, WIDTH).requires_grad_()  # the graph of a gradient holds them, and nothing else does
    inputs.append(weakref.ref(rows))
    loss = turn.loss(turn.forward(model, rows))
    with warnings.catch_warnings():
        # A DDP should warn that the averaged gradients cannot be differentiated again; autograd warns of cycles.
        warnings.simplefilter("ignore")
        turn.backward(loss, create_graph=True)
    return {"kept": kept}


def _retain_graph(model: nn.Module, turn: RankStep) -> None:
    output = turn.forward(model, turn.inputs(5, WIDTH))
    turn.backward(turn.loss(output), retain_graph=True)
    model.zero_grad(set_to_none=True)  # every DDP handles the first backward; only the second is judged
    turn.backward(turn.loss(output, micro=1))


def _gradient_penalty(model: nn.Module, turn: RankStep) -> None:
    inputs = turn.inputs(2, WIDTH).requires_grad_()
    loss = turn.loss(turn.forward(model, inputs))
    with turn.phase("backward"):
        (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
    turn.backward(loss + slope.sum())


def _autograd_grad_first(model: nn.Module, turn: RankStep) -> Mapping[str, Any]:
    inputs = turn.inputs(5, WIDTH).requires_grad_()
    loss = turn.loss(turn.forward(model, inputs))
    with turn.phase("backward"):
        (slope,) = torch.autograd.grad(loss, inputs, retain_graph=True)
    turn.backward(loss)
    return {"slope": slope}


def _autograd_grad_on_one_rank(model: nn.Module, turn: RankStep) -> Mapping[str, Any] | None:
    if turn.rank == turn.step % 2:
        return _autograd_grad_first(model, turn)
    _ordinary(model, turn)
    return None


def _change_in_place(model: nn.Module, turn: RankStep) -> None:
    output = turn.forward(model, turn.inputs(5, WIDTH))
    output += 1
    output.mul_(2)
    loss = turn.loss(output)
    loss *= 3
    turn.backward(loss)


def _without_clone(model: Any, turn: RankStep) -> None:
    model._set_ddp_sink_clone(False)
    _ordinary(model, turn)


def _two_forwards(model: nn.Module, turn: RankStep) -> None:
    first = turn.loss(turn.forward(model, turn.inputs(5, WIDTH)))
    second = turn.loss(turn.forward(model, turn.inputs(3, WIDTH, micro=1)), micro=1)
    turn.backward(first + second)


def _forward_under_no_grad(model: nn.Module, turn: RankStep) -> Mapping[str, Any]:
    with torch.no_grad():
        before = turn.forward(model, turn.inputs(2, WIDTH, micro=7))
    _ordinary(model, turn)
    model.eval()
    with torch.no_grad():
        after = turn.forward(model, turn.inputs(2, WIDTH, micro=8))
    model.train()
    return {"before": before, "after": after}


def _discarded_forward(model: nn.Module, turn: RankStep) -> None:
    turn.forward(model, turn.inputs(2, WIDTH, micro=7))
    _ordinary(model, turn)


def _tensor_hooks(model: nn.Module, turn: RankStep) -> Mapping[str, Any]:
    seen: dict[str, Any] = {}

    def double(name: str, gradient: Tensor) -> Tensor:
        seen[f"local/{name}"] = gradient.clone()
        return gradient * 2

    handles = [parameter.register_hook(partial(double, str(i))) for i, parameter in enumerate(model.parameters())]
    _ordinary(model, turn)
    for handle in handles:
        handle.remove()
    return seen


#: Where a gradient that the user sets may lie: as its parameter does, transposed, with gaps, within a larger tensor.
_PLACES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "dense": torch.clone,
    "transposed": lambda values: values.t().contiguous().t() if values.dim() == 2 else values.clone(),
    "gaps": lambda values: values.repeat_interleave(2, -1)[..., ::2],
    "shared": lambda values: torch.cat([values.reshape(-1), values.reshape(-1)])[: values.numel()].view(values.shape),
}


def _set_gradients(model: nn.Module, turn: RankStep, place: str = "dense") -> None:
    for index, parameter in enumerate(model.parameters()):
        prior = UNIT * integers(*parameter.shape, key=("prior", index, turn.rank, turn.step)).to(turn.device)
        parameter.grad = _PLACES[place](prior)


def _gradient_set_before(model: nn.Module, turn: RankStep) -> None:
    _set_gradients(model, turn)
    _ordinary(model, turn)


def _gradient_held(model: nn.Module, turn: RankStep, place: str) -> Mapping[str, Any]:
    _set_gradients(model, turn, place)
    held = [(name, one, present(one.grad), present(one.grad).detach()) for name, one in model.named_parameters()]
    _ordinary(model, turn)
    others = [f"{name}.grad is another tensor behind backward" for name, one, grad, _ in held if one.grad is not grad]
    stale = [
        f"the memory that {name}.grad was in does not hold the mean"
        for name, one, _, memory in held
        if one.grad is None or not torch.equal(one.grad, memory)
    ]
    return {"in_place": others + stale}


def _module_hooks(model: nn.Module, turn: RankStep) -> Mapping[str, Any]:
    fired: list[str] = []
    inner: Any = getattr(model, "module", model)
    handles = []
    for name, owner in (("wrapper", model), ("module", inner), ("child", inner[0])):
        handles += [
            owner.register_forward_pre_hook(lambda *_, name=name: fired.append(f"{name} before forward")),
            owner.register_forward_hook(lambda *_, name=name: fired.append(f"{name} after forward")),
            owner.register_full_backward_pre_hook(lambda *_, name=name: fired.append(f"{name} before backward")),
            owner.register_full_backward_hook(lambda *_, name=name: fired.append(f"{name} after backward")),
        ]
    turn.backward(turn.loss(turn.forward(model, turn.inputs(5, WIDTH).requires_grad_())))
    for handle in handles:
        handle.remove()
    return {"fired": sorted(fired)}


def _partial_backward(model: Any, turn: RankStep) -> None:
    loss = turn.loss(turn.forward(model, turn.inputs(5, WIDTH)))
    turn.backward(loss, inputs=[model.module[1].weight])
    model._check_reducer_finalized()


def _two_wrappers(pair: Any, turn: RankStep) -> None:
    generator, critic = pair[0], pair[1]
    hidden = turn.forward(generator, turn.inputs(5, WIDTH))
    judged = turn.forward(critic, hidden.detach())
    turn.backward(turn.loss(judged))
    turn.backward(turn.loss(hidden))


def _stacked_wrappers(pair: Any, turn: RankStep) -> None:
    hidden = turn.forward(pair[0], turn.inputs(5, WIDTH))
    turn.backward(turn.loss(turn.forward(pair[1], hidden)))


def _pair() -> nn.Module:
    return nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)])


def _wrap_each(wrap: Callable[[nn.Module], Any], pair: Any) -> Any:
    return [wrap(pair[0]), wrap(pair[1])]


_REFUSAL = Raises(("RuntimeError",))

USES: Mapping[str, Use] = {
    "ordinary": Use(layers, _ordinary),
    "create_graph": Use(layers, _create_graph),
    "create_graph_idle": Use(_Idle, _create_graph),
    "retain_graph": Use(layers, _retain_graph, refusal=_REFUSAL),
    "gradient_penalty": Use(layers, _gradient_penalty),
    "autograd_grad_first": Use(layers, _autograd_grad_first),
    "autograd_grad_on_one_rank": Use(layers, _autograd_grad_on_one_rank),
    "change_in_place": Use(layers, _change_in_place),
    "without_clone": Use(layers, _without_clone),
    "two_forwards": Use(layers, _two_forwards),
    "forward_under_no_grad": Use(layers, _forward_under_no_grad),
    "discarded_forward": Use(layers, _discarded_forward),
    "tensor_hooks": Use(layers, _tensor_hooks),
    "module_hooks": Use(layers, _module_hooks),
    "gradient_set_before": Use(layers, _gradient_set_before),
    **{f"gradient_held_{place}": Use(layers, partial(_gradient_held, place=place)) for place in _PLACES},
    "used_twice": Use(Twice, _ordinary),
    "tied": Use(Tied, _ordinary),
    "twins": Use(_Twins, _ordinary),
    "odd_shapes": Use(_Odd, _ordinary),
    "ignored_in_root": Use(Twice, _ordinary, ignored=("shared",)),
    "ignored_among_neighbours": Use(_ManyNames, _ordinary, ignored=IGNORED_NAMES),
    "ignored_in_child": Use(layers, _ordinary, ignored=("0.bias", "1.weight")),
    "partial_backward": Use(layers, _partial_backward, refusal=_REFUSAL, num_steps=1),
    "two_wrappers": Use(_pair, _two_wrappers, _wrap_each),
    "stacked_wrappers": Use(_pair, _stacked_wrappers, _wrap_each),
    "checkpoint": Use(lambda: Checkpointed(num_checkpoints=1, reentrant=False), _ordinary),
    "checkpoint_twice": Use(lambda: Checkpointed(num_checkpoints=2, reentrant=False), _ordinary),
    "checkpoint_reentrant": Use(lambda: Checkpointed(num_checkpoints=1, reentrant=True), _ordinary),
    "checkpoint_reentrant_twice": Use(
        lambda: Checkpointed(num_checkpoints=2, reentrant=True), _ordinary, refusal=_REFUSAL
    ),
}


@program("autograd_use", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def autograd_use(ctx: RankContext) -> None:
    """Run the use that argument `use` names for its number of steps. All ranks run it.

    Argument `hidden`: how wide `layers` are between them.

    Observes `step<k>/grad/<name>` and the use's own facts.
    """
    _run(ctx, USES[ctx.arguments["use"]])


@program("refusable_use", invariants=("leaves_no_trace",))
def refusable_use(ctx: RankContext) -> None:
    """Run the use that argument `use` names; a DDP may raise an error instead, on every rank.

    Observes `outcome`: everything that `autograd_use` would observe, or the exception. All ranks run it.
    """
    _run(ctx, USES[ctx.arguments["use"]])


def _run(ctx: RankContext, use: Use) -> None:
    build = partial(layers, ctx.arguments["hidden"]) if "hidden" in ctx.arguments else use.build
    module = moved(with_integer_weights(build(), ctx.scenario.seed), ctx.device)
    module._ddp_params_and_buffers_to_ignore = list(use.ignored)  # type: ignore[assignment]
    in_place: dict[str, Any] = {f"step{step}/in_place": [] for step in range(use.num_steps)}
    observe_run(
        ctx, lambda: run_steps(ctx, module, use.wrap(ctx.wrap, module), use.step, use.num_steps), must=in_place,
        refusal=use.refusal,
    )  # fmt: skip
