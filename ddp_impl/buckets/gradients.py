"""Moving gradients into a bucket and averages out of it, batched: a few kernels per bucket, whatever it holds.

Gradients live in the parameters' `.grad`, in local shards of it, or in a context of `torch.distributed.autograd`: a
`GradientHome` each. Where they live in buckets with a large one, they move the moment they arrive (`EarlyMoves`): later
they have left the cache, and take memory beside the bucket, in which autograd could have computed the next. What has
moved is this rank's own gradient, whoever changes or replaces it, until it is divided with its bucket.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from operator import attrgetter, is_, is_not
from typing import Any, Final, Never, TypeGuard

import torch
from torch import Tensor

from ddp_impl.base.errors import ReductionError
from ddp_impl.base.messages import enumerate_names
from ddp_impl.base.nested_tensors import is_distributed, local_gradient, local_tensor, set_local_gradient
from ddp_impl.base.telemetry import Observer
from ddp_impl.buckets.bucket import Bucket, ManagedParameter, is_dense_without_overlap
from ddp_impl.torch_internals.autograd import profiler_runs, shown_to_profilers
from ddp_impl.torch_internals.tensors import (
    foreach_copy_,
    foreach_div_,
    foreach_zero_,
    is_lazy,
    num_post_accumulate_hooks,
    num_stored,
    owns_its_memory,
)

#: What profilers call the copies, as torch's DDP does: into buckets, divided by the way or not, and out of them.
COPY_IN_DIVIDED = "torch::distributed::reducer::mul_out"
COPY_IN = "torch::distributed::reducer::copy_"
_COPY_OUT = "torch.distributed.ddp.reducer::copy_bucket_to_grad"

_IS_SPARSE, _REQUIRES_GRAD, _DTYPE = map(attrgetter, ("is_sparse", "requires_grad", "dtype"))


@dataclass(frozen=True, slots=True)
class GradientHome:
    """How to `get` a parameter's gradient, to `put` another; and whether it may move into a bucket (`movable`)."""

    get: Callable[[Tensor], Tensor | None]
    put: Callable[[Tensor, Tensor], None]
    movable: bool


def _set_grad(parameter: Tensor, gradient: Tensor) -> None:
    parameter.grad = gradient


GRAD_ATTRIBUTE = GradientHome(attrgetter("grad"), _set_grad, movable=True)
LOCAL_SHARD = GradientHome(local_gradient, set_local_gradient, movable=False)


def autograd_context(context_id: int) -> GradientHome:
    """Return the home of gradients in one `torch.distributed.autograd` context, to which no gradient can be added."""
    from torch.distributed import autograd

    gradients: dict[Tensor, Tensor] = autograd.get_gradients(context_id)  # type: ignore[attr-defined]

    def put(parameter: Tensor, gradient: Tensor) -> None:
        if parameter in gradients:
            gradients[parameter].copy_(gradient)

    return GradientHome(lambda parameter: gradients.get(parameter), put, movable=False)


def frozen_in(bucket: Bucket) -> set[int]:
    """Return the indices of the parameters of `bucket` that the user has frozen: autograd brings them nothing."""
    if all(map(_REQUIRES_GRAD, bucket.parameters)):
        return set()
    return {member.index for member in bucket.members if not member.parameter.requires_grad}


