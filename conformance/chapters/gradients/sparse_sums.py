"""Program `sparse_sums`: how many sums are in flight on a rank beside a sparse one, while another rank is late."""

import itertools
import threading
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.observation import Facts
from conformance.programs import RankContext, program
from conformance.scenario import Scenario
from conformance.truth.expected import at_most

NUM_TABLES = 4
_NUM_ROWS, _WIDTH = 4, 2
#: How long the other ranks have to launch what they launch before the last one takes part.
_LATE_S = 0.3
_PATIENCE = timedelta(seconds=30)
#: A key of the store serves one backward only. Ranks that run a program run the same ones before it.
_numbers = itertools.count()


class Tables(nn.Module):
    """Embeddings with sparse gradients, each a bucket of its own, and a bias that is none."""

    def __init__(self) -> None:
        super().__init__()
        tables = [nn.Embedding(_NUM_ROWS, _WIDTH, sparse=True) for _ in range(NUM_TABLES)]
        self.before, self.after = nn.ModuleList(tables[:2]), nn.ModuleList(tables[2:])
        self.bias = nn.Parameter(torch.zeros(_WIDTH))

    def forward(self, rows: Tensor) -> Tensor:
        hidden: Tensor = sum((table(rows).sum(0) for table in self.before), self.bias)
        return sum((table(rows).sum(0) for table in self.after), hidden).sum()


@program("sparse_sums", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def sparse_sums(ctx: RankContext) -> None:
    """Train two steps of `Tables`; observes each gradient, and how many sums were in flight at once.

    Argument `rows` says who looks rows up: `all`, `first` (rank 0 alone) or `none`. All ranks run it.
    """
    looks_up = ctx.arguments["rows"] == "all" or (ctx.arguments["rows"] == "first" and ctx.rank == 0)
    module = Tables().to(ctx.device)
    model = ctx.wrap(module)
    for step in range(2):
        with ctx.phase("step", step):
            module.zero_grad(set_to_none=True)
            rows = torch.arange(1 if looks_up else 0, device=ctx.device)
            loss = ctx.world_size * model(rows)
            ctx.observe(f"step{step}/sums under way at once", _backward(ctx, loss))
        for name, parameter in module.named_parameters():
            ctx.observe(f"step{step}/grad/{name}", None if parameter.grad is None else parameter.grad.to_dense())


def _backward(ctx: RankContext, loss: Tensor) -> int:
    """Run the backward, on the last rank once the others have been counted; return the count, on the last rank 0."""
    store = dist.distributed_c10d._get_default_store()
    key, others = f"sparse sums {next(_numbers)}", range(ctx.world_size - 1)
    if ctx.rank not in others:
        store.wait([f"{key} {rank}" for rank in others], _PATIENCE)
        loss.backward()
        return 0
    before = len(ctx.collectives())
    counts: list[int] = []

    def count() -> None:
        counts.append(len(ctx.collectives()) - before)
        store.set(f"{key} {ctx.rank}", "counted")

    timer = threading.Timer(_LATE_S, count)
    timer.start()
    loss.backward()
    timer.join()
    return counts[0]


@sparse_sums.expects
def _sparse_sums(scenario: Scenario) -> Mapping[int, Facts]:
    users = {"all": scenario.world_size, "first": 1, "none": 0}[scenario.arguments["rows"]]
    facts: dict[str, object] = {}
    for step in range(2):
        facts[f"step{step}/sums under way at once"] = at_most(1)
        for name, parameter in Tables().named_parameters():
            gradient = torch.zeros_like(parameter)
            if name == "bias":
                gradient += scenario.world_size
            else:
                gradient[0] = users  # of the sum, times the number of ranks and divided by it
            facts[f"step{step}/grad/{name}"] = gradient.detach()
    return dict.fromkeys(range(scenario.world_size), facts)
