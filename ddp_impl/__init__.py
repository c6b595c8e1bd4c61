"""A complete DistributedDataParallel in readable Python: own reducer, public torch only."""

from ddp_impl.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
