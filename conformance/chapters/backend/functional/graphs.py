"""Programs about functional collectives: when they wait, what they leave, and how groups are named."""

import gc
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from conformance.programs.judged import Trial, always, first_wrong, judged, unlike
from conformance.programs.rank_context import RankContext

_NAMES = (
    "the first use of an all_reduce waits", "an all_reduce waited for twice", "views of an all_reduce wait",
    "many all_reduces dropped", "all_gather_tensor along dimension 1", "reduce_scatter_tensor along dimension 1",
    "an all_reduce in a group given by its name",
)  # fmt: skip


@judged(
    "functional_collectives", always(*_NAMES),
    speaks_for={
        _NAMES[0]: ("FUNC-02",), _NAMES[1]: ("FUNC-02",), _NAMES[2]: ("FUNC-04",), _NAMES[3]: ("FUNC-03",),
        "*dimension 1": ("FUNC-09",), _NAMES[6]: ("FUNC-10",),
    },
)  # fmt: skip
def functional_collectives(ctx: RankContext) -> Mapping[str, Trial]:
    """Use results of functional collectives at once, twice, through views, and not at all."""
    group, size = ctx.process_group, ctx.world_size
    total = float(sum(range(1, size + 1)))

    def mine(*shape: int) -> Tensor:
        return torch.full(shape, float(ctx.rank + 1), device=ctx.device)

    def reduced(tensor: Tensor) -> Tensor:
        if ctx.rank == size - 1:
            time.sleep(0.05)
        result: Tensor = functional.all_reduce(tensor, "sum", group)
        return result

    def first_use() -> str:
        given = mine(20_000)
        doubled = reduced(given) * 2
        return first_wrong(
            unlike("wrong elements of the sum, doubled:", int((doubled != 2 * total).sum()), 0),
            unlike("changed elements of the input:", int((given != ctx.rank + 1).sum()), 0),
        )

    def twice() -> str:
        result = reduced(mine(5))
        for _ in range(2):
            result = functional.wait_tensor(result)
        return unlike("the sum of all_reduce is", result, [total] * 5)

    def views() -> str:
        view = reduced(mine(4, 5_000))[1:3].reshape(-1) + 0
        return unlike("wrong elements of the view:", int((view != total).sum()), 0)

    def dropped() -> str:
        before = torch._C._distributed_c10d._get_work_registry_size()
        for _ in range(20):
            functional.wait_tensor(functional.all_reduce(mine(3), "sum", group))
        gc.collect()
        return unlike("works that are still registered:", torch._C._distributed_c10d._get_work_registry_size(), before)

    def gathered() -> str:
        result = functional.all_gather_tensor(mine(2, 3), 1, group)
        expected = torch.cat([torch.full((2, 3), rank + 1.0) for rank in range(size)], 1)
        return unlike("the result is", result + 0, expected.tolist())

    def scattered() -> str:
        parts = torch.cat([torch.full((2, 3), float(rank)) for rank in range(size)], 1).to(ctx.device)
        result = functional.reduce_scatter_tensor(parts, "sum", 1, group) + 0
        return unlike("the result is", result, [[float(ctx.rank * size)] * 3] * 2)

    def by_name() -> str:
        name: Any = dist.distributed_c10d._get_process_group_name(group)
        result = functional.all_reduce(mine(3), "sum", name) + 0
        return unlike("the sum of all_reduce is", result, [total] * 3)

    return dict(zip(_NAMES, (first_use, twice, views, dropped, gathered, scattered, by_name), strict=True))
