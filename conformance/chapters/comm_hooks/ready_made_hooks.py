"""Programs about the comm hooks that torch ships: the gradients they give and the collectives they issue."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    batched_powerSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks import (
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)

from conformance.chapters.comm_hooks.hook_mending import StackingGroup, orthogonalising_single_matrices
from conformance.checkers.protocol import is_gradient
from conformance.models.batches import mixed_seed
from conformance.models.integers import RankStep, integers
from conformance.models.optimizers import sgd
from conformance.observation import Facts
from conformance.programs import RankContext, program, rank_step
from conformance.programs.agreement import same_bits_everywhere
from conformance.programs.train import run_step
from conformance.scenario import Scenario
from conformance.truth.expected import Close

NUM_STEPS = 4
#: Steps of post-localSGD and of PowerSGD before they begin to differ from an average.
NUM_AVERAGED = 2

_INVARIANTS = ("same_collectives", "nothing_in_flight", "leaves_no_trace")


class Weights(nn.Module):
    """Vectors that forward multiplies by factors, which are therefore their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(length) for length in (40, 25, 60, 33))

    def forward(self, factors: Sequence[Tensor]) -> Tensor:
        terms = [(weight * factor).sum() for weight, factor in zip(self.weights, factors, strict=True)]
        return torch.stack(terms).sum()


def _small(rank: int, step: int, place: int, length: int) -> Tensor:
    """Return multiples of 12 up to 48: exact in every dtype that a hook compresses to, as are their means."""
    return 12 * integers(length, key=("small", rank, step, place))


def _large(rank: int, step: int, place: int, length: int) -> Tensor:
    """Return gradients of about 40000: two of them exceed float16, their mean over 2 or 4 ranks is exact in it."""
    gradient = torch.full((length,), 4e4)
    gradient[rank] -= 128
    return gradient


def _bytes(rank: int, step: int, place: int, length: int) -> Tensor:
    """Return integers from -128 to 127, both of them among the first: quantised to 8 bits without loss."""
    gradient = integers(length, key=("bytes", rank, step, place), largest=127)
    gradient[0], gradient[1] = -128, 127
    return gradient


_GRADIENTS: Mapping[str, Callable[[int, int, int, int], Tensor]] = {
    "small": _small, "large": _large, "bytes": _bytes,
}  # fmt: skip


def subgroup_of(world_size: int, rank: int) -> list[int]:
    """Return the ranks of the half of the world that `rank` belongs to."""
    half = world_size // 2
    return list(range(half)) if rank < half else list(range(half, world_size))


@dataclass(frozen=True)
class ReadyMade:
    """How to register a hook, the ranks that it averages over at a step, and the dtypes in which it reduces."""

    register: Callable[[Any, Any, Any], None]
    ranks: Callable[[int, int, int], Sequence[int]] = lambda world_size, rank, step: range(world_size)
    wire: tuple[str, ...] = ("float32",)
    subgroups: bool = False


def _hook(hook: Any) -> Callable[[Any, Any, Any], None]:
    return lambda model, group, _: model.register_comm_hook(group, hook)


def _typed(kind: DDPCommHookType) -> Callable[[Any, Any, Any], None]:
    return lambda model, group, _: register_ddp_comm_hook(kind, model, group)


def _builtin(kind: BuiltinCommHookType) -> Callable[[Any, Any, Any], None]:
    return lambda model, *_: model._register_builtin_comm_hook(kind)


def _quantised(hook: Any) -> Callable[[Any, Any, Any], None]:
    return lambda model, group, _: model.register_comm_hook(StackingGroup(group), hook)


def _post_local(*, reduces: bool) -> Callable[[Any, Any, Any], None]:
    def register(model: Any, group: Any, subgroup: Any) -> None:
        state = PostLocalSGDState(group, subgroup, NUM_AVERAGED, post_local_gradient_allreduce=reduces)
        model.register_comm_hook(state, post_localSGD_hook)

    return register


def _alone(world_size: int, rank: int, step: int) -> Sequence[int]:
    return [rank]


def _subgroup_later(world_size: int, rank: int, step: int) -> Sequence[int]:
    return range(world_size) if step < NUM_AVERAGED else subgroup_of(world_size, rank)


def _alone_later(world_size: int, rank: int, step: int) -> Sequence[int]:
    return range(world_size) if step < NUM_AVERAGED else [rank]


_HALF = ("float16",)
_BRAIN = ("bfloat16",)
#: The gradients themselves are bytes.
_SCALES = ("float32",)

