"""A complete DistributedDataParallel in readable Python: own reducer, no C++."""

from ddp_impl.torch_internals.names import explain_missing

try:
    from ddp_impl.api.distributed import DistributedDataParallel, install, uninstall
    from ddp_impl.api.replicated_view import replicated_parameters
    from ddp_impl.buckets.bucket import GradBucket
    from ddp_impl.module.mixed_precision import MixedPrecision
    from ddp_impl.module.sync_batch_norm import SyncBatchNorm
except (AttributeError, ImportError) as error:
    explain_missing(error)
    raise
explain_missing(None)  # also of what is only looked up in some trainings

__all__ = [
    "DistributedDataParallel",
    "GradBucket",
    "MixedPrecision",
    "SyncBatchNorm",
    "install",
    "replicated_parameters",
    "uninstall",
]
