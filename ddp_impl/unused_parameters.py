"""Which parameters a forward's outputs can reach: a walk over the autograd graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge


class GraphWalk:
    """Finds the parameters that a backward from given tensors would reach.

    The nodes that accumulate into the parameters are kept alive here, so that they keep their identity.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        """Remember the accumulation node of each parameter."""
        self._num_parameters = len(parameters)
        with torch.enable_grad():
            self.nodes = [get_gradient_edge(parameter).node for parameter in parameters]
        self._index_of: dict[Node, int] = {node: index for index, node in enumerate(self.nodes)}

    def reachable(self, outputs: Iterable[Tensor]) -> set[int]:
        """Return indices of the parameters reachable from `outputs`; a parameter that is an output itself counts."""
        index_of = self._index_of
        found: set[int] = set()
        stack = [get_gradient_edge(tensor).node for tensor in outputs if tensor.requires_grad]
        seen = set(stack)
        while stack:
            node = stack.pop()
            index = index_of.get(node)
            if index is not None:
                found.add(index)
                if len(found) == self._num_parameters:
                    break
                continue
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    stack.append(following)
        return found


def find_tensors(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in `value`: containers, mappings, dataclasses, owned RRefs, and attributes of other objects.

    Looking into any object's attributes goes beyond torch, whose search stops at types it does not know and then
    reduces nothing (pytorch/pytorch#124666). Each object is visited once.
    """
    seen: set[int] = set()
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            yield item
            continue
        if item is None or isinstance(item, (str, bytes, int, float, complex, type, torch.nn.Module)):
            continue
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Mapping):
            stack.extend(reversed(list(item.values())))
        elif isinstance(item, (list, tuple, set, frozenset)):
            stack.extend(reversed(list(item)))
        elif dataclasses.is_dataclass(item):
            stack.extend(getattr(item, entry.name, None) for entry in reversed(dataclasses.fields(item)))
        elif _is_rref(item):
            if item.is_owner():
                stack.append(item.local_value())
        elif not callable(item):
            attributes = dict(getattr(item, "__dict__", {}))
            for name in getattr(type(item), "__slots__", ()):
                if isinstance(name, str) and hasattr(item, name):
                    attributes[name] = getattr(item, name)
            stack.extend(reversed(list(attributes.values())))


def _is_rref(item: object) -> bool:
    if not torch.distributed.rpc.is_available():
        return False
    from torch.distributed.rpc import RRef

    return isinstance(item, RRef)