HOOKS: Mapping[str, ReadyMade] = {
    "allreduce": ReadyMade(_hook(allreduce_hook)),
    "allreduce_type": ReadyMade(_typed(DDPCommHookType.ALLREDUCE)),
    "builtin_allreduce": ReadyMade(_builtin(BuiltinCommHookType.ALLREDUCE)),
    "fp16": ReadyMade(_hook(fp16_compress_hook), wire=_HALF),
    "fp16_type": ReadyMade(_typed(DDPCommHookType.FP16_COMPRESS), wire=_HALF),
    "builtin_fp16": ReadyMade(_builtin(BuiltinCommHookType.FP16_COMPRESS), wire=_HALF),
    "fp16_wrapper": ReadyMade(_hook(fp16_compress_wrapper(allreduce_hook)), wire=_HALF),
    "fp16_wrapped_noop": ReadyMade(_hook(fp16_compress_wrapper(noop_hook)), _alone, wire=()),
    "bf16": ReadyMade(_hook(bf16_compress_hook), wire=_BRAIN),
    "bf16_wrapper": ReadyMade(_hook(bf16_compress_wrapper(allreduce_hook)), wire=_BRAIN),
    "quantised_tensor": ReadyMade(_quantised(quantization_pertensor_hook), wire=_SCALES),
    "quantised_channel": ReadyMade(_quantised(quantization_perchannel_hook), wire=_SCALES),
    "noop": ReadyMade(_hook(noop_hook), _alone, wire=()),
    "noop_type": ReadyMade(_typed(DDPCommHookType.NOOP), _alone, wire=()),
    "post_local": ReadyMade(_post_local(reduces=True), _subgroup_later, subgroups=True),
    "post_local_silent": ReadyMade(_post_local(reduces=False), _alone_later, subgroups=True),
}


@program("ready_made_hook", invariants=_INVARIANTS)
def ready_made_hook(ctx: RankContext) -> None:
    """Reduce gradients with the hook of `HOOKS` that argument `hook` names. All ranks run it.

    `gradients`: "small" (exact in half precision), "large" (about to overflow it) or "bytes" (exact in 8 bits).
    Observes `step<k>/grad/<name>` and `step<k>/wire`, the floating dtypes that backward communicates.
    """
    hook = HOOKS[ctx.arguments["hook"]]
    memberships = [subgroup_of(ctx.world_size, 0), subgroup_of(ctx.world_size, ctx.world_size - 1)]
    made = [dist.new_group(ranks) for ranks in memberships] if hook.subgroups else []
    mine = next((group for group, ranks in zip(made, memberships, strict=False) if ctx.rank in ranks), None)
    module: Any = Weights().to(ctx.device)
    model = ctx.wrap(module)
    hook.register(model, ctx.process_group, mine)
    for index in range(NUM_STEPS):
        module.zero_grad()
        before = len(ctx.collectives())
        turn = rank_step(ctx, index)
        turn.backward(turn.forward(model, [factor.to(ctx.device) for factor in _factors(ctx.scenario, turn)]))
        ctx.observe_gradients(f"step{index}", module)
        wire = [dtype for each in ctx.collectives()[before:] if is_gradient(each) for dtype in each.dtypes]
        ctx.observe(f"step{index}/wire", sorted(set(wire)))
    if made:
        dist.barrier(group=ctx.process_group)
        dist.destroy_process_group(mine)


def _factors(scenario: Scenario, turn: RankStep) -> list[Tensor]:
    draw = _GRADIENTS[scenario.arguments["gradients"]]
    return [draw(turn.rank, turn.step, place, weight.numel()) for place, weight in enumerate(Weights().weights)]


@ready_made_hook.expects
def _ready_made(scenario: Scenario) -> Mapping[int, Facts]:
    hook = HOOKS[scenario.arguments["hook"]]
    names = [name for name, _ in Weights().named_parameters()]
    facts: dict[int, dict[str, Any]] = {rank: {} for rank in range(scenario.world_size)}
    for index in range(NUM_STEPS):
        local = [_factors(scenario, RankStep(rank, index)) for rank in facts]
        for rank, mine in facts.items():
            taking_part = hook.ranks(scenario.world_size, rank, index)
            for place, name in enumerate(names):
                total = torch.stack([local[other][place] for other in taking_part]).sum(0)
                mine[f"step{index}/grad/{name}"] = total / len(taking_part)
            if scenario.recorded and len(taking_part) > 1:
                mine[f"step{index}/wire"] = list(hook.wire)
    return facts


@program("hooked_training", invariants=("same_collectives", "silent_no_sync", "nothing_in_flight", "leaves_no_trace"))
def hooked_training(ctx: RankContext) -> None:
    """Train by the schedule, as program `train` does, with a hook of `HOOKS` that averages. All ranks run it."""
    module = ctx.build_model()
    model = ctx.wrap(module)
    HOOKS[ctx.arguments["hook"]].register(model, ctx.process_group, None)
    optimizer = sgd(module, ctx.fixture)
    for index, step in enumerate(ctx.scenario.schedule):
        run_step(ctx, model, module, optimizer, index, step)
    ctx.observe_parameters("final", module)
    ctx.observe_buffers("final", module)


