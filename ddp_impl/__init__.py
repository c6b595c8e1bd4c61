"""A complete DistributedDataParallel in readable Python: own reducer, public torch only."""

from ddp_impl.bucket import GradBucket
from ddp_impl.distributed import DistributedDataParallel
from ddp_impl.installation import install, uninstall
from ddp_impl.mixed_precision import MixedPrecision

__all__ = ["DistributedDataParallel", "GradBucket", "MixedPrecision", "install", "uninstall"]
