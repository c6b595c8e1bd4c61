"""Moves large gradients into their buckets the moment they come, where gradients live in buckets.

A gradient that stays where autograd has put it until its bucket is full has left the cache by then, and takes memory
beside the bucket for so long. Autograd computes the next one in the memory that the moved one has left. Small gradients
of such a bucket move as well: one that stays behind takes a piece of that memory, and the next large one does not fit.

What has moved is still this rank's own gradient, whoever looks at it, changes it or puts another one in its place: it
is divided with its bucket, when that is launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ddp_impl.buckets.bucket import Bucket
from ddp_impl.buckets.gradients import COPY_IN, fits, is_plain
from ddp_impl.torch_internals.autograd import shown_to_profilers
from ddp_impl.torch_internals.tensors import num_post_accumulate_hooks


class EarlyMoves:
    """Moves the gradients of some buckets when they come.

    `takes[index]`: whether `came(index)` is to be called when the last gradient of a parameter has come in a backward.
    The list keeps its identity: hooks hold on to it. `movable`: gradients come into `.grad`, and not into a context of
    torch.distributed.autograd, which leaves `.grad` alone.
    """

    def __init__(self, num_parameters: int) -> None:
        """Move nothing; `regroup` must follow."""
        self.takes: Final = [False] * num_parameters
        self.movable = True
        self._places: dict[int, tuple[Bucket, int]] = {}
        self.buckets: list[Bucket] = []

    def regroup(self, buckets: Sequence[Bucket]) -> None:
        """Move into these buckets from now on: on a CPU, into those with a large gradient."""
        self.buckets = [
            bucket
            for bucket in buckets
            if bucket.holds_gradients and bucket.has_large and bucket.flat.device.type == "cpu"
        ]
        self._places = {
            member.index: (bucket, place) for bucket in self.buckets for place, member in enumerate(bucket.members)
        }
        self.takes[:] = [index in self._places for index in range(len(self.takes))]

    def begin(self) -> None:
        """Begin a backward."""
        for bucket in self.buckets:
            bucket.restore_views()

    def came(self, index: int) -> None:
        """Move the gradient of a parameter into its bucket, unless that is not so simple: `collect` finds it then."""
        bucket, place = self._places[index]
        parameter = bucket.parameters[place]
        if not self.movable or num_post_accumulate_hooks(parameter) > 1:  # the user's, who may keep what it has seen
            return
        bucket.claim()
        gradient, view = parameter.grad, bucket.views[place]
        if gradient is None or gradient is view or not is_plain(gradient, view.dtype) or not fits(view, parameter):
            return
        with shown_to_profilers(COPY_IN):
            view.copy_(gradient)
        parameter.grad = view
