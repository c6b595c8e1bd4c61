"""Program `sums_of_sparse_tensors`."""

import time
from collections.abc import Mapping
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.programs.judged import Trial, always, judged
from conformance.programs.operations.groups import Groups
from conformance.programs.rank_context import RankContext

_ROWS = 40
#: Which rows a rank has, by its rank and the number of ranks; the first row is everybody's, but where ranks have none.
_PLACES = {
    "the same places": lambda rank, size: [0, 3, 7],
    "places of their own": lambda rank, size: [rank, rank + size],
    "some places of their own, and one of all": lambda rank, size: [0, rank + 1],
    "more places on some ranks than on others": lambda rank, size: list(range(1 + 5 * rank)),
    "no places on the first rank": lambda rank, size: list(range(rank)),
    "the same place twice": lambda rank, size: [0, 2, 2],
}
#: Without more dimensions a place holds a number, with some a dense tensor.
_SHAPES: Mapping[str, tuple[int, ...]] = {"numbers": (), "rows of 3": (3,)}
_DTYPES = (torch.float32, torch.float64, torch.int64)
_WAYS = (
    "all_reduce", "asynchronous all_reduce", "asynchronous all_reduce, the last rank late", "all_reduce of a subgroup",
)  # fmt: skip
_LATE_S = 0.02
_CASES = {
    f"{way} of {str(dtype).removeprefix('torch.')} {shape}, {places}": (way, dtype, _SHAPES[shape], places)
    for way, dtype, shape, places in product(_WAYS, _DTYPES, _SHAPES, _PLACES)
    if dtype == torch.float32 or way in _WAYS[:2]
}


@judged("sums_of_sparse_tensors", always(*_CASES))
def sums_of_sparse_tensors(ctx: RankContext) -> Mapping[str, Trial]:
    """Sum sparse tensors of which ranks have other rows, and other numbers of them. All ranks run it."""
    return {name: partial(_sum, ctx, *case) for name, case in _CASES.items()}


def _sum(ctx: RankContext, way: str, dtype: torch.dtype, shape: tuple[int, ...], places: str) -> str:
    """Return what is wrong with one sum, as a clause."""
    groups = Groups(ctx.process_group, ctx.rank, ctx.world_size, ctx.device)
    group = groups.get("permuted" if "subgroup" in way else "world")
    every_rank = [_of_rank(rank, group.size(), dtype, shape, places) for rank in range(group.size())]
    expected = torch.stack([one.to_dense() for one in every_rank]).sum(0)
    tensor = every_rank[group.rank()].to(ctx.device)
    if "late" in way and ctx.rank == ctx.world_size - 1:
        time.sleep(_LATE_S)
    work = dist.all_reduce(tensor, group=group, async_op="asynchronous" in way)
    if work is not None:
        work.wait()
    groups.destroy()
    got = tensor.to_dense().cpu()
    if torch.equal(got, expected):
        return ""
    row = int((got != expected).reshape(_ROWS, -1).any(1).nonzero()[0])
    return f"row {row} of the sum is {got[row].tolist()}, expected {expected[row].tolist()}"


def _of_rank(rank: int, size: int, dtype: torch.dtype, shape: tuple[int, ...], places: str) -> Tensor:
    """Return what a rank passes: `_ROWS` rows of which it has those places."""
    rows = _PLACES[places](rank, size)
    values = 1 + 100 * rank + torch.arange(len(rows)).view(-1, *[1] * len(shape)).expand(len(rows), *shape)
    return torch.sparse_coo_tensor(torch.tensor([rows], dtype=torch.int64), values.to(dtype), (_ROWS, *shape))
