"""Program `registered_names`: the backend under test, registered with torch under other names."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from conformance.programs.judged import Trial, always, first_wrong, judged, unlike
from conformance.programs.rank_context import RankContext

_FIRST, _SECOND = "Conformance_First", "conformance_second"
SPELT = "new_group by each spelling of a backend's name"
SIDE_BY_SIDE = "new_group by two names at once"
ANEW = "new_group by a name that is registered anew"
_NAMES = (SPELT, SIDE_BY_SIDE, ANEW)


@judged(
    "registered_names", always(*_NAMES),
    speaks_for={SPELT: ("REG-01",), SIDE_BY_SIDE: ("REG-02",), ANEW: ("REG-05",)},
)  # fmt: skip
def registered_names(ctx: RankContext) -> Mapping[str, Trial]:
    """Register what creates the default group under two further names, with its device as a text or in a list."""
    create = dist.Backend._plugins[str(_world.pg_map[_default()][0]).upper()].creator_fn
    kind = ctx.device.type
    devices: Any = kind if ctx.arguments["devices"] == "text" else [kind]

    def spelt() -> str:
        with _registered(create, devices, _FIRST):
            clauses = []
            for name in (_FIRST, _FIRST.lower(), _FIRST.upper(), f"{kind}:{_FIRST.lower()}"):
                group = dist.new_group(backend=name)
                clauses.append(_wrong_sum(ctx, group, f"of {name}"))
                objects: list[Any] = [None] * ctx.world_size
                dist.all_gather_object(objects, {"rank": ctx.rank}, group=group)
                wanted = [{"rank": rank} for rank in range(ctx.world_size)]
                clauses.append(unlike(f"objects of {name} are", objects, wanted))
            return first_wrong(*clauses)

    def side_by_side() -> str:
        with _registered(create, devices, _FIRST, _SECOND):
            groups = [dist.new_group(backend=name) for name in (_FIRST, _SECOND)]
            tensors = [torch.full((3,), float(10 * number + ctx.rank), device=ctx.device) for number in (1, 2)]
            calls = list(zip(groups, tensors, strict=True))
            ordered = calls if ctx.rank % 2 == 0 else calls[::-1]
            works = [dist.all_reduce(tensor, group=group, async_op=True) for group, tensor in ordered]
            for work in works:
                work.wait()
            wanted = [float(sum(10 * number + rank for rank in range(ctx.world_size))) for number in (1, 2)]
            return unlike("the sums are", [tensor[0].item() for tensor in tensors], wanted)

    def anew() -> str:
        with _registered(create, devices, _FIRST):
            before = dist.new_group(backend=_FIRST)
            dist.Backend.register_backend(_FIRST, create, devices=devices)
            after = dist.new_group(backend=_FIRST)
            return first_wrong(_wrong_sum(ctx, after, "of the later group"), _wrong_sum(ctx, before, "of the earlier"))

    return dict(zip(_NAMES, (spelt, side_by_side, anew), strict=True))


def _default() -> Any:
    return dist.group.WORLD


def _wrong_sum(ctx: RankContext, group: Any, which: str) -> str:
    tensor = torch.full((3,), float(ctx.rank + 1), device=ctx.device)
    dist.all_reduce(tensor, group=group)
    return unlike(f"the sum {which} is", tensor, [float(sum(range(1, ctx.world_size + 1)))] * 3)


@contextmanager
def _registered(create: Any, devices: Any, *names: str) -> Iterator[None]:
    """Register `create` under these names, and take back afterwards what torch then knows."""
    known = dist.Backend
    tables = (known._plugins, known.backend_capability, known.backend_type_map, known.default_device_backend_map)
    before, listed = [dict(table) for table in tables], list(known.backend_list)
    try:
        for name in names:
            known.register_backend(name, create, devices=devices)
        yield
    finally:
        for table, kept in zip(tables, before, strict=True):
            table.clear()  # type: ignore[attr-defined]
            table.update(kept)  # type: ignore[attr-defined]
        known.backend_list[:] = listed
        for name in names:
            if hasattr(known, name.upper()):
                delattr(known, name.upper())
