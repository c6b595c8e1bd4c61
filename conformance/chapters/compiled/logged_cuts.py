"""Program `logged_cuts`: what torch's logging switches show of the cuts in a compiled graph."""

import logging
from collections.abc import Mapping
from typing import Any

from torch._logging._internal import set_logs

from conformance.chapters.compiled.compiling import PRELOAD, compiling
from conformance.models.integers import with_integer_weights
from conformance.observation import Facts
from conformance.programs import RankContext, program, rank_step
from conformance.programs.bucket_traffic import Stack
from conformance.programs.standard_error import written_to_stderr
from conformance.scenario import Scenario

#: Lengths of float32 vectors that fill a bucket of 1 MiB each, each of another number of bytes.
_SIZES = (2**18, 2**18 + 1, 2**18 + 2)

#: Switch of `TORCH_LOGS` -> what `set_logs` takes for it, and what every DDP must log then.
_SWITCHES: Mapping[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "+dynamo": ({"dynamo": logging.DEBUG}, tuple(str(4 * size) for size in _SIZES)),
    "ddp_graphs": ({"ddp_graphs": True}, ("submod_0", "submod_1", "submod_2")),
}


@program("logged_cuts", invariants=("same_collectives", "nothing_in_flight"), preload=PRELOAD)
def logged_cuts(ctx: RankContext) -> None:
    """Train two steps of three vectors that fill a bucket each, with argument `switch` of `TORCH_LOGS`.

    Observes `told`, whether stderr names each bucket: by its bytes, or by the graph of its part. All ranks run it.
    """
    module = Stack(list(_SIZES), [ctx.scenario.dtype] * len(_SIZES), range(len(_SIZES)))
    with_integer_weights(module, ctx.scenario.seed).to(ctx.device)
    switched, names = _SWITCHES[ctx.arguments["switch"]]
    with compiling(ctx) as (inside, _), written_to_stderr() as text:
        set_logs(**switched)
        try:
            model = inside.wrap(module)
            for index in range(2):
                turn = rank_step(inside, index)
                turn.backward(turn.loss(turn.forward(model, turn.inputs(3))))
        finally:
            set_logs()
    ctx.observe("told", [name in text() for name in names])


@logged_cuts.expects
def _all(scenario: Scenario) -> Mapping[int, Facts]:
    _, names = _SWITCHES[scenario.arguments["switch"]]
    return {rank: {"told": [True] * len(names)} for rank in range(scenario.world_size)}
