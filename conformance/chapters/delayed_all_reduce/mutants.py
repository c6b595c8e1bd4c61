"""Mutants of chapter delayed_all_reduce: DDPs with one bug each; `mutants.toml` names what detects it."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from conformance.mutants.bases import with_options
from conformance.mutants.patches import Call, replaces
from ddp_impl import DistributedDataParallel as Ours
from ddp_impl.buckets.bucket import Bucket, ManagedParameter
from ddp_impl.reducer.reduction import Reduction


@replaces(Ours, "attach_reducer")
def RefusesToDelayAll(ddp: Ours, attach_reducer: Call, members: Sequence[ManagedParameter]) -> None:
    """BUG: not all parameters may be delayed."""
    if all(member.name in ddp._options.delayed for member in members):
        raise ValueError("some parameter must not be delayed")
    attach_reducer(members)


@replaces(Ours, "__init__")
def DelaysNothing(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: parameters that were to be delayed are reduced with all others."""
    with with_options(delayed=frozenset()):
        init(*args, **kwargs)


@replaces(Reduction, "launch")
def LeavesDelayedLocal(reduction: Reduction, launch: Call, bucket: Bucket) -> None:
    """BUG: delayed gradients are put off for ever."""
    if not any(member.spec(reduction.options).delayed for member in bucket.members):
        launch(bucket)


@replaces(Ours, "copied_tensors")
def LeavesDelayedParametersAlone(ddp: Ours, copied_tensors: Call, with_buffers: bool) -> dict[str, dict[str, Tensor]]:
    """BUG: delayed parameters are not copied from rank 0 at construction."""
    copied: dict[str, dict[str, Tensor]] = copied_tensors(with_buffers)
    own = {name: parameter for name, parameter in copied["parameters"].items() if name not in ddp._options.delayed}
    return copied | {"parameters": own}


@replaces(Ours, "__init__")
def DelaysToTheEnd(ddp: Ours, init: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: delayed gradients wait for all others, not for that of `param_to_hook_all_reduce` alone."""
    with with_options(releases_delayed=""):
        init(*args, **kwargs)
