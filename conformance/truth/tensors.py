"""Functions of `PlainDDP` on tensors: copies, layouts, the tensors of an output and their graphs."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from types import MemberDescriptorType
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack


def is_transformed(tensor: Tensor) -> bool:
    """Whether `tensor` belongs to a function transform (`torch.func`), whose backwards accumulate nothing."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def nodes_behind(output: Tensor) -> list[Any]:
    """Return the autograd nodes that a backward from `output` reaches, also after changes of `output` in place.

    Then a view gets another node, but its base keeps its own. A tensor of a transform is unwrapped.
    """
    while is_transformed(output):
        output = torch._C._functorch.get_unwrapped(output)
    tensors = (output, output._base) if output._is_view() else (output,)
    return [tensor.grad_fn for tensor in tensors if tensor is not None and tensor.grad_fn is not None]


def leads_to(tensor: Tensor, leaves: Iterable[Tensor]) -> bool:
    """Whether `tensor` was computed from one of `leaves`, as far as its graph shows."""
    wanted = set(map(id, leaves))
    waiting, seen = nodes_behind(tensor), set[Any]()
    while waiting:
        if (node := waiting.pop()) is not None and node not in seen:
            seen.add(node)
            if id(getattr(node, "variable", None)) in wanted:
                return True
            waiting += [following for following, _ in node.next_functions]
    return False


#: A block that is no part of the function transform (`torch.func`) around it.
outside_transforms = temporarily_clear_interpreter_stack


def a_copy(tensor: Tensor) -> Tensor:
    """Return a copy that is in no graph."""
    with torch.inference_mode(False):  # in that mode torch detaches no tensor that is made of others
        return tensor.detach().clone()


def laid_out(mean: Tensor, parameter: Tensor) -> Tensor:
    """Return the mean in the layout of the parameter's gradient, or else of the parameter."""
    if mean.is_sparse:
        return mean.clone()
    like = parameter if parameter.grad is None else parameter.grad
    return torch.empty_like(like, requires_grad=False).copy_(mean.detach())


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in an output: in tuples, lists, dictionaries and dataclasses, each container once.

    A container is not asked for what it holds: its own methods may hand that out once, or raise.
    """
    found, waiting, seen = list[Tensor](), [value], set[int]()
    while waiting:
        part = waiting.pop()
        if isinstance(part, Tensor):
            found.append(part)
        elif id(part) not in seen:  # a container may hold itself
            seen.add(id(part))
            waiting += reversed(_parts(part))
    return found


def _parts(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return list(dict.values(value))
    if isinstance(value, (list, tuple)):
        kind: Any = list if isinstance(value, list) else tuple
        return [kind.__getitem__(value, place) for place in range(kind.__len__(value))]
    return list(stored(value).values()) if isinstance(value, Mapping) or is_dataclass(value) else ()


def stored(value: Any) -> dict[str, Any]:
    """Return the attributes that an object holds, in its dictionary or in slots, by name; none that is not set."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type.mro(type(value)):
        for name, slot in vars(kind).items() if "__slots__" in vars(kind) else ():
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):
                    found[name] = slot.__get__(value)
    return found
