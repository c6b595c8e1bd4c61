"""The tensors of a training: their names, whatever wraps them, and sharded ones put together from local parts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from conformance.errors import instance

#: Attributes under which a wrapper keeps the module that it wraps.
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module"}
_DEPTH = 3  # of objects and containers in which modules are looked for


class Key(NamedTuple):
    """A quantity of a training: the step from 0 on, a kind such as `gradient`, and a name."""

    step: int
    kind: str
    name: str


@dataclass(frozen=True)
class Part:
    """A rank's local part of a DTensor.

    `mesh` holds the ranks; `cuts` names the mesh dimensions over which the tensor is not whole, the outermost cut
    first, each with the tensor's dimension, or with None where the ranks' parts are to be summed.
    """

    local: Tensor
    mesh: Tensor
    cuts: tuple[tuple[int, int | None], ...]


Value = Tensor | Part | None


def snapshot(tensor: Any) -> Tensor | Part:
    """Return a copy on the CPU of a tensor, or of this rank's part of a DTensor; communicates nothing."""
    tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    if not hasattr(tensor, "placements"):
        dense: Tensor = (tensor.to_dense() if tensor.is_sparse else tensor).to("cpu", copy=True)
        return dense
    local, mesh = instance(tensor.to_local(), Tensor).to("cpu", copy=True), tensor.device_mesh.mesh.clone()
    plain: list[tuple[int, int | None]] = []
    strided: list[tuple[int, int | None]] = []  # parts of what a later mesh dimension has cut
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_replicate() or mesh.shape[mesh_dim] == 1:
            continue
        cuts = strided if type(placement).__name__ == "_StridedShard" else plain
        cuts.append((mesh_dim, getattr(placement, "dim", None)))
    return Part(local, mesh, (*plain, *strided)) if plain or strided else local


def restore(tensor: Tensor, value: Tensor) -> None:
    """Set a tensor to what `snapshot` returned of one of its shape."""
    value = torch.view_as_complex(value) if tensor.is_complex() else value
    tensor.copy_(value.to_sparse(tensor.sparse_dim()) if tensor.is_sparse else value)


def assemble(values: Sequence[Value]) -> list[Tensor | None]:
    """Return each rank's whole tensor; `values` holds by rank what `snapshot` returned there."""
    return [_whole(values, rank) if isinstance(value, Part) else value for rank, value in enumerate(values)]


def _whole(values: Sequence[Value], rank: int) -> Tensor:
    own = instance(values[rank], Part)
    mesh = own.mesh

    def joined(cuts: tuple[tuple[int, int | None], ...], place: list[int]) -> Tensor:
        if not cuts:
            value = values[int(mesh[tuple(place)])]
            return value.local if isinstance(value, Part) else torch.empty(0)
        (mesh_dim, dim), *rest = cuts
        places = [[*place[:mesh_dim], at, *place[mesh_dim + 1 :]] for at in range(mesh.shape[mesh_dim])]
        parts = [joined(tuple(rest), each) for each in places]
        return torch.stack(parts).sum(0) if dim is None else torch.cat(parts, dim)

    return joined(own.cuts, (mesh == rank).nonzero()[0].tolist())


class Names:
    """Names the parameters and buffers of all modules that a training keeps, in the order in which `make` returns them.

    Tensors of the first module have the module's own names; those of a module beside it begin with the name of the
    variable that holds it, as `ema:0.weight`. Names are looked up anew at each call, since a training may add modules.
    """

    def __init__(self, made: Mapping[str, Any]) -> None:
        self._made, parts = made, list(_parts(made, "", _DEPTH))
        self.modules = [(name, part) for name, part in parts if isinstance(part, nn.Module)]
        self._loose = [(name, part) for name, part in parts if isinstance(part, nn.Parameter)]
        self._optimizers = {id(part): name for name, part in parts if isinstance(part, torch.optim.Optimizer)}

    def parameters(self) -> dict[str, Tensor]:
        """Return all parameters by name, those of no module, too; one that several modules share is named once."""
        found = self._all("named_parameters")
        known = {id(each) for each in found.values()}
        return found | {name: each for name, each in self._loose if id(each) not in known}

    def buffers(self) -> dict[str, Tensor]:
        """Return all buffers by name, and tensors in a list or dict of a module's shapes, such as a moving average."""
        found, own, shapes = self._all("named_buffers"), {id(each) for each in self.parameters().values()}, []
        for _, module in self.modules:
            parameters, buffers = list(module.parameters()), list(module.buffers())
            trained = [each for each in parameters if each.requires_grad]
            shapes += [sorted(each.shape for each in kept) for kept in (trained, parameters, parameters + buffers)]
        for name, kept in _parts(self._made, "", _DEPTH):
            if isinstance(kept, dict) and sorted(each.shape for each in kept.values()) in shapes:
                found |= {f"{name}.{_bare(key)}": each for key, each in kept.items() if id(each) not in own}
        return found

    def optimizer(self, optimizer: torch.optim.Optimizer) -> str:
        """Return the name of the variable that holds an optimizer, or `optimizer`."""
        return self._optimizers.get(id(optimizer), "optimizer")

    def _all(self, method: str) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        known: set[int] = set()
        for at, (variable, module) in enumerate(self.modules):
            for name, tensor in getattr(module, method)():
                if id(tensor) not in known:
                    known.add(id(tensor))
                    found[f"{variable}:{_bare(name)}" if at else _bare(name)] = tensor
        return found


def _bare(name: object) -> str:
    return ".".join(part for part in str(name).split(".") if part not in _WRAPPERS)


def _parts(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the modules, optimizers, parameters, and lists and dicts of tensors (as a dict) in an object, by name."""
    if isinstance(value, nn.Module | torch.optim.Optimizer | nn.Parameter):
        yield name, value
    elif depth and not isinstance(value, Tensor | str | bytes):
        inside = value if isinstance(value, Mapping | list | tuple) else getattr(value, "__dict__", ())
        items = dict(inside.items() if isinstance(inside, Mapping) else enumerate(inside))
        if items and all(isinstance(item, Tensor) for item in items.values()):
            yield name, items
        for key, item in items.items():
            yield from _parts(item, f"{name}.{key}" if name else str(key), depth - 1)