def collect(
    bucket: Bucket,
    home: GradientHome,
    unused: Collection[int],
    here: str,
    *,
    divisor: int,
    left_out: Collection[int] = (),
    event: str = COPY_IN,
) -> list[int]:
    """Copy the gradients of `bucket`, divided, into its flat tensor; return the places of missing ones: they are zero.

    Gradients that live in buckets are kept out for indices in `unused`, as perhaps no rank used them, and count as
    missing in `left_out`. `here` begins errors, `event` names the copies to profilers. Raises `ReductionError` for a
    gradient that is sparse or of another dtype.
    """
    bucket.detached_from_view.clear()
    gradients = bucket.gradients = list(map(home.get, bucket.parameters))
    if bucket.holds_gradients:
        bucket.restore_views()
    if left_out:
        _leave_out(bucket, home, left_out)
    if _are_plain(gradients, bucket.members[0].layout.dtype):
        moves = bucket.holds_gradients and home.movable
        if not bucket.holds_gradients or (moves and bucket.indices.isdisjoint(unused) and _all_fit(bucket, gradients)):
            if profiler_runs():
                with shown_to_profilers(event):
                    _copy_all_in(bucket, gradients, divisor)
            else:
                _copy_all_in(bucket, gradients, divisor)
            if moves:
                for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                    parameter.grad = view
                bucket.gradients = []
            return []
    sources, targets, absent, placed = [], [], [], []
    for place, (gradient, view) in enumerate(zip(gradients, bucket.views, strict=True)):
        if gradient is None:
            absent.append(view)
            bucket.detached_from_view.append(place)
        elif gradient is not view:
            if gradient.is_sparse or gradient.dtype is not bucket.members[place].layout.dtype:
                _check_gradient(bucket.members[place], gradient, here)
            sources.append(gradient)
            targets.append(view)
            placed.append(place)
    if absent:
        foreach_zero_(absent)
    if any(gradient.requires_grad for gradient in sources):
        _warn_about_graph(bucket, here)
    divided = divisor != 1 and bucket.has_large and len(sources) + len(absent) == len(bucket.members)
    if sources:
        with shown_to_profilers(event):
            _copy_in(targets, sources, divisor if divided else 1, bucket.large_numel)
    missing = list(bucket.detached_from_view)
    if bucket.holds_gradients and home.movable:
        _move_in(bucket, placed, unused)  # before the bucket is divided: what is moved out of it is not an average
        bucket.gradients = []
    if divisor != 1 and not divided:
        bucket.flat.div_(divisor)
    return missing


def _all_fit(bucket: Bucket, gradients: list[Tensor]) -> bool:
    """Whether the bucket's views can replace all of these as they are; a few passes in C. `fits` knows more."""
    return (
        not any(map(is_, gradients, bucket.views))
        and list(map(Tensor.stride, bucket.parameters)) == bucket.strides
        and all(map(is_, map(_DTYPE, bucket.parameters), map(_DTYPE, bucket.views)))
    )


def _copy_all_in(bucket: Bucket, gradients: list[Tensor], divisor: int) -> None:
    if bucket.has_large and divisor != 1:
        _copy_in(bucket.views, gradients, divisor, bucket.large_numel)
        return
    foreach_copy_(bucket.views, gradients)
    if divisor != 1:
        bucket.flat.div_(divisor)


def _leave_out(bucket: Bucket, home: GradientHome, left_out: Collection[int]) -> None:
    for place, member in enumerate(bucket.members):
        if member.index in left_out:
            if bucket.gradients[place] is bucket.views[place]:
                home.put(member.parameter, bucket.views[place].clone())
            bucket.gradients[place] = None


def in_place(bucket: Bucket, home: GradientHome, *, divisor: int) -> Tensor | None:
    """Return the only gradient of `bucket`, divided, as a flat tensor; None where others may use its memory."""
    if not bucket.reduces_in_place or home is not GRAD_ATTRIBUTE:
        return None
    parameter = bucket.parameters[0]
    gradient = parameter.grad
    if (
        gradient is None
        or num_post_accumulate_hooks(parameter) > 1
        or not is_plain(gradient, bucket.members[0].layout.dtype)
        or gradient.stride() != bucket.members[0].layout.stride
        or not owns_its_memory(gradient)
        or is_lazy(gradient)
    ):
        return None
    bucket.detached_from_view.clear()
    flat = gradient.as_strided((gradient.numel(),), (1,))
    return flat.div_(divisor) if divisor != 1 else flat


def collect_sparse(member: ManagedParameter, home: GradientHome, here: str) -> Tensor:
    """Return a coalesced copy of a sparse gradient; an empty one where there is none."""
    gradient = home.get(member.parameter)
    if gradient is None:
        return empty_sparse(member.parameter)
    if not gradient.is_sparse:
        raise ReductionError(
            f"{here} parameter '{member.name}' belongs to an embedding with sparse=True, so a sparse gradient was "
            "expected, but a dense one came (is the weight shared with another layer, or was its .grad set?)"
        )
    return gradient.detach().coalesce().clone()


