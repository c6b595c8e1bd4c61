"""A complete DistributedDataParallel in readable Python: own reducer, no C++."""

try:
    from ddp_impl.api.distributed import DistributedDataParallel, install, uninstall
    from ddp_impl.api.replicated_view import replicated_parameters
    from ddp_impl.buckets.bucket import GradBucket
    from ddp_impl.module.mixed_precision import MixedPrecision
    from ddp_impl.module.sync_batch_norm import SyncBatchNorm
except (AttributeError, ImportError) as error:
    from ddp_impl.torch_internals.names import explain_missing

    explain_missing(error)
    raise

__all__ = [
    "DistributedDataParallel",
    "GradBucket",
    "MixedPrecision",
    "SyncBatchNorm",
    "install",
    "replicated_parameters",
    "uninstall",
]
