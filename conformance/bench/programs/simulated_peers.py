"""Program `simulated_peers`: what wrapping and the first steps cost one rank among simulated others."""

import functools
import gc
import time
from collections.abc import Callable

import torch

from conformance.bench.programs.echoing_peers import EchoingPeers
from conformance.bench.programs.step_time import NO_DDP, take_turns
from conformance.bench.programs.workloads import Workload, workload_named
from conformance.programs.rank_context import RankContext
from conformance.programs.registry import program_without_truth

#: Buckets are planned anew after the first; the second is the first with the plan that stays.
_NUM_STEPS = 2


@program_without_truth("simulated_peers")
def simulated_peers(ctx: RankContext) -> None:
    """Observe `<label>`: seconds per round of each of `arguments["contestants"]`, by the process's own CPU time.

    A contestant is [label, subject, workload, simulated world size]; subject `NO_DDP` wraps nothing. In each round it
    wraps a new module, over a group of `EchoingPeers`, and trains two steps without an optimiser: ranks compare their
    modules, and plan their buckets twice. Building the module does not count. One rank runs it.
    """
    contestants: list[tuple[str, Callable[[], float]]] = []
    for label, subject, workload, world_size in ctx.arguments["contestants"]:
        step = functools.partial(_begin, ctx, subject, workload_named(str(workload)), EchoingPeers(int(world_size)))
        contestants.append((str(label), step))
    take_turns(ctx, contestants)


def _begin(ctx: RankContext, subject: str, workload: Workload, peers: EchoingPeers) -> float:
    module = workload.make()
    batch = workload.inputs(torch.Generator().manual_seed(0))
    gc.collect()
    begin = time.process_time()
    model = module if subject == NO_DDP else ctx.wrap_in(subject, module, process_group=peers)
    for _ in range(_NUM_STEPS):
        model(batch).sum().backward()
    return time.process_time() - begin
