"""Program `mixed_precision_training`: `train` with DDP's mixed precision, observing the dtypes it communicates."""

from conformance.checkers.protocol import is_gradient
from conformance.models.low_precision import build_coarse, precision_of
from conformance.models.optimizers import sgd
from conformance.models.watched_layers import dtype_name
from conformance.programs import RankContext, program
from conformance.programs.train import run_step
from conformance.truth.expected import Anything


@program(
    "mixed_precision_training",
    invariants=("same_collectives", "silent_no_sync", "nothing_in_flight", "leaves_no_trace"),
)
def mixed_precision_training(ctx: RankContext) -> None:
    """Train by the schedule with option `mixed_precision`, written as `models.low_precision.precision_of` reads it.

    Argument `ignored` is as in program `train`, and so are the facts, with `wire` besides: the dtypes of all reduced
    gradients, sorted. All ranks run it.
    """
    module = build_coarse(ctx.fixture, ctx.scenario, ctx.device)
    if ignored := ctx.arguments.get("ignored"):
        module._ddp_params_and_buffers_to_ignore = list(ignored)  # type: ignore[assignment]
    model = ctx.wrap(module, mixed_precision=precision_of(ctx.scenario.options))
    optimizer = sgd(module, ctx.fixture)
    for index, step in enumerate(ctx.scenario.schedule):
        run_step(ctx, model, module, optimizer, index, step)
    ctx.observe_parameters("final", module)
    ctx.observe_buffers("final", module)
    reduced = [dtype for collective in ctx.collectives() if is_gradient(collective) for dtype in collective.dtypes]
    wanted = precision_of(ctx.scenario.options).communication_dtype
    wire = {dtype_name(wanted or each.dtype) for each in module.parameters() if each.requires_grad}
    ctx.observe("wire", sorted(set(reduced)), must=sorted(wire) if ctx.world_size > 1 else Anything())