class Matrices(nn.Module):
    """Two matrices and two vectors, or several times that; PowerSGD compresses the matrices alone."""

    def __init__(self, num_pairs: int = 1) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.ones(32, 48))
        self.bias = nn.Parameter(torch.ones(48))
        self.square = nn.Parameter(torch.ones(32, 32))
        self.scale = nn.Parameter(torch.ones(32))
        for number in range(1, num_pairs):
            for name, parameter in list(self.named_parameters())[:4]:
                self.register_parameter(f"{name}{number}", nn.Parameter(parameter.detach().clone()))

    def forward(self, factors: Mapping[str, Tensor]) -> Tensor:
        terms = [(parameter * factors[name]).sum() for name, parameter in self.named_parameters()]
        return torch.stack(terms).sum()


def _matrices(scenario: Scenario) -> Matrices:
    return Matrices(scenario.arguments.get("num_pairs", 1))


def _matrix_gradients(scenario: Scenario, rank: int, step: int) -> dict[str, Tensor]:
    """Return gradients: of rank one on each rank, so that the mean has at most the world size's; or just any."""
    gradients = {}
    for name, parameter in _matrices(scenario).named_parameters():
        generator = torch.Generator().manual_seed(mixed_seed("power", rank, step, name))
        if parameter.dim() < 2:
            gradients[name] = 12 * integers(*parameter.shape, key=("power", rank, step, name))
        elif scenario.arguments["gradients"] == "low_rank":
            left = torch.randn(parameter.shape[0], 1, generator=generator)
            gradients[name] = left @ torch.randn(1, parameter.shape[1], generator=generator)
        else:
            gradients[name] = torch.randn(parameter.shape, generator=generator)
    return gradients


@program("power_sgd", invariants=_INVARIANTS, native_facts=("step",))
def power_sgd(ctx: RankContext) -> None:
    """Reduce gradients with PowerSGD, or the batched variant if argument `batched` is true. All ranks run it.

    `state` are arguments of torch's `PowerSGDState`; `gradients` are "low_rank", which PowerSGD transmits without loss
    when its rank is the world size or more, or "full"; `num_pairs` as of `Matrices`; `half`: inside torch's fp16
    wrapper. Observes `step<k>/grad/<name>`, `same_everywhere`, whether all ranks got the same bits, and `saved`,
    whether the steps that compress communicate fewer elements than the gradients have. Where torch's own DDP passes,
    the numbers must equal its.
    """
    state = PowerSGDState(ctx.process_group, start_powerSGD_iter=NUM_AVERAGED, **ctx.arguments["state"])
    hook: Any = batched_powerSGD_hook if ctx.arguments.get("batched") else powerSGD_hook
    module = _matrices(ctx.scenario).to(ctx.device)
    model: Any = ctx.wrap(module)
    model.register_comm_hook(state, fp16_compress_wrapper(hook) if ctx.arguments.get("half") else hook)
    agreed = True
    for index in range(NUM_STEPS + 1):
        module.zero_grad()
        before = len(ctx.collectives())
        turn = rank_step(ctx, index)
        factors = _matrix_gradients(ctx.scenario, ctx.rank, index)
        output = turn.forward(model, {name: factor.to(ctx.device) for name, factor in factors.items()})
        with orthogonalising_single_matrices():
            turn.backward(output)
        ctx.observe_gradients(f"step{index}", module)
        issued = sum(each.numel for each in ctx.collectives()[before:] if is_gradient(each))
        present = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        for gradient in present:
            agreed &= same_bits_everywhere(ctx, [gradient])
    ctx.observe("saved", issued < sum(gradient.numel() for gradient in present))
    ctx.observe("same_everywhere", agreed)


@power_sgd.expects
def _power_sgd(scenario: Scenario) -> Mapping[int, Facts]:
    facts: dict[str, Any] = {"same_everywhere": True}
    if scenario.recorded:
        facts["saved"] = True
    ranks = range(scenario.world_size)
    for index in range(NUM_STEPS + 1):
        local = [_matrix_gradients(scenario, rank, index) for rank in ranks]
        for name, parameter in _matrices(scenario).named_parameters():
            mean = torch.stack([gradients[name] for gradients in local]).double().mean(0).float()
            fact = f"step{index}/grad/{name}"
            if scenario.arguments.get("half"):
                if index < NUM_AVERAGED:
                    facts[fact] = Close(mean, rtol=0.01, atol=0.01, because="float16 on the wire")
            elif parameter.dim() < 2 and not scenario.arguments.get("batched"):
                facts[fact] = mean
            elif scenario.arguments["gradients"] == "low_rank" or index < NUM_AVERAGED:
                facts[fact] = Close(mean, rtol=0.01, atol=0.02, because="a random projection may be ill-conditioned")
    return {rank: dict(facts) for rank in ranks}
