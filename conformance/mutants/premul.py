"""A backend made from gloo that has PREMUL_SUM, which gloo has not. It has no bug: mutants are made from it."""

import dataclasses
from typing import Any

from torch import Tensor

from conformance.backends.gloo import GLOO
from conformance.mutants.relay import Relay
from conformance.mutants.spoilt import SUM, reduction, with_reduction


class Multiplies(Relay):
    """Multiplies, and has gloo sum."""

    def multiplied(self, tensor: Tensor, factor: float | Tensor) -> Tensor:
        """Return what is summed in the place of `tensor`; a factor that is a tensor has one element."""
        return tensor * factor

    def allreduce(self, tensors: Any, *options: Any) -> Any:
        """Sum in place."""
        return self.inner.allreduce(*self._in_place(tensors, options))

    def allreduce_coalesced(self, tensors: Any, *options: Any) -> Any:
        """Sum in place."""
        return self.inner.allreduce_coalesced(*self._in_place(tensors, options))

    def reduce(self, tensors: Any, *options: Any) -> Any:
        """Sum on the root; on others gloo leaves parts of sums."""
        return self.inner.reduce(*self._in_place(tensors, options))

    def reduce_scatter(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        """Sum copies."""
        (given,), options = self._copies(inputs, options)
        return self.inner.reduce_scatter(outputs, [given], *options)

    def reduce_scatter_single(self, output: Any, given: Any, *options: Any) -> Any:
        """Sum a copy."""
        ((given,),), options = self._copies([[given]], options)
        return self.inner.reduce_scatter_single(output, given, *options)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        """Sum copies."""
        (inputs,), options = self._copies([inputs], options)
        return self.inner.reduce_scatter_single_coalesced(outputs, inputs, *options)

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def _copies(self, lists: Any, options: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        if reduction(options) != "PREMUL_SUM":
            return lists, options
        _, factor = options[0].reduceOp.__getstate__()  # as it is pickled: torch has no other way to read it
        copies = [[self.multiplied(one, factor) for one in tensors] for tensors in lists]
        return copies, with_reduction(options, SUM)

    def _in_place(self, tensors: Any, options: tuple[Any, ...]) -> tuple[Any, ...]:
        (products,), options = self._copies([tensors], options)
        for tensor, product in zip(tensors, products, strict=True):
            if product is not tensor:
                tensor.copy_(product)
        return tensors, *options


PREMUL = dataclasses.replace(GLOO, name="premul", capabilities=GLOO.capabilities | {"premul_sum"}, create=Multiplies)
