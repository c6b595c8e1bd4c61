"""Program `hooks_of_a_group`: what runs round each operation of a group, from torch 2.14 on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.programs.judged import Trial, always, first_wrong, judged, unlike
from conformance.programs.operations.judging import wrong_sum
from conformance.programs.rank_context import RankContext

_ROUND, _GIVEN, _WORK, _REMOVED, _APART, _ERROR = (
    "hooks round each operation", "what a pre-hook gets", "the Work that a post-hook gets", "hooks that are removed",
    "the hooks of another group", "an error of a pre-hook",
)  # fmt: skip


@dataclass
class _Hooks:
    """Hooks of a group, which note their calls."""

    group: Any
    number: int = 1
    calls: list[tuple[str, Any]] = field(default_factory=list)

    def __enter__(self) -> "_Hooks":
        self.group.register_pre_hook(self.number, lambda given: self.calls.append(("pre", given)))
        self.group.register_post_hook(self.number, lambda given: self.calls.append(("post", given)))
        return self

    def __exit__(self, *_: object) -> None:
        self.group.unregister_pre_hook(self.number)
        self.group.unregister_post_hook(self.number)

    def taken(self) -> list[tuple[str, Any]]:
        """Return the calls since the last time."""
        calls, self.calls = self.calls, []
        return calls


@judged(
    "hooks_of_a_group", always(_ROUND, _GIVEN, _WORK, _REMOVED, _APART, _ERROR),
    speaks_for={_GIVEN: ("OPT-08",), _WORK: ("OPT-08",), _ERROR: ("OPT-09",)},
)  # fmt: skip
def hooks_of_a_group(ctx: RankContext) -> Mapping[str, Trial]:
    """Register hooks with one of two groups of all ranks, and issue each operation that the backend declares."""
    group, other = dist.new_group(), dist.new_group()
    operations = {name: call for name, (needs, call) in _operations(ctx).items() if {needs} - {""} <= ctx.declared}

    def round_each() -> str:
        with _Hooks(group) as hooks, _Hooks(group, 2) as more:
            for name, call in operations.items():
                call(group)
                for one in (hooks, more):
                    calls = one.taken()
                    kinds = [(kind, given.name.name) for kind, given in calls]
                    if wrong := unlike(f"the hooks round a {name} are", kinds, [("pre", name), ("post", name)]):
                        return wrong
        return ""

    def given() -> str:
        tensor = torch.full((5,), float(ctx.rank), device=ctx.device)
        seen: list[tuple[int, list[float], int]] = []
        last = ctx.world_size - 1

        def look(given: Any) -> None:
            (one,) = given.input_tensors
            seen.append((one.data_ptr(), one.tolist(), given.root))

        group.register_pre_hook(3, look)
        dist.broadcast(tensor, last, group=group)
        group.unregister_pre_hook(3)
        return first_wrong(
            unlike(
                "places in memory, content and root of a broadcast are",
                seen,
                [(tensor.data_ptr(), [float(ctx.rank)] * 5, last)],
            ),
            unlike("after the hook the tensor is", tensor, [float(last)] * 5),
        )

    def work() -> str:
        tensor = torch.full((20_000,), float(ctx.rank + 1), device=ctx.device)
        with _Hooks(group) as hooks:
            dist.all_reduce(tensor, group=group, async_op=True)
            (_, before), (_, after) = hooks.taken()
        after.work.wait()
        total = ctx.world_size * (ctx.world_size + 1) / 2
        return first_wrong(
            unlike("the number of the operation in its post-hook is", after.op_id, before.op_id),
            unlike("wrong elements of the sum:", int((tensor != total).sum()), 0),
        )

    def removed() -> str:
        with _Hooks(group) as hooks:
            pass
        wrong = wrong_sum(group, ctx.device)
        return wrong or unlike("calls of hooks that were removed:", len(hooks.taken()), 0)

    def apart() -> str:
        with _Hooks(group) as hooks:
            wrong = wrong_sum(other, ctx.device)
        return wrong or unlike("calls for an operation of another group:", len(hooks.taken()), 0)

    def error() -> str:
        def refuse(given: Any) -> None:
            raise ValueError("not now")

        tensor = torch.full((5,), float(ctx.rank), device=ctx.device)
        group.register_pre_hook(4, refuse)
        try:
            dist.all_reduce(tensor, group=group)
            raised = ""
        except Exception as error:
            raised = str(error)
        group.unregister_pre_hook(4)
        if "not now" not in raised:
            return f"a pre-hook raised 'not now', and the operation {'raised ' + repr(raised) if raised else 'did not'}"
        return unlike("the tensor is", tensor, [float(ctx.rank)] * 5) or wrong_sum(group, ctx.device)

    return {_ROUND: round_each, _GIVEN: given, _WORK: work, _REMOVED: removed, _APART: apart, _ERROR: error}


def _operations(ctx: RankContext) -> Mapping[str, tuple[str, Callable[[Any], Any]]]:
    """Return operations by torch's name of them, each with what it needs."""

    def mine() -> Tensor:
        return torch.full((3,), float(ctx.rank), device=ctx.device)

    def room() -> list[Tensor]:
        return [mine() for _ in range(ctx.world_size)]

    is_root = ctx.rank == 0
    return {
        "ALLREDUCE": ("", lambda group: dist.all_reduce(mine(), group=group)),
        "BROADCAST": ("", lambda group: dist.broadcast(mine(), 0, group=group)),
        "ALLGATHER": ("", lambda group: dist.all_gather(room(), mine(), group=group)),
        "BARRIER": ("", lambda group: dist.barrier(group=group)),
        "REDUCE": ("reduce", lambda group: dist.reduce(mine(), 0, group=group)),
        "GATHER": ("gather_scatter", lambda group: dist.gather(mine(), room() if is_root else None, 0, group=group)),
        "SCATTER": ("gather_scatter", lambda group: dist.scatter(mine(), room() if is_root else None, 0, group=group)),
        "REDUCE_SCATTER": ("reduce_scatter", lambda group: dist.reduce_scatter(mine(), room(), group=group)),
        "ALLTOALL": ("all_to_all", lambda group: dist.all_to_all(room(), room(), group=group)),
    }
