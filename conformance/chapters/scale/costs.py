"""Program `costs_of_a_step`: what a step costs beyond the bare module, in counts, which have no noise."""

import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conformance.observation import Facts
from conformance.programs import RankContext, program
from conformance.programs.python_calls import num_calls
from conformance.scenario import Scenario
from conformance.truth.expected import Satisfies, at_most
from conformance.waiting.kept_waiting import process_seconds

#: Elements of each parameter: so many that nothing that a DDP keeps per parameter is as large.
_LENGTH = 64
#: Steps before costs are counted, in which a DDP may build its buckets anew; and steps between two counts.
_WARMING, _BETWEEN = 3, 16
#: Of each gradient's elements: one copy into a bucket, one division, one copy back.
MOST_WRITES = 3
#: Of the bytes of all gradients, when they are None: one copy of them, in buckets, and a sixteenth for everything else.
MOST_KEPT = 1.0625

#: A DDP may begin to watch a wait that has lasted for a second.
_LATE_S = 2.5
#: No thread of a backend takes so long to drop a tensor while the process has a processor.
_DROPPED_WITHIN_S = 1.0


class _Many(nn.Module):
    """Vectors, each of which the forward multiplies by its input."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(_LENGTH) for _ in range(number))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.stack([torch.dot(weight, inputs) for weight in self.weights]).sum()


class _Operators(TorchDispatchMode):
    """Counts operators, collectives and the elements that operators write, and knows the storages that they made."""

    def __init__(self, module: nn.Module) -> None:
        """Begin; parameters of `module` are not the DDP's, though it writes them."""
        super().__init__()
        self.number = self.written = self.collectives = 0
        known = [StorageWeakRef(one.untyped_storage()) for one in module.parameters()]
        self._made: dict[int, tuple[StorageWeakRef, int]] = {one.cdata: (one, 0) for one in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.number += 1
        changed = args[0] if result is None else result  # `_foreach_copy_` returns nothing
        tensors = [one for one in tree_leaves(changed) if isinstance(one, Tensor)]
        if func.namespace == "c10d":
            self.collectives += 1
        elif not func.is_view:
            self.written += sum(one.numel() for one in tensors)
        for storage in (one.untyped_storage() for one in tensors):
            if (reference := StorageWeakRef(storage)).cdata not in self._made:
                self._made[reference.cdata] = reference, storage.nbytes()
        return result

    def bytes_alive(self) -> int:
        """Return how many bytes of the storages that operators made are alive."""
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        return sum(size for _, size in self._made.values())


@dataclass(frozen=True)
class _Costs:
    operators: int
    calls: int
    written_in_forward: int
    written_in_backward: int
    kept: int
    collectives: int

    def beyond(self, other: "_Costs") -> "_Costs":
        return _Costs(*(getattr(self, name) - getattr(other, name) for name in vars(self)))


@program(
    "costs_of_a_step",
    invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"),
    speaks_for={
        "growth/*": ("SCALE-12",), "writes/*": ("SCALE-13",), "kept": ("SCALE-14",), "later/*": ("SCALE-15",),
    },
)  # fmt: skip
def costs_of_a_step(ctx: RankContext) -> None:
    """Count what a step costs beyond the bare module, for argument `numbers`, two numbers of parameters.

    Observes the `growth` of operators, calls of Python functions and collectives from the one to the other; what the
    larger module's step `writes`, for each element of a gradient, in forward and in backward; how many bytes are `kept`
    for each byte of the gradients, when these are None; and how much more a `later` step costs, of calls the less of
    two later steps. With argument `late` the last rank begins its first step late, and the others wait long. All ranks
    run it.
    """
    costs = [_beyond_the_module(ctx, number) for number in ctx.arguments["numbers"]]
    for name in ("operators", "calls", "collectives"):
        ctx.observe(f"growth/{name}", [getattr(first, name) for first, _, _ in costs])
    first, calls_between, later = costs[-1]
    elements = ctx.arguments["numbers"][-1] * _LENGTH
    ctx.observe("writes/forward", first.written_in_forward)
    ctx.observe("writes/backward", first.written_in_backward / elements)
    ctx.observe("kept", first.kept / (4 * elements))
    for name in ("operators", "kept", "collectives"):
        ctx.observe(f"later/{name}", getattr(later, name) - getattr(first, name))
    # Some depend on how long ranks wait for each other; what has grown stays.
    ctx.observe("later/calls", min(calls_between, later.calls) - first.calls)


@costs_of_a_step.expects
def _expected(scenario: Scenario) -> Mapping[int, Facts]:
    first, second = scenario.arguments["numbers"]
    times = second / first
    linear = Satisfies(f"at most {times:g} times as many for {times:g} times the parameters", grows_at_most, (times,))
    facts: dict[str, Any] = dict.fromkeys((f"growth/{name}" for name in ("operators", "calls", "collectives")), linear)
    facts["writes/forward"] = at_most(_LENGTH - 1, "elements more than the module")
    facts["writes/backward"] = at_most(MOST_WRITES, "for each element of a gradient")
    facts["kept"] = at_most(MOST_KEPT, "for each byte of a gradient")
    facts |= dict.fromkeys((f"later/{name}" for name in ("operators", "kept", "collectives")), at_most(0))
    facts["later/calls"] = at_most(_BETWEEN // 4, f"calls more after {_BETWEEN // 2} steps and later")
    return dict.fromkeys(range(scenario.world_size), facts)


def grows_at_most(counts: list[int], times: float) -> bool:
    """Return whether the second count is at most so many times the first one, a predicate of `Satisfies`."""
    return counts[1] <= times * counts[0]


def _beyond_the_module(ctx: RankContext, number: int) -> tuple[_Costs, int, _Costs]:
    """Return what a DDP adds to a step of so many parameters, soon and later, and the calls that it adds halfway."""
    module = _Many(number).to(ctx.device)
    own = _costs(ctx, module, module, _Operators(module))
    with (operators := _Operators(module)):
        model = ctx.wrap(module)
        if ctx.arguments.get("late") and (ctx.rank, number) == (ctx.world_size - 1, ctx.arguments["numbers"][-1]):
            time.sleep(_LATE_S)
        _steps(ctx, model, module, _WARMING)
    soon = _costs(ctx, model, module, operators)
    _steps(ctx, model, module, _BETWEEN // 2)
    calls_between = _calls(ctx, model, module)
    _steps(ctx, model, module, _BETWEEN // 2)
    later = _costs(ctx, model, module, operators)
    return soon.beyond(own), calls_between - own.calls, later.beyond(own)


def _costs(ctx: RankContext, model: nn.Module, module: nn.Module, operators: _Operators) -> _Costs:
    before = operators.number, operators.written, operators.collectives
    with operators:
        loss = model(torch.ones(_LENGTH, device=ctx.device))
        in_forward = operators.written - before[1]
        with ctx.phase("backward"):
            loss.backward()
    del loss
    module.zero_grad(set_to_none=True)
    gc.collect()
    # Before another step takes its place: a DDP may keep what the last one made, and drop what the one before made.
    kept = _kept(operators, sum(4 * one.numel() for one in module.parameters()))
    after = operators.number, operators.written, operators.collectives
    return _Costs(
        after[0] - before[0], _calls(ctx, model, module), in_forward, after[1] - before[1] - in_forward, kept,
        after[2] - before[2],
    )  # fmt: skip


def _calls(ctx: RankContext, model: nn.Module, module: nn.Module) -> int:
    return min(num_calls(lambda: _step(ctx, model, module)) for _ in range(3))


def _kept(operators: _Operators, of_gradients: int) -> int:
    """Return how many bytes are alive, once threads of the backend have dropped the tensors of what is done."""
    for _ in process_seconds(_DROPPED_WITHIN_S, pause_s=0.01):
        if operators.bytes_alive() <= MOST_KEPT * of_gradients:
            break
    return operators.bytes_alive()


def _steps(ctx: RankContext, model: nn.Module, module: nn.Module, number: int) -> None:
    for _ in range(number):
        _step(ctx, model, module)


def _step(ctx: RankContext, model: nn.Module, module: nn.Module) -> None:
    with ctx.phase("forward"):
        loss = model(torch.ones(_LENGTH, device=ctx.device))
    with ctx.phase("backward"):
        loss.backward()
    module.zero_grad(set_to_none=True)
