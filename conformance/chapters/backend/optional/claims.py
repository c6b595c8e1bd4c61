"""Program `claims_of_a_backend`: whether what a backend says of itself is so."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from conformance.programs.judged import Trial, always, first_wrong, judged, unlike
from conformance.programs.operations.calls import device_backend, named
from conformance.programs.operations.store_messages import all_texts
from conformance.programs.rank_context import RankContext

_NAMES = ("what it supports", "what it is called", "its options", "the stores of two groups")


@judged(
    "claims_of_a_backend", always(*_NAMES),
    speaks_for={_NAMES[0]: ("OPT-01",), _NAMES[1]: ("OPT-02",), _NAMES[2]: ("OPT-05",), _NAMES[3]: ("OPT-06",)},
)  # fmt: skip
def claims_of_a_backend(ctx: RankContext) -> Mapping[str, Trial]:
    """Ask the backends of groups of all ranks, and of one.

    One that a claim is missing from, as from a group in Python, claims nothing.
    """
    timeout = timedelta(seconds=77)
    groups: list[Any] = [dist.new_group(timeout=timeout) for _ in range(2)]
    owners: list[Any] = [device_backend(group, ctx.device) for group in groups]
    owner = owners[0]

    def supports() -> str:
        def coalesce() -> None:
            owner._start_coalescing()
            owner._end_coalescing()

        return first_wrong(
            _claimed("supports_coalescing", getattr(owner, "supports_coalescing", None), coalesce),
            _claimed("supports_tensor_alloc", _allocates(owner, ctx.device), lambda: _allocate(owner, ctx.device)),
        )

    def called() -> str:
        alone = [dist.new_group([rank]) for rank in range(ctx.world_size)][ctx.rank]
        asked = (*owners, device_backend(alone, ctx.device))
        mine = [str(named(one, "getBackendName", "_get_backend_name")()) for one in asked]
        everybody = all_texts("name", mine[0], ctx.rank, range(ctx.world_size))
        return "it has no name" if not mine[0] else unlike("names are", {*mine, *everybody}, {mine[0]})

    def options() -> str:
        held = getattr(getattr(owner, "options", None), "_timeout", timeout)
        return unlike("the timeout in its options is", held, timeout)

    def stores() -> str:
        try:
            one, other = (group.get_group_store() for group in groups)
        except (AttributeError, RuntimeError):  # a group may hand out none
            return ""
        one.set(key := f"of the first group/{ctx.rank}", "")
        return f"what is set in one is found in the other: {key!r}" if other.check([key]) else ""

    return dict(zip(_NAMES, (supports, called, options, stores), strict=True))


def _claimed(name: str, claim: bool | None, method: Any) -> str:
    """Return what is wrong with a claim about `method`, which raises where it is not supported."""
    if claim is None:
        return ""
    try:
        method()
    except Exception as error:
        return f"{name} is True, and what it speaks of raised {type(error).__name__}" if claim else ""
    return "" if claim else f"{name} is False, and what it speaks of works"


def _allocates(owner: Any, device: torch.device) -> bool | None:
    claim = getattr(owner, "supports_tensor_alloc", None)
    return None if claim is None else bool(claim(device))


def _allocate(owner: Any, device: torch.device) -> None:
    tensor = owner.allocate_tensor(5, dtype=torch.float32, device=device)
    if tensor.shape != (5,) or tensor.dtype != torch.float32:
        raise ValueError(f"allocated {tuple(tensor.shape)} {tensor.dtype}")
