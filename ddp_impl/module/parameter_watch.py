"""Which parameters of a wrapped module DDP averages, and whether they are still those of the module.

A parameter that comes or is unfrozen later, or a tensor that stands in for one, would train on each rank's own
gradients, without an error (pytorch/pytorch#12603). What another wrapper of this process averages does not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import chain
from operator import attrgetter, is_
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable

from ddp_impl.base.messages import enumerate_names
from ddp_impl.base.nested_tensors import local_tensor, refuse_composite
from ddp_impl.buckets.bucket import Layout, ManagedParameter
from ddp_impl.torch_internals.tensors import buffer_table, child_table, ignored_names, parameter_table, tensor_in_cpp


def managed_parameters(
    module: nn.Module, ignored: Collection[str], averaged: Mapping[str, tuple[int, ...]] = MappingProxyType({})
) -> list[ManagedParameter]:
    """Return the parameters that require a gradient and are not `ignored`, each once, in order of registration.

    Names are those of `named_parameters()` (pytorch/pytorch#44826). Of a copy, those `averaged` by the original count
    though frozen, with its strides. Raises `RuntimeError` for uninitialised or composite ones, and if there are none.
    """
    members: list[ManagedParameter] = []
    seen: set[nn.Parameter] = set()
    for module_name, owner in module.named_modules():
        sparse = isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and owner.sparse
        for own_name, parameter in owner.named_parameters(recurse=False):
            name = f"{module_name}.{own_name}" if module_name else own_name
            if name in ignored or parameter in seen:
                continue
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise RuntimeError(
                    f"parameter '{name}' is uninitialized: modules with uninitialized parameters can't be used with "
                    "`DistributedDataParallel`; run one forward of the bare module (a dummy input will do) first"
                )
            if parameter.requires_grad or name in averaged:
                refuse_composite(name, parameter)
                seen.add(parameter)
                layout = Layout.of(local_tensor(parameter), averaged.get(name))
                members.append(ManagedParameter(len(members), name, parameter, sparse, layout))
    if not members:
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient; "
            "use the module itself"
        )
    return members


def first_device(module: Any) -> torch.device:
    """Return where the first parameter with values is; the CPU without one, and for what is no module."""
    parameters = module.parameters() if isinstance(module, nn.Module) else ()
    return next((parameter.device for parameter in parameters if not parameter.is_meta), torch.device("cpu"))


def device_type(module: nn.Module, ignored: Collection[str]) -> str:
    """Return the one type of device that all parameters are on; raises `ValueError` for several, and for meta."""
    named = [(name, parameter) for name, parameter in module.named_parameters() if name not in ignored]
    first_of = {parameter.device.type: name for name, parameter in reversed(named)}
    if set(first_of) == {"meta"}:
        raise ValueError(
            f"parameter '{first_of['meta']}' is on the meta device, as all are, and has no values that ranks could "
            "be given: move the module to its device (to_empty(device=...)) and initialise it before wrapping it"
        )
    if len(first_of) != 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices; its parameters are on "
            + ", ".join(f"{kind} ('{first_of[kind]}')" for kind in sorted(first_of))
        )
    return next(iter(first_of))


def refuse_expanded(module: nn.Module, ignored: Collection[str]) -> None:
    """Raise `RuntimeError` for tensors with elements that share memory: no rank could be given the first one's."""
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        layout = zip(tensor.stride(), tensor.shape, strict=True) if tensor.layout is torch.strided else ()
        if name not in ignored and any(stride == 0 and extent > 1 for stride, extent in layout):
            raise RuntimeError(
                f"'{name}' of shape {list(tensor.shape)} was made by expand(): several of its elements are one place "
                "in memory, and DDP cannot write the values of rank 0 there. Make it contiguous() before wrapping the "
                "module"
            )


_REQUIRES_GRAD = attrgetter("requires_grad")


class ParameterWatch:
    """Watches the parameters of `module`, of which DDP averages `members`; asked before every synchronised forward.

    While nothing changes, `check` makes three passes in C: over the sizes of tables, what is in them, what is frozen.
    """

    def __init__(
        self,
        module: nn.Module,
        members: Sequence[ManagedParameter],
        ignored: Collection[str],
        rank: int,
        is_averaged: Callable[[Tensor], bool] = lambda parameter: False,
    ) -> None:
        """Remember what the module consists of; errors name this `rank`. `is_averaged`: by any wrapper."""
        self.is_averaged = is_averaged
        self._module = module
        self._rank = rank
        self._members = members
        self.averaged = {member.parameter for member in members}
        self.parameters = [member.parameter for member in members]
        self.in_cpp = list(map(tensor_in_cpp, self.parameters))
        self._ignored = ignored
        self._warned = False
        # Whether removals were allowed in the last forward, if that ran with stand-ins, behind which others may be.
        self._hidden: bool | None = None
        self.remember()

    def check(self, *, allow_removed: bool = False) -> bool:
        """Return whether the module consists of other parts than before, buffers included. Warns, once, of stand-ins.

        Raises `RuntimeError` naming parameters that are not averaged, or were replaced or (unless allowed) removed.
        """
        self._hidden = None
        if list(map(tensor_in_cpp, self.parameters)) != self.in_cpp:
            raise RuntimeError(_swapped(self._swapped_names(), self._rank))
        if (
            list(map(len, self._tables)) == self._sizes
            and all(map(is_, chain.from_iterable(map(dict.values, self._filled)), self._contents))
            and not any(map(_REQUIRES_GRAD, self._frozen))
        ):
            return False
        present = dict(self._module.named_parameters())
        stand_ins: dict[str, Tensor] = {
            name: tensor for name, tensor in present.items() if not isinstance(tensor, nn.Parameter)
        }
        strangers = [name for name, parameter in present.items() if self.is_stranger(name, parameter)]
        held = set(present.values())
        gone = [member.name for member in self._members if member.parameter not in held]
        stand_ins.update(self.computed(gone))
        gone = [name for name in gone if name not in stand_ins]
        if allow_removed:
            gone = [name for name in gone if self.is_replaced(name, present)]
        if strangers or gone:
            raise RuntimeError(_changed(self._rank, gone, strangers))
        if stand_ins:
            self.warn_about(stand_ins)
            self._hidden = allow_removed
            return False  # they are there for one call
        self.remember()  # moved within the module, by torch.nn.utils.parametrize for instance, or without a gradient
        return True

    def _swapped_names(self) -> list[str]:
        now = map(tensor_in_cpp, self.parameters)
        return [
            member.name
            for member, before, after in zip(self._members, self.in_cpp, now, strict=True)
            if before != after
        ]

    def check_hidden(self) -> None:
        """Do what `check` does if the last one saw stand-ins only, which are gone now, before a backward or a copy."""
        if self._hidden is not None:
            self.check(allow_removed=self._hidden)

    def is_stranger(self, name: str, parameter: Tensor) -> bool:
        """Whether the parameter would train on local gradients: no wrapper averages it, and nobody ignores it."""
        return (
            isinstance(parameter, nn.Parameter)
            and parameter.requires_grad
            and parameter not in self.averaged
            and name not in self._ignored
            and name not in ignored_names(self._module)
            and not self._is_averaged_inside(name)
            and not self.is_averaged(parameter)
        )

    def is_replaced(self, name: str, present: Mapping[str, Tensor]) -> bool:
        """Whether another parameter has come in this one's place: ranks that have frozen it would say nothing of it."""
        return name in present and present[name] not in self.averaged

    def computed(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the computed tensors, plain attributes, that tensor parallelism leaves in place of these."""
        found: dict[str, Any] = {name: reduce(_part_of, name.split("."), self._module) for name in names}
        return {name: value for name, value in found.items() if isinstance(value, Tensor) and not value.is_leaf}

    def _is_averaged_inside(self, name: str) -> bool:
        """Whether the parameter belongs to a DDP that came into this module after it was wrapped."""
        owner = self._module
        for step in name.split(".")[:-1]:
            owner = getattr(owner, step)
            if isinstance(owner, Joinable):
                return True
        return False

    def warn_about(self, stand_ins: Mapping[str, Tensor]) -> None:
        """Warn of tensors that keep their gradients; those that were computed pass them on, to parameters perhaps."""
        keep = [name for name, tensor in stand_ins.items() if tensor.is_leaf and tensor.requires_grad]
        if keep and not self._warned:
            self._warned = True
            warnings.warn(
                f"other tensors stand in for the parameters {enumerate_names(keep)} (torch.func.functional_call). "
                "Their gradients stay local to each rank: DDP averages those of the module's own parameters only. "
                "Compute the tensors from the parameters, or average their gradients yourself.",
                stacklevel=2,
            )

    def remember(self) -> None:
        """Take what the module consists of now for what it is to consist of."""
        contents = list(_tables(self._module, parameter_table, child_table))
        self._tables = [*contents, *_tables(self._module, buffer_table)]  # of buffers it matters whether there are any
        self._sizes = [len(table) for table in self._tables]
        self._filled = [table for table in contents if table]
        self._contents = [entry for table in self._filled for entry in table.values()]
        self._frozen = [parameter for parameter in self._module.parameters() if not parameter.requires_grad]
        self._frozen = [parameter for parameter in self._frozen if parameter not in self.averaged]


def _tables(module: nn.Module, *kinds: Callable[[nn.Module], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for owner in module.modules():
        for kind in kinds:
            table = kind(owner)
            if isinstance(table, dict):  # TorchScript has other tables, and modules that it compiled stay as they are
                yield table


def _swapped(names: Sequence[str], rank: int) -> str:
    """Return the message for parameters whose tensors in C++ are others, without the hooks of before."""
    return (
        f"[rank {rank}] parameters were swapped for others after wrapping: {enumerate_names(names)} "
        "(torch.utils.swap_tensors, or a conversion of the module with set_swap_module_params_on_conversion(True)). "
        "Their gradients would not come to DDP. Convert the module before wrapping it, or wrap it anew on every rank."
    )


def _changed(rank: int, gone: Sequence[str], strangers: Sequence[str]) -> str:
    """Return the message for parameters that the module has lost, and for those that DDP does not know."""
    lines = []
    if gone:
        lines.append(f"parameters were replaced or removed after wrapping: {enumerate_names(gone)}.")
    if strangers:
        lines.append(
            f"DDP does not average parameters that require a gradient: {enumerate_names(strangers)}. They came into "
            "the module, or were unfrozen, after wrapping, and would train on local gradients."
        )
    lines.append(
        "- Change the module before wrapping it, or wrap it anew on every rank; or change values in place "
        "(parameter.data.copy_)."
    )
    if strangers:
        lines += [
            "- Parameters that are to be trained later: wrap them while they require a gradient, and freeze them then.",
            "- Parameters that are not to be trained: call requires_grad_(False).",
            "- Parameters that another DistributedDataParallel averages: build that one before the next forward.",
            "- Parameters that each rank is to train alone: name them, before wrapping, in "
            "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names).",
        ]
    return f"[rank {rank}] " + "\n".join(lines)


def _part_of(whole: Any, name: str) -> Any:
    return getattr(whole, name, None)
