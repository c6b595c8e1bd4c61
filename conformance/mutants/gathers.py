"""A backend made from gloo that has `gather_single`, which gloo lacks. It has no bug: mutants are made from it."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from conformance.backends.gloo import GLOO
from conformance.mutants.relay import Relay
from conformance.mutants.spoilt import finished


class Gathers(Relay):
    """Has gloo gather, and copies into the root's tensor when every part is there."""

    def gather_single(self, output: Tensor, tensor: Tensor, options: Any) -> Any:
        """Collect every rank's tensor in one, on the root."""
        is_root = options.rootRank == self.rank()
        parts = [torch.empty_like(tensor) for _ in range(self.size())] if is_root else []
        work = finished(self.inner.gather([parts] if is_root else [], [tensor], options))
        if is_root:
            output.copy_(torch.stack(self.ordered(parts)).view_as(output))
        return work

    def ordered(self, parts: list[Tensor]) -> list[Tensor]:
        """Return the parts as they belong into the root's tensor."""
        return parts


GATHERS = dataclasses.replace(GLOO, name="gathers", capabilities=GLOO.capabilities | {"gather_single"}, create=Gathers)
