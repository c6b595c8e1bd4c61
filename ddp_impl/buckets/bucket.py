"""A bucket: one flat tensor that holds the gradients of several parameters, and what a comm hook sees of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ddp_impl.base.nested_tensors import is_distributed, local_tensor
from ddp_impl.base.options import LARGE_NUMEL, ReducerOptions
from ddp_impl.buckets.plan import BucketPlan, ParameterSpec


@dataclass(frozen=True, slots=True)
class Layout:
    """How a gradient lies in a bucket: its elements consecutive, each once, in the order that `stride` says."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor, stride: tuple[int, ...] | None = None) -> Layout:
        """Return the layout of `tensor`, or one with its shape and `stride`; row-major where that has gaps."""
        wanted = stride if stride and len(stride) == tensor.dim() else tensor.stride()
        if not _addresses_each_once(tensor.shape, wanted):
            wanted = torch.empty(tensor.shape, device="meta").stride()
        return Layout(tuple(tensor.shape), tuple(wanted), tensor.dtype)

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ManagedParameter:
    """A parameter that DDP averages: its place, name, and whether its gradient is sparse.

    `layout`: of its gradient in buckets (of a DTensor's local shard), as ranks have compared it when it was wrapped.
    """

    index: int
    name: str
    parameter: nn.Parameter
    sparse: bool = False
    layout: Layout = field(default=None)  # type: ignore[assignment]  # the parameter's now

    def __post_init__(self) -> None:
        if self.layout is None:
            object.__setattr__(self, "layout", Layout.of(local_tensor(self.parameter)))

    def spec(self, options: ReducerOptions) -> ParameterSpec:
        """Return what planning needs to know; of a DTensor, the size of its local shard."""
        parameter = self.parameter
        return ParameterSpec(
            index=self.index,
            name=self.name,
            num_bytes=self.layout.numel * parameter.element_size(),
            kind=(str(parameter.dtype), str(parameter.device), "sharded" if is_distributed(parameter) else ""),
            sparse=self.sparse,
            delayed=self.name in options.delayed,
            releases_delayed=self.name == options.releases_delayed,
        )


class Bucket:
    """Gradients of `members`, reduced together; of DTensors, a `distributed` bucket holds the local shards.

    `flat` is 1-D, of its members' elements, in `dtype` (theirs, unless reduced in another); `views[i]` has the layout
    of member i. `holds_gradients`: the parameters' `.grad` are the views; `detached_from_view`: the places of members
    whose `.grad` is not, but becomes it if some rank used the parameter. `gradients`: as they were collected, until
    averages are handed out. `has_large`: it pays to divide one while it is copied in; `reduces_in_place`: it is alone,
    and need not be copied. A sparse bucket has one member and no storage.
    """

    def __init__(
        self,
        index: int,
        members: Sequence[ManagedParameter],
        *,
        dtype: torch.dtype | None = None,
        holds_gradients: bool = False,
        large_numel: int = LARGE_NUMEL,
        lazy: bool = False,
    ) -> None:
        """Allocate zeroed storage for `members`, which all have one dtype and device; if `lazy`, at `claim`."""
        first = members[0].parameter
        self.distributed = any(is_distributed(member.parameter) for member in members)
        self.index = index
        self.members = tuple(members)
        self.indices = frozenset(member.index for member in members)
        self.parameters = [member.parameter for member in members]
        self.sparse = members[0].sparse
        self.detached_from_view: list[int] = []
        self.gradients: list[Tensor | None] = []
        self.warned_about_graph = False
        layouts = [member.layout for member in members]
        self._length = 0 if self.sparse else sum(layout.numel for layout in layouts)
        self.flat = torch.zeros(0 if lazy else self._length, dtype=dtype or first.dtype, device=first.device)
        alike = not self.sparse and not self.distributed and self.flat.dtype is first.dtype
        self.holds_gradients = holds_gradients and alike
        self.large_numel = large_numel
        self.has_large = alike and any(layout.numel >= large_numel for layout in layouts)
        is_alone = self.has_large and not self.holds_gradients and len(members) == 1
        self.reduces_in_place = is_alone and is_dense_without_overlap(first)
        self._layouts = layouts
        self.strides = [layout.stride for layout in layouts]
        self.views: list[Tensor] = [] if self.sparse or lazy else _views_of(self.flat, layouts)
        self._where = list(map(Tensor.data_ptr, self.views)) if self.holds_gradients else []
        if self.reduces_in_place:
            self.release()

    def release(self) -> None:
        """Give up the storage until the next `claim`; whoever holds a view of it keeps it alive."""
        self.flat, self.views, self._where = self.flat.new_empty(0), [], []

    def claim(self) -> None:
        """Allocate the storage again, with any values in it, if it was given up; of no elements, too."""
        if not self.views and not self.sparse:
            self.flat = self.flat.new_empty(self._length)
            self.views = _views_of(self.flat, self._layouts)
            self._where = list(map(Tensor.data_ptr, self.views)) if self.holds_gradients else []

    def restore_views(self) -> None:
        """Make views anew that lie elsewhere: to convert a module, torch gives its gradients other data, too."""
        if list(map(Tensor.data_ptr, self.views)) == self._where:
            return
        in_place = self.views_into(self.flat)
        self.views = [
            view if view.data_ptr() == where else anew
            for view, where, anew in zip(self.views, self._where, in_place, strict=True)
        ]

    def views_into(self, flat: Tensor) -> list[Tensor]:
        """Return one view per member into another flat tensor of the same length."""
        return _views_of(flat, self._layouts)

    @property
    def num_bytes(self) -> int:
        """Bytes of gradients that the bucket communicates (of the dense shape, for a sparse one)."""
        return sum(
            layout.numel * parameter.element_size()
            for layout, parameter in zip(self._layouts, self.parameters, strict=True)
        )


