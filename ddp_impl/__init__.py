"""A complete DistributedDataParallel in readable Python: own reducer, no C++."""

from ddp_impl.bucket import GradBucket
from ddp_impl.distributed import DistributedDataParallel
from ddp_impl.installation import install, uninstall
from ddp_impl.mixed_precision import MixedPrecision
from ddp_impl.replicated_view import replicated_parameters
from ddp_impl.sync_batch_norm import SyncBatchNorm

__all__ = [
    "DistributedDataParallel",
    "GradBucket",
    "MixedPrecision",
    "SyncBatchNorm",
    "install",
    "replicated_parameters",
    "uninstall",
]