def empty_sparse(parameter: Tensor) -> Tensor:
    """Return a sparse gradient of zeros, laid out as an embedding's: sparse in the first dimension."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, device=parameter.device, is_coalesced=True)


def hand_out(bucket: Bucket, home: GradientHome, buffer: Tensor, used: Sequence[bool] | None) -> None:
    """Put the averages in `buffer` where users look for them.

    `used[i]`: any rank used parameter i (None: all are used). A parameter that no rank used keeps what it has.
    """
    if bucket.sparse:
        if used is None or used[bucket.members[0].index]:
            home.put(bucket.parameters[0], buffer)
        return
    if bucket.holds_gradients and home.movable:
        elsewhere = map(
            is_not, map(home.get, bucket.parameters), bucket.views
        )  # replaced by a hook that came late, too
        for place in {*bucket.detached_from_view, *compress(range(len(bucket.members)), elsewhere)}:
            if used is None or used[bucket.members[place].index]:
                parameter, view = bucket.parameters[place], bucket.views[place]
                parameter.grad = view if fits(view, parameter) else new_gradient(parameter, view)
        return
    if buffer is not bucket.flat:
        return  # the gradient was reduced in place
    gradients = bucket.gradients
    if used is None and all(map(is_, map(home.get, bucket.parameters), gradients)) and _are_plain(gradients):
        if profiler_runs():
            with shown_to_profilers(_COPY_OUT):
                foreach_copy_(gradients, bucket.views)
        else:
            foreach_copy_(gradients, bucket.views)
        return
    sources, targets = [], []
    gradient_of = home.get
    for member, parameter, view in zip(bucket.members, bucket.parameters, bucket.views, strict=True):
        if used is not None and not used[member.index]:
            continue
        gradient = gradient_of(parameter)
        if gradient is None or gradient.requires_grad:
            home.put(parameter, new_gradient(parameter, view))
        else:
            sources.append(view)
            targets.append(gradient)
    if targets:
        with shown_to_profilers(_COPY_OUT):
            foreach_copy_(targets, sources)


def new_gradient(parameter: Tensor, view: Tensor) -> Tensor:
    """Return the average in `view` as a tensor of its own, laid out as `parameter` is now: its data may be new."""
    if is_laid_out_as(view, parameter):
        return view.to(parameter.dtype, copy=True)
    return torch.empty_like(local_tensor(parameter)).copy_(view)


def is_laid_out_as(view: Tensor, parameter: Tensor) -> bool:
    """Whether the gradient `view` is laid out as autograd would lay out a new one of `parameter`."""
    local = local_tensor(parameter) if is_distributed(parameter) else parameter
    return view.stride() == local.stride() or not is_dense_without_overlap(local)


def fits(view: Tensor, parameter: Tensor) -> bool:
    """Whether `view` can be the gradient of `parameter`, which may have been converted since it was wrapped."""
    return view.dtype is parameter.dtype and is_laid_out_as(view, parameter)


def has_values(bucket: Bucket, buffer: Tensor, place: int) -> bool:
    """Whether the part of `buffer`, the average of `bucket`, that belongs to the member in this place is not zero."""
    return bool(num_stored(buffer) if bucket.sparse else bucket.views[place].any())


def _are_plain(gradients: list[Tensor | None], dtype: torch.dtype | None = None) -> TypeGuard[list[Tensor]]:
    """Whether all of these are there and without a graph, with `dtype` also dense and of that; a few passes in C."""
    if any(map(is_, gradients, repeat(None))) or any(map(_REQUIRES_GRAD, gradients)):
        return False
    return dtype is None or (
        not any(map(_IS_SPARSE, gradients)) and all(map(is_, map(_DTYPE, gradients), repeat(dtype)))
    )


def is_plain(gradient: Tensor, dtype: torch.dtype) -> bool:
    """Whether a gradient is dense, of this dtype and without a graph."""
    return gradient.dtype is dtype and not gradient.is_sparse and not gradient.requires_grad


def _copy_in(targets: list[Tensor], sources: list[Tensor], divisor: int, large_numel: int) -> None:
    """Copy, and divide large gradients on the way; the others, also of a narrower dtype, are divided together."""
    small_targets, small_sources = [], []
    for target, source in zip(targets, sources, strict=True):
        # One of another shape, whose parameter was given other data, would give the target that shape.
        alike = source.dtype is target.dtype and source.shape == target.shape
        if divisor != 1 and alike and source.numel() >= large_numel:
            torch.div(source, divisor, out=target)
        else:
            small_targets.append(target)
            small_sources.append(source)
    if small_targets:
        foreach_copy_(small_targets, small_sources)
        if divisor != 1:
            foreach_div_(small_targets, divisor)


def _move_in(bucket: Bucket, placed: Sequence[int], unused: Collection[int]) -> None:
    """Make the views of members in `placed` their gradients, except where these keep a tensor of their own."""
    parameters, views = bucket.parameters, bucket.views
    for place in placed:
        # A parameter that was converted since it was wrapped has gradients like it.
        misfit = not fits(views[place], parameters[place])
        if misfit or bucket.members[place].index in unused:
            bucket.detached_from_view.append(place)
        else:
            parameters[place].grad = views[place]
    if unused:
        for place, member in enumerate(bucket.members):
            if member.index in unused and member.parameter.grad is bucket.views[place]:
                member.parameter.grad = bucket.views[place].clone()
                bucket.detached_from_view.append(place)


def _check_gradient(member: ManagedParameter, gradient: Tensor, here: str) -> None:
    """Raise `ReductionError` for a gradient that a bucket cannot hold without loss."""
    dtype = member.layout.dtype
    is_own = not gradient.is_sparse and gradient.dtype is member.parameter.dtype
    if is_own and torch.promote_types(gradient.dtype, dtype) is dtype:
        return
    came = "a sparse one" if gradient.is_sparse else f"one of {gradient.dtype}"
    if gradient.is_sparse:
        remedy = "only embeddings created with sparse=True may produce sparse gradients"
    elif is_own:
        remedy = (
            f"the parameter was of {dtype} when it was wrapped, and an average would be rounded to that; convert the "
            "module before wrapping it, or wrap it anew on every rank"
        )
    else:
        remedy = f"gradients are averaged in the dtype of their parameter: leave its grad_dtype at {dtype}"
    raise ReductionError(
        f"{here} a dense gradient of {dtype} was expected for parameter '{member.name}', but {came} came; {remedy}"
    )


def _warn_about_graph(bucket: Bucket, here: str) -> None:
    if bucket.warned_about_graph:
        return
    bucket.warned_about_graph = True
    names = [m.name for m in bucket.members if m.parameter.grad is not None and m.parameter.grad.requires_grad]
    warnings.warn(
        f"{here} gradients of {enumerate_names(names)} were made with create_graph=True. DDP averages their values; "
        "the averages cannot be differentiated again.",
        stacklevel=2,
    )


class EarlyMoves(Observer):
    """Moves gradients when they arrive, where `takes[index]`. `movable`: they arrive in `.grad`."""

    def __init__(self, num_parameters: int) -> None:
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

    def backward_begins(self, *, is_first: bool) -> None:
        """Make views anew that lie elsewhere by now."""
        for bucket in self.buckets:
            bucket.restore_views()

    def move(self, index: int) -> None:
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


class NotFinal(Tensor):
    """Stands in `.grad` for a gradient that is not final, as NaN: each use of it is an error, to replace it is none."""

    why: str

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Never:
        """Raise `ReductionError`."""
        stands_in = _first_in((*args, *(kwargs or {}).values()))
        raise ReductionError(stands_in.__dict__["why"] if stands_in is not None else "a gradient is not final")


def _first_in(values: Any) -> NotFinal | None:
    for value in values:
        found = value if isinstance(value, NotFinal) else _first_in(value) if isinstance(value, (list, tuple)) else None
        if found is not None:
            return found
    return None


@dataclass(frozen=True, slots=True)
class Hidden:
    """A `parameter`, its `gradient`, None if there was none, and what stands in its place."""

    parameter: Tensor
    gradient: Tensor | None
    stands_in: NotFinal

    def reveal(self) -> None:
        """Put the gradient back, unless the user has replaced or dropped it."""
        if self.parameter.grad is self.stands_in:
            self.parameter.grad = self.gradient


def hide(parameter: Tensor, why: str) -> Hidden:
    """Put something in place of the gradient of `parameter` that answers every use with `ReductionError(why)`."""
    gradient = parameter.grad
    dtype = (parameter if gradient is None else gradient).dtype
    value = torch.full((), float("nan"), dtype=dtype, device=parameter.device)
    stands_in = value.expand(parameter.shape).as_subclass(NotFinal)
    stands_in.why = why
    parameter.grad = stands_in
    return Hidden(parameter, gradient, stands_in)
