"""Program `mixed_precision_case`: modules with cast, checkpointed, shared, ignored or unused parameters.

A case is a module and the code of one step. Weights and inputs are
integers plus a small fraction that every low precision rounds away. Therefore gradients differ if the DDP did not
convert something, and the full-precision weights show whether the DDP ever rounded them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.func import functional_call

from conformance.checkers.protocol import is_gradient
from conformance.errors import present
from conformance.models import watched_layers as layers
from conformance.models.catalogue import moved
from conformance.models.integers import RankStep
from conformance.models.low_precision import precision_of
from conformance.models.small_integers import small_inputs, small_loss, with_small_weights
from conformance.models.watched_layers import WIDTH, Pair, Refusing, Watching, dtype_name
from conformance.programs import RankContext, program, rank_step
from conformance.truth.expected import Anything

NUM_STEPS = 3

#: Too little for a low precision to notice beside 1; a whole number of the smallest steps of float32.
_LITTLE = 2.0**-13
#: Small enough that no update changes the low-precision value of a parameter within these few steps.
_LEARNING_RATE = 2.0**-20


@dataclass(frozen=True)
class Case:
    """A module, the code of one step, and the names that the DDP must ignore."""

    build: Callable[[], nn.Module]
    step: Callable[[Any, RankStep], Mapping[str, Any] | None]
    ignored: tuple[str, ...] = ()


def _inputs(turn: RankStep, rows: int = 2, micro: int = 0) -> Tensor:
    return small_inputs(turn, rows, WIDTH, micro=micro) + _LITTLE


def _seen_by(model: Any) -> list[str]:
    for part in model.modules():
        if isinstance(part, Watching):
            return part.seen.take()
    raise AssertionError("no module keeps notes")


def _ordinary(model: Any, turn: RankStep, rows: int = 2, dtype: torch.dtype = torch.float32) -> Mapping[str, Any]:
    output = turn.forward(model, _inputs(turn, rows).to(dtype))
    turn.backward(small_loss(turn, output))
    return {"seen": _seen_by(model), "output": output}


def _input_gradient(model: Any, turn: RankStep) -> Mapping[str, Any]:
    inputs = _inputs(turn).requires_grad_()
    output = turn.forward(model, inputs)
    turn.backward(small_loss(turn, output))
    return {"seen": _seen_by(model), "inputs": inputs, "slope": inputs.grad}


def _containers(model: Any, turn: RankStep) -> Mapping[str, Any]:
    left, first = _inputs(turn), _inputs(turn, micro=1)
    whole, flags = torch.arange(3), torch.tensor([True])
    phases = torch.ones(2, dtype=torch.complex64)
    extra = {
        "list": [first, whole], "tuple": (flags,), "inner": {"z": phases}, "text": "text", "none": None,
    }  # fmt: skip
    output = turn.forward(model, Pair(left, left.double()), extra=extra)
    turn.backward(small_loss(turn, output))
    return {"seen": _seen_by(model), "mine": [dtype_name(tensor.dtype) for tensor in (left, first, whole, phases)]}


def _stand_ins(model: Any, turn: RankStep) -> Mapping[str, Any]:
    tensors = {name: parameter.clone() for name, parameter in model.named_parameters()}
    inputs = _inputs(turn).requires_grad_()
    with turn.phase("forward"):
        output = functional_call(model, tensors, (inputs,))
    turn.backward(small_loss(turn, output))
    return {"seen": _seen_by(model), "output": output}


def _rows(model: Any, turn: RankStep) -> Mapping[str, Any]:
    rows = (torch.arange(2) + turn.rank + turn.step) % 5
    turn.backward(small_loss(turn, turn.forward(model, rows.to(turn.device))))
    return {"seen": _seen_by(model)}


def _branches(model: Any, turn: RankStep, elsewhere: str) -> Mapping[str, Any]:
    turn.backward(small_loss(turn, turn.forward(model, _inputs(turn), "ab" if turn.rank == 0 else elsewhere)))
    return {"seen": _seen_by(model)}


def _two_forwards(model: Any, turn: RankStep) -> Mapping[str, Any]:
    first = small_loss(turn, turn.forward(model, _inputs(turn, rows=1)))
    second = small_loss(turn, turn.forward(model, _inputs(turn, rows=1, micro=1)), micro=1)
    turn.backward(first + second)
    return {"seen": _seen_by(model)}


def _evaluating(model: Any, turn: RankStep) -> Mapping[str, Any]:
    model.eval()
    with torch.no_grad():
        before = turn.forward(model, _inputs(turn, micro=7))
    kept = [dtype_name(parameter.dtype) for parameter in model.parameters()][:4]
    model.train()
    return {"evaluated": before, "kept": kept, **_ordinary(model, turn)}


def _written(model: Any, turn: RankStep) -> Mapping[str, Any]:
    """Evaluate with other weights than those of the forward before."""
    for parameter in model.parameters():
        parameter.data.neg_()
    return _evaluating(model, turn)


def _interrupted(model: Any, turn: RankStep) -> Mapping[str, Any]:
    refusing = [part for part in model.modules() if isinstance(part, Refusing)]
    for part in refusing:
        part.armed = True
    raised = ""
    try:
        model(_inputs(turn, micro=7))
    except ArithmeticError as error:
        raised = str(error)
    for part in refusing:
        part.armed = False
    kept = [dtype_name(parameter.dtype) for parameter in model.parameters()][:4]
    _seen_by(model)
    return {"raised": raised, "kept": kept, **_ordinary(model, turn)}


def _frozen_is_written(model: Any, turn: RankStep) -> Mapping[str, Any]:
    facts = _ordinary(model, turn)
    for part in model.modules():
        if isinstance(part, layers.Frozen):
            part.first.weight.data.neg_()
    return facts


def _doubles() -> nn.Module:
    """Return layers whose gradients are rounded to what a low precision holds."""
    module = layers.WithPReLU(checkpointed=True).double()
    for parameter in module.parameters():
        parameter.register_hook(torch.round)
    return module


CASES: Mapping[str, Case] = {
    "layers": Case(layers.Layers, _ordinary),
    "tied": Case(layers.Tied, partial(_ordinary, rows=1)),
    "checkpoint": Case(lambda: layers.Checkpointed(reentrant=False), _input_gradient),
    "checkpoint_reentrant": Case(lambda: layers.Checkpointed(reentrant=True), _input_gradient),
    "ignored_in_root": Case(layers.Scaled, _ordinary, ignored=("scale",)),
    "not_ignored": Case(layers.Scaled, _ordinary),
    "ignored_layer": Case(layers.Branches, partial(_branches, elsewhere="ab"), ignored=("c.weight", "c.bias")),
    "input_gradient": Case(layers.Layers, _input_gradient),
    "containers": Case(layers.Containers, _containers),
    "two_dtypes": Case(layers.TwoDtypes, _ordinary),
    "complex": Case(layers.WithComplex, _ordinary),
    "sparse": Case(layers.WithTable, _rows),
    "branch_by_rank": Case(layers.Branches, partial(_branches, elsewhere="b")),
    "branch_never_used": Case(layers.Branches, partial(_branches, elsewhere="ab")),
    "two_forwards": Case(layers.Layers, _two_forwards),
    "frozen": Case(layers.Frozen, _ordinary),
    "between": Case(layers.WithPReLU, _ordinary),
    "between_checkpoint": Case(lambda: layers.WithPReLU(checkpointed=True), _ordinary),
    "between_doubles": Case(_doubles, partial(_ordinary, dtype=torch.float64)),
    "within": Case(layers.WithBlock, _ordinary),
    "casts_itself": Case(layers.CastsItself, _ordinary),
    "evaluating": Case(layers.Layers, _evaluating),
    "written": Case(layers.Layers, _written),
    "written_checkpoint": Case(lambda: layers.Checkpointed(reentrant=False), _written),
    "lent": Case(layers.Lent, _ordinary),
    "lent_checkpoint": Case(lambda: layers.Lent(checkpointed=True), _input_gradient),
    "peeking": Case(layers.Peeking, _ordinary),
    "frozen_is_written": Case(layers.Frozen, _frozen_is_written),
    "stand_ins": Case(layers.Layers, _stand_ins),
    "stand_ins_checkpoint": Case(lambda: layers.Checkpointed(reentrant=False), _stand_ins),
    "stand_ins_within": Case(layers.Calling, _ordinary),
    "interrupted": Case(layers.Refusing, _interrupted),
}


@program("mixed_precision_case", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def mixed_precision_case(ctx: RankContext) -> None:
    """Run steps of the case that argument `case` names, with option `mixed_precision`; SGD follows each step.

    With argument `hook` a comm hook averages. Observes gradients, parameters after the optimizer's step, the facts of
    the case, `wire` (dtypes of reduced gradients) and `bucket_dtypes` (what the hook saw). All ranks run it.
    """
    case = CASES[ctx.arguments["case"]]
    module = moved(with_small_weights(case.build(), ctx.scenario.seed, beside=_LITTLE), ctx.device)
    module._ddp_params_and_buffers_to_ignore = list(case.ignored)  # type: ignore[assignment]
    model: Any = ctx.wrap(module, mixed_precision=precision_of(ctx.scenario.options))
    in_buckets: set[str] = set()
    if ctx.arguments.get("hook"):
        model.register_comm_hook(None, _averaging_hook(ctx, in_buckets))
    optimizer = optim.SGD(module.parameters(), lr=_LEARNING_RATE)
    for index in range(NUM_STEPS):
        optimizer.zero_grad()
        for name, value in (case.step(model, rank_step(ctx, index)) or {}).items():
            ctx.observe(f"step{index}/{name}", value)
        ctx.observe_gradients(f"step{index}", module)
        with ctx.phase("optimizer", index):
            optimizer.step()
        ctx.observe_parameters(f"step{index}", module)
    reduced = {_real(dtype) for each in ctx.collectives() if is_gradient(each) for dtype in each.dtypes}
    wanted = precision_of(ctx.scenario.options).communication_dtype
    managed = [p.dtype for name, p in module.named_parameters() if name not in case.ignored and p.requires_grad]
    wire = sorted({dtype_name(_wire_of(dtype, wanted)) for dtype in managed})
    is_open = ctx.world_size == 1 or ctx.arguments["case"] == "sparse"  # in what rows travel is left open
    ctx.observe("wire", sorted(reduced), must=Anything() if is_open else sorted(set(map(_real, wire))))
    ctx.observe("bucket_dtypes", sorted(in_buckets), must=wire if ctx.arguments.get("hook") else [])


def _wire_of(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and dtype.is_floating_point else dtype


def _real(dtype: str) -> str:
    """Return the dtype of a complex one's parts: `torch.distributed` reduces complex tensors as real ones."""
    return dtype_name(getattr(torch, dtype).to_real())


def _averaging_hook(ctx: RankContext, in_buckets: set[str]) -> Callable[[Any, Any], Any]:
    def average(bucket: Any) -> Any:
        buffer = bucket.buffer()
        in_buckets.add(dtype_name(buffer.dtype))
        work = present(
            torch.distributed.all_reduce(buffer.div_(ctx.world_size), group=ctx.process_group, async_op=True)
        )
        return work.get_future().then(lambda future: future.value()[0])

    return lambda _, bucket: average(bucket)  # without annotations, which torch compares with its own types
