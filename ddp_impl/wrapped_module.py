"""What DDP reads off the module it wraps: which parameters it averages, and where they are."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import is_

from torch import Tensor, nn

from ddp_impl.bucket import ManagedParameter
from ddp_impl.torch_internals import parameter_table


def managed_parameters(module: nn.Module, ignored: Collection[str]) -> list[ManagedParameter]:
    """Return the parameters that require a gradient and are not `ignored`, each once, in order of registration.

    Names are those of `named_parameters()`, so a parameter of the root module is ignored by its bare name
    (pytorch/pytorch#44826). Raises `RuntimeError` for uninitialised parameters and when there is nothing to average.
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
            if parameter.requires_grad:
                seen.add(parameter)
                members.append(ManagedParameter(len(members), name, parameter, sparse))
    if not members:
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient; "
            "use the module itself"
        )
    return members


def device_type(module: nn.Module, ignored: Collection[str]) -> str:
    """Return the one type of device that all parameters are on; raises `ValueError` when there are several."""
    types = {parameter.device.type for name, parameter in module.named_parameters() if name not in ignored}
    if len(types) != 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices; its parameters are on "
            f"{', '.join(sorted(types))}"
        )
    return types.pop()


class ParameterWatch:
    """Finds out when a module no longer uses a parameter that DDP averages.

    The reducer would wait for a gradient that goes elsewhere, and the new parameter would train on local gradients
    without an error (pytorch/pytorch#12603). The wrapper calls `check` before every synchronised forward, so it is one
    pass of comparisons in C.
    """

    def __init__(self, module: nn.Module, members: Sequence[ManagedParameter]) -> None:
        """Remember where each of `members` is kept."""
        self._module = module
        self._members = members
        self._locate()

    def check(self) -> None:
        """Raise `RuntimeError` naming the parameters that were replaced or removed since wrapping."""
        if all(map(is_, map(dict.get, self._tables, self._names), self._expected)):
            return
        present = set(self._module.parameters())
        gone = [member.name for member in self._members if member.parameter not in present]
        if gone and self._called_functionally():
            return
        if gone:
            raise RuntimeError(
                f"parameters were replaced or removed after wrapping: {', '.join(gone)}. DDP averages the gradients of "
                "the parameters that it was given; a new one would train on local gradients. Change the module before "
                "wrapping it, change values in place (parameter.data.copy_), or wrap it anew on every rank."
            )
        self._locate()  # moved within the module, by torch.nn.utils.parametrize for instance

    def _called_functionally(self) -> bool:
        """Whether plain tensors stand in for parameters, as torch.func.functional_call arranges for one call."""
        current = map(dict.get, self._tables, self._names)
        return any(isinstance(item, Tensor) and not isinstance(item, nn.Parameter) for item in current)

    def _locate(self) -> None:
        ours = {member.parameter for member in self._members}
        slots = [
            (parameter_table(owner), name, parameter)
            for owner in self._module.modules()
            for name, parameter in parameter_table(owner).items()
            if parameter is not None and parameter in ours
        ]
        self._tables = [table for table, _, _ in slots]
        self._names = [name for _, name, _ in slots]
        self._expected = [parameter for _, _, parameter in slots]
