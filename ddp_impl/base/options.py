"""The constructor's arguments that the reducer needs, checked once and frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

_BYTES_PER_MB = 1024 * 1024
#: More memory than there is; the number of bytes is kept in 64 bits.
_MOST_MB = 2**40
DEFAULT_CAP_MB = 25.0
DEFAULT_FIRST_CAP_BYTES = _BYTES_PER_MB
#: From how many elements on it is cheaper to divide a gradient while it is copied than to pass over the bucket again.
LARGE_NUMEL = 32_768


@dataclass(frozen=True, slots=True)
class BucketCaps:
    """How many bytes of gradients a bucket may hold: one closes when it has reached its cap.

    `per_bucket_bytes`: of bucket 0, 1, ..., the last one's for all further ones. Otherwise the first bucket closes at
    `first_bytes` and every other at `cap_bytes`. `measured`: `plan.choose_caps` may choose better ones.
    """

    first_bytes: int
    cap_bytes: int
    per_bucket_bytes: tuple[int, ...] = ()
    measured: bool = False

    def cap_of(self, bucket_index: int) -> int:
        """Return the cap in bytes of the `bucket_index`-th bucket."""
        if self.per_bucket_bytes:
            return self.per_bucket_bytes[min(bucket_index, len(self.per_bucket_bytes) - 1)]
        return self.first_bytes if bucket_index == 0 else self.cap_bytes

    @staticmethod
    def from_mb(cap_mb: float | Literal["auto"] | None, cap_mb_list: Sequence[float] | None) -> BucketCaps:
        """Build caps from arguments in MiB; raises `ValueError` below 0. With 0 each parameter has its own bucket."""
        if cap_mb == "auto":
            if cap_mb_list:
                raise ValueError('bucket_cap_mb="auto" chooses the caps that bucket_cap_mb_list gives; leave one out')
            return replace(BucketCaps.from_mb(None, None), measured=True)
        if not isinstance(cap_mb_list, (list, tuple, NoneType)):
            raise TypeError(f"bucket_cap_mb_list is a list of numbers of MiB; got {cap_mb_list!r}")
        given = [("bucket_cap_mb", cap_mb), *(("bucket_cap_mb_list", cap) for cap in cap_mb_list or ())]
        for name, cap in given:
            if cap is None and name == "bucket_cap_mb":
                continue
            if isinstance(cap, bool) or not isinstance(cap, (int, float)):
                auto = ' or "auto"' if name == "bucket_cap_mb" else ""
                raise TypeError(f"{name} is in MiB, a number{auto}; got {cap!r} ({type(cap).__name__})")
            if not 0 <= cap <= _MOST_MB:
                raise ValueError(f"{name} must be >= 0 MiB and at most {_MOST_MB}; got {cap}")
        if cap_mb_list:
            caps = tuple(int(cap * _BYTES_PER_MB) for cap in cap_mb_list)
            return BucketCaps(first_bytes=caps[0], cap_bytes=max(caps), per_bucket_bytes=caps)
        cap_bytes = int((DEFAULT_CAP_MB if cap_mb is None else cap_mb) * _BYTES_PER_MB)
        return BucketCaps(DEFAULT_FIRST_CAP_BYTES if cap_mb is None else cap_bytes, cap_bytes)


@dataclass(frozen=True, slots=True)
class ReducerOptions:
    """The part of the constructor's arguments that the reducer acts on; equal on every rank.

    `find_unused_parameters`: gradients may be missing, on some ranks or on all. `static_graph`: what happened in the
    first synchronised iteration happens in every one. `gradient_as_bucket_view`: gradients live in the buckets.
    `skip_all_reduce_unused_params`: buckets that no rank used are not communicated. `reduce_dtype`: the precision in
    which gradients travel, theirs if None. `delayed`: names of parameters whose gradients are reduced after that of the
    parameter named `releases_delayed`, after all others while the order of gradients is unknown. `large_numel`: from
    how many elements on gradients are copied and divided each by itself, or not copied at all (`gradients`).
    `lazy_bucket_allocation`: buckets have storage only while gradients are in them. `finalizes_by_hand`: averages are
    handed out when the user says so; it may change between iterations.
    """

    caps: BucketCaps
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    skip_all_reduce_unused_params: bool = False
    reduce_dtype: torch.dtype | None = None
    delayed: frozenset[str] = frozenset()
    releases_delayed: str = ""
    large_numel: int = LARGE_NUMEL
    lazy_bucket_allocation: bool = False
    finalizes_by_hand: bool = False
