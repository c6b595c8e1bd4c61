"""Program `mixed_precision_casts`: which parameters a DDP casts in a step, in which order, and how long it keeps that.

What is observed are operators, by the order in which they are called: `to`, `copy_` and `_foreach_copy_` that read the
storage of a parameter and write the low precision.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.models.low_precision import precision_of
from conformance.models.small_integers import small_inputs, small_loss, with_small_weights
from conformance.observation import Facts
from conformance.programs import RankContext, program, rank_step
from conformance.scenario import Scenario
from conformance.truth.expected import Satisfies, is_at_least, is_at_most

NUM_STEPS = 4
_WIDTH = 3
#: The layers in the order in which forward needs them; they are registered in another one.
_EXECUTION = ("first", "twice", "frozen", "lent", "twice", "last")
_REGISTRATION = ("last", "spare", "lent", "frozen", "twice", "first")
#: What a device's trace calls a cast, and how the operations end that multiply matrices.
_COPY, _PRODUCT = "a copy", "mm"


@dataclass
class _Journal:
    casts: list[str] = field(default_factory=list)
    #: Of copies: the parameter's name and the storage.
    copies: list[tuple[str, StorageWeakRef]] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    #: Copies that were there although forward had done with them.
    kept: list[str] = field(default_factory=list)

    def run(self, layer: str) -> None:
        """Note that `layer` runs next. Those that are over may have copies no more, but for the one that ran last."""
        over = set(self.runs) - {*self.runs[-1:], *_EXECUTION[len(self.runs) :]}
        self.kept += [f"{name} while {layer} runs" for name in self.alive() if name.split(".")[0] in over]
        self.runs.append(layer)

    def alive(self) -> list[str]:
        return [name for name, storage in self.copies if _num_bytes(storage)]


class _Layer(nn.Linear):
    def __init__(self, name: str, journal: list[_Journal]) -> None:
        super().__init__(_WIDTH, _WIDTH)
        self.name, self.journal = name, journal

    def forward(self, inputs: Tensor) -> Tensor:
        self.journal[-1].run(self.name)
        return super().forward(inputs)


class Chain(nn.Module):
    """Layers in a row: one is frozen, one runs twice, of one the root reads the parameters, and one is idle."""

    def __init__(self) -> None:
        super().__init__()
        self.journal = [_Journal()]
        for name in _REGISTRATION:
            self.add_module(name, _Layer(name, self.journal))
        self.get_submodule("frozen").requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs
        for name in _EXECUTION:
            layer: Any = self.get_submodule(name)
            if name == "lent":
                self.journal[-1].run(name)
                hidden = functional.linear(hidden, layer.weight, layer.bias)
            else:
                hidden = layer(hidden)
        return hidden


class _Watch(TorchDispatchMode):
    def __init__(self, module: nn.Module, dtype: torch.dtype, journal: _Journal) -> None:
        super().__init__()
        self._names = {tensor.untyped_storage().data_ptr(): name for name, tensor in module.named_parameters()}
        self._dtype, self._journal = dtype, journal

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self._note(args[0], output)
        elif func is torch.ops.aten.copy_.default:
            self._note(args[1], args[0])
        elif func is torch.ops.aten._foreach_copy_.default:
            for target, source in zip(args[0], args[1], strict=True):
                self._note(source, target)
        return output

    def _note(self, source: Tensor, target: Tensor) -> None:
        name = self._names.get(source.untyped_storage().data_ptr())
        if name is not None and source.dtype != target.dtype == self._dtype:
            self._journal.casts.append(name)
            self._journal.copies.append((name, StorageWeakRef(target.untyped_storage())))


def _num_bytes(reference: StorageWeakRef) -> int:
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return 0 if storage is None else storage.nbytes()


def _build(scenario: Scenario) -> Chain:
    return with_small_weights(Chain(), scenario.seed)


@program("mixed_precision_casts", invariants=("same_collectives", "leaves_no_trace"))
def mixed_precision_casts(ctx: RankContext) -> None:
    """Run 4 steps with option `mixed_precision`: forward and backward, or with `evaluates` a forward without gradients.

    Observes of each step but the first, from which a DDP may learn: `cast` (bytes of casts for each parameter),
    `order` (parameters, by their first cast), `kept` (copies that forward had done with, while it ran) and `left`
    (those that exist after the step); with `traces`, on a device that lists its work, what ran beside computation.
    """
    dtype = precision_of(ctx.scenario.options).param_dtype
    evaluates, traces = ctx.arguments.get("evaluates", False), ctx.arguments.get("traces", False)
    device_module = torch.get_device_module(ctx.device)
    if traces and not hasattr(device_module, "take_trace"):
        ctx.unsupported("the device does not list its work: its module has no take_trace")
    module = _build(ctx.scenario).to(ctx.device)
    model: Any = ctx.wrap(module, mixed_precision=precision_of(ctx.scenario.options))
    sizes = {name: parameter.numel() * 2 for name, parameter in module.named_parameters()}
    for index in range(NUM_STEPS):
        turn = rank_step(ctx, index)
        inputs = small_inputs(turn, 2, _WIDTH)
        module.zero_grad(set_to_none=True)
        module.journal[:] = [journal := _Journal()]
        if traces:
            device_module.start_trace()
        with torch.no_grad() if evaluates else contextlib.nullcontext(), _watching(module, dtype, journal):
            output = turn.forward(model, inputs)
        if traces:
            trace = device_module.take_trace()
        if not evaluates:
            turn.backward(small_loss(turn, output))
        del output
        if not index:
            continue
        casts = {name: sizes[name] * journal.casts.count(name) for name in dict.fromkeys(journal.casts)}
        ctx.observe(f"step{index}/cast", dict(sorted(casts.items())))
        ctx.observe(f"step{index}/order", list(casts))
        ctx.observe(f"step{index}/kept", journal.kept)
        ctx.observe(f"step{index}/left", journal.alive())
        if traces:
            ctx.observe(f"step{index}/beside", _casts_ahead(trace))
            ctx.observe(f"step{index}/waits", _waits_of_products(trace))


def _casts_ahead(trace: Sequence[tuple[str, str]]) -> int:
    """Return how many copies were launched on other streams than that of the products, before the first of these."""
    first = next(place for place, (_, operation) in enumerate(trace) if operation.endswith(_PRODUCT))
    return sum(operation == _COPY and stream != trace[first][0] for stream, operation in trace[:first])


def _waits_of_products(trace: Sequence[tuple[str, str]]) -> int:
    """Return how often the stream of the products waited for another one between the first and the last of them."""
    products = [place for place, (_, operation) in enumerate(trace) if operation.endswith(_PRODUCT)]
    between = trace[products[0] : products[-1]]
    return sum(stream == trace[products[0]][0] and operation.startswith("waits for") for stream, operation in between)


@contextlib.contextmanager
def _watching(module: nn.Module, dtype: torch.dtype | None, journal: _Journal) -> Iterator[None]:
    if dtype is None:
        yield
        return
    with _Watch(module, dtype, journal):
        yield


@mixed_precision_casts.expects
def _expected(scenario: Scenario) -> Mapping[int, Facts]:
    module = _build(scenario)
    read = [f"{layer}.{name}" for layer in dict.fromkeys(_EXECUTION) for name in ("weight", "bias")]
    cast = {name: module.get_parameter(name).numel() * 2 for name in sorted(read)}
    asked: dict[str, Callable[[], dict[str, Any]]] = {
        "cast": lambda: {"cast": cast},
        "order": lambda: {"order": read},
        # While forward runs, a later backward may need any copy.
        "kept": lambda: {"left": [], **({"kept": []} if scenario.arguments.get("evaluates") else {})},
        "beside": lambda: {
            "beside": Satisfies(f"{len(read)} casts, before the first product", is_at_least, (len(read),)),
            "waits": Satisfies("at most one between products", is_at_most, (1,)),
        },
    }
    facts = {
        f"step{index}/{name}": value
        for index in range(1, NUM_STEPS)
        for name, value in asked[scenario.arguments["asks"]]().items()
    }
    return dict.fromkeys(range(scenario.world_size), facts)