def allocate(
    plan: BucketPlan, members: Sequence[ManagedParameter], options: ReducerOptions, replaced: Sequence[Bucket] = ()
) -> list[Bucket]:
    """Return the buckets of `plan`; gradients that live in the `replaced` ones move into them."""
    buckets = []
    for index, indices in enumerate(plan.buckets):
        in_bucket = [members[member] for member in indices]
        floating = in_bucket[0].parameter.is_floating_point()
        dtype = options.reduce_dtype if floating else None  # complex gradients are reduced as they are
        kept, large_numel, lazy = options.gradient_as_bucket_view, options.large_numel, options.lazy_bucket_allocation
        buckets.append(Bucket(index, in_bucket, dtype=dtype, holds_gradients=kept, large_numel=large_numel, lazy=lazy))
    # The views themselves, so that they outlive their buckets: the id of a freed one may be another tensor's.
    old_views = {id(view): view for bucket in replaced for view in bucket.views}
    for bucket in buckets:
        for member, view in zip(bucket.members, bucket.views, strict=False):
            gradient = member.parameter.grad
            if gradient is not None and id(gradient) in old_views:
                with torch.no_grad():
                    view.copy_(gradient)
                member.parameter.grad = view
    return buckets


class GradBucket:
    """What a comm hook is given: the surface of `torch.distributed.GradBucket`, over one of our buckets."""

    def __init__(self, bucket: Bucket, buffer: Tensor, is_last: bool) -> None:
        self._bucket, self._buffer, self._is_last = bucket, buffer, is_last

    def index(self) -> int:
        """Return the bucket's place in launch order; 0 is launched first."""
        return self._bucket.index

    def buffer(self) -> Tensor:
        """Return the flat 1-D tensor of all gradients of the bucket, not divided by the world size."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Return one view into `buffer()` per parameter, in the order of `parameters()`."""
        if self._bucket.sparse:
            return [self._buffer]
        if self._buffer is self._bucket.flat:
            return list(self._bucket.views)
        return self._bucket.views_into(self._buffer)

    def parameters(self) -> list[Tensor]:
        """Return the parameters whose gradients are in this bucket."""
        return list(self._bucket.parameters)

    def is_last(self) -> bool:
        """Whether this is the last bucket that is launched in this iteration."""
        return self._is_last

    def set_buffer(self, tensor: Tensor) -> None:
        """Let `tensor` stand for the bucket's buffer from now on; same number of elements."""
        if tensor.numel() != self._buffer.numel():
            raise ValueError(
                f"GradBucket.set_buffer: bucket {self._bucket.index} holds {self._buffer.numel()} elements, "
                f"got {tensor.numel()}"
            )
        self._buffer = tensor


def is_dense_without_overlap(tensor: Tensor) -> bool:
    """Whether `tensor`'s strides address `numel()` consecutive elements once each, in any order of dimensions."""
    return _addresses_each_once(tensor.shape, tensor.stride())


def _addresses_each_once(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for stride, extent in sorted(zip(strides, shape, strict=True)):
        if extent == 1:
            continue
        if stride != expected:
            return False
        expected *= extent
    return True


def _views_of(flat: Tensor, layouts: Sequence[Layout]) -> list[Tensor]:
    views = []
    offset = 0
    for layout in layouts:
        # `set_` shares storage without making an autograd view: `grad.detach_()` stays legal (pytorch/pytorch#37030).
        view = torch.empty(0, dtype=flat.dtype, device=flat.device)
        view.set_(flat.untyped_storage(), flat.storage_offset() + offset, layout.shape, layout.stride)
        views.append(view)
        offset += layout.numel
    return views
