"""One hook per bucket in place of one per parameter: the gradient that comes last witnesses that the others came.

A hook costs several microseconds for each gradient, whatever it does. Once the order of gradients is known, the reducer
listens to the last one of each bucket alone, and looks at the others when it comes: where there was no gradient before
the backward, one that is there has come. What does not fit ends that for good, and every parameter has its hook again:
a gradient that is missing when the witness comes, gradients that were there before the backward, hooks of the user's
own. docs/decisions/witnesses.md says what is gained and which cases it took.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter, is_

from torch import Tensor

from ddp_impl.arrivals import Arrivals
from ddp_impl.autograd_hooks import AutogradHooks
from ddp_impl.bucket import Bucket, ManagedParameter
from ddp_impl.torch_internals import GRADIENT_VERSION, POST_ACCUMULATE_HOOKS

_GRADIENT = attrgetter("grad")


class Witnesses:
    """Which gradients stand for others, of which nothing is counted; none while the order of gradients is unknown."""

    def __init__(self, members: Sequence[ManagedParameter], arrivals: Arrivals, hooks: AutogradHooks) -> None:
        """Begin without witnesses."""
        self._members = members
        self._arrivals = arrivals
        self._hooks = hooks
        self._represented: list[ManagedParameter] = []
        self._unheard: list[Tensor] = []
        self._parameters = [member.parameter for member in members]
        self._began_empty = False
        self._sealed: list[tuple[Bucket, list[int]]] = []

    def appoint(self, buckets: Iterable[Bucket]) -> None:
        """Let the last gradient of each bucket, in the order in which they came on this rank, stand for the others."""
        place = {index: at for at, index in enumerate(self._arrivals.order)}
        if len(place) < len(self._members):
            return
        lasting = {max((member.index for member in bucket.members), key=place.__getitem__) for bucket in buckets}
        self._represented = [member for member in self._members if member.index not in lasting]
        self._unheard = [member.parameter for member in self._represented]
        self._arrivals.represent(member.index for member in self._represented)
        self._hooks.listen_to(lasting)

    def dismiss(self, absent: Callable[[ManagedParameter], bool] = lambda _: False) -> None:
        """Listen to every parameter again; in the present iteration await those represented that are `absent`."""
        if not self._represented:
            return
        represented, self._represented = self._represented, []
        self._hooks.listen_to(range(len(self._members)))
        self._arrivals.await_represented([member.index for member in represented if absent(member)])

    def iteration_begins(self) -> None:
        """Note, before the iteration is armed, whether gradients are left from before."""
        self._sealed.clear()
        if self._represented:
            self._began_empty = self._none_is_there()
            if any(map(POST_ACCUMULATE_HOOKS, self._unheard)):
                self.dismiss()

    def backward_begins(self) -> None:
        """Give up if what is there now may be from before this iteration: one that comes adds to it unseen."""
        if self._represented and not self._began_empty and not self._none_is_there():
            self.dismiss(lambda member: True)

    def confirm(self, bucket: Bucket) -> bool:
        """Return whether all gradients of `bucket` came, now that its witness did; if not, await those that did not."""
        if not self._represented:
            return True
        bucket.gradients = list(map(_GRADIENT, bucket.parameters))
        if not any(map(is_, bucket.gradients, repeat(None))):
            return True
        bucket.gradients = []
        self.await_absent()
        return not any(self._arrivals.due[member.index] for member in bucket.members)

    def await_absent(self) -> None:
        """Give up, and await what has not come so far."""
        self.dismiss(lambda member: member.parameter.grad is None)

    def seal(self, bucket: Bucket) -> None:
        """Remember the gradients of `bucket` as they were collected: one that came again would go unseen."""
        if self._represented and len(bucket.members) > 1:
            self._sealed.append((bucket, list(map(GRADIENT_VERSION, bucket.parameters))))

    def came_again(self) -> ManagedParameter | None:
        """Return a parameter that got another gradient after its bucket was collected, if there is one."""
        for bucket, versions in self._sealed:
            now = list(map(GRADIENT_VERSION, bucket.parameters))
            if now != versions:
                return next(m for m, old, new in zip(bucket.members, versions, now, strict=True) if old != new)
        return None

    def saw_nothing(self) -> bool:
        """Whether no gradient has come that is represented by another one."""
        return all(member.parameter.grad is None for member in self._represented)

    def _none_is_there(self) -> bool:
        return all(map(is_, map(_GRADIENT, self._parameters), repeat(None)))
