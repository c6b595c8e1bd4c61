"""`PlainDDP` over torch's process groups, of plain ranks and of real processes.

On real processes it is a DDP under test, `--ddp conformance.truth.on_processes:PlainDDP`: it must pass every chapter
about values whose truth it computes; it has none of the traffic that other chapters judge.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from conformance.errors import present
from conformance.truth import plain_ddp
from conformance.truth.backwards import Backwards
from conformance.truth.place import Place
from conformance.truth.plain_group import PlainGroup


class _RealPlace:
    """A `Place` of real processes: each sends its values to all."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def rank(self) -> int:
        return self.group.rank()

    def size(self) -> int:
        return self.group.size()

    def arrive(self, of: object, what: str, value: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Exchange at once: all processes of the group must call it in the same order."""
        brought: list[Any] = [None] * self.size()
        dist.all_gather_object(brought, value, group=self.group)
        return combine(brought)[self.rank()]

    def outcome(self, meeting: Any) -> Any:
        return meeting


#: Shared by the wrappers of a process. Plain ranks are threads of one process: each has its own at its default group.
_BACKWARDS = Backwards()


class PlainDDP(plain_ddp.PlainDDP):
    """A `PlainDDP` over a process group or over the one dimension of a mesh; the default group if neither is given."""

    def __init__(
        self, module: nn.Module, process_group: dist.ProcessGroup | None = None, device_mesh: DeviceMesh | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        world = present(dist.group.WORLD)
        group = (process_group or world) if device_mesh is None else device_mesh.get_group(mesh_dim=0)
        backwards = world.backwards if isinstance(world, PlainGroup) else _BACKWARDS
        super().__init__(module, self._place_of(group), backwards, **options)

    # Names that torch's DDP has, too; no value depends on them.

    def _set_static_graph(self) -> None:
        """Promise that every iteration is like the first: no value depends on it."""

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Choose whether outputs are copied: no value depends on it."""

    def _check_reducer_finalized(self) -> None:
        """Raise nothing: a backward is over when it returns."""

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return nothing: a plain DDP keeps no record."""
        return {}

    def _place_of(self, group: dist.ProcessGroup) -> Place:
        return group if isinstance(group, PlainGroup) else _RealPlace(group)
