"""Hooks that step parameters: the user's, on local gradients, and in-backward optimizers, on averages."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from ddp_impl.base.messages import enumerate_names
from ddp_impl.base.telemetry import Observer, Telemetry
from ddp_impl.buckets.bucket import Bucket, ManagedParameter
from ddp_impl.torch_internals.tensors import (
    in_backward_hooks,
    in_backward_optimizers,
    num_post_accumulate_hooks,
    version_of,
)


class UserHooks(Observer):
    """Watches parameters with hooks of the user's (`hooked`): an optimizer there steps on a local gradient.

    Its signs are that the gradient is gone, or that the parameter has changed when the backward ends.
    """

    def __init__(self, members: Sequence[ManagedParameter], telemetry: Telemetry) -> None:
        self._members, self._telemetry = members, telemetry
        self.hooked: list[ManagedParameter] = []
        self._versions: dict[int, int] = {}
        self._gone: set[int] = set()
        self._seen: set[int] = set()
        self._stepped: list[str] = []

    def search(self) -> None:
        """Find the parameters with more hooks than the reducer's."""
        self.hooked = [member for member in self._members if num_post_accumulate_hooks(member.parameter) > 1]

    def backward_begins(self, *, is_first: bool) -> None:
        """Remember the parameters as they are."""
        if is_first:
            self._gone, self._seen, self._stepped = set(), set(), []
        self._versions = {member.index: version_of(member.parameter) for member in self.hooked}

    def gradients_are_gone(self, indices: Collection[int]) -> None:
        """Note parameters whose gradients came and were not there any more when their bucket was full."""
        if self.hooked:
            self._gone.update(indices)

    def averages_come(self, indices: Collection[int], unused: Collection[int] = ()) -> None:
        """Look, once in an iteration, at these parameters before averages are handed out; `unused` have no gradient."""
        for member in self.hooked:
            if member.index not in indices or member.index in self._seen:
                continue
            self._seen.add(member.index)
            version = version_of(member.parameter)
            is_gone = member.parameter.grad is None and (member.index in self._gone or member.index not in unused)
            if version != self._versions.get(member.index, version) or is_gone:
                self._stepped.append(member.name)

    def backward_ended(self, unused: Collection[int], prefix: str) -> None:
        """Warn, once, of parameters that were stepped."""
        self.averages_come(range(len(self._members)), unused)
        if self._stepped:
            self._telemetry.warn_once(
                "hooks",
                f"{prefix} a hook of yours (register_post_accumulate_grad_hook) changed "
                f"{enumerate_names(self._stepped)} or "
                "took the gradient away before DDP had averaged it. An optimizer in such a hook steps on this rank's "
                "own gradient, and the parameters of the ranks drift apart. Let DDP step it, when the average is there "
                "(torch.distributed.optim._apply_optimizer_in_backward), or step after backward.",
            )


def take_over_optimizers(members: Sequence[ManagedParameter]) -> bool:
    """Whether members have in-backward optimizers; their hooks, which would step on local gradients, are removed."""
    owners = [member.parameter for member in members if in_backward_optimizers(member.parameter)]
    if not owners:
        return False
    for parameter in owners:
        for handle in in_backward_hooks(parameter):
            handle.remove()
    return True


def step_parameters(bucket: Bucket, used: Sequence[bool] | None) -> bool:
    """Step the optimizers of parameters in `bucket` that some rank `used`; return whether no gradient is left.

    Gradients are None afterwards, unless `DDP_OVERLAPPED_OPTIM_SET_GRADS_TO_NONE=0` is in the environment.
    """
    set_to_none = os.environ.get("DDP_OVERLAPPED_OPTIM_SET_GRADS_TO_NONE", "1") != "0"
    for member in bucket.members:
        parameter = member.parameter
        if parameter.grad is not None and (used is None or used[member.index]):
            for optimizer in in_backward_optimizers(parameter):
                optimizer.step()
            if set_to_none and in_backward_optimizers(parameter):
                parameter.grad = None
    return all(parameter.grad is None for parameter in bucket.parameters)
