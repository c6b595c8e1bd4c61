"""Other projects' DDPs as subjects, with the capabilities they declare: `--ddp conformance.subjects.others:REPLICATE`.

Ranks import their libraries, which the extra `scoreboard` installs. Each adapter's module says what it adds, so that
the DDP can be called like torch's.
"""

from conformance.subjects.subject import Subject

_ADAPTERS = "conformance.subjects.adapters"

_LITTLE = frozenset({"no_sync", "sparse_gradients"})
_BUCKETS = frozenset({"bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view"})

REPLICATE = Subject("replicate", f"{_ADAPTERS}.of_torch:replicate", _LITTLE | _BUCKETS | {"comm_hook", "static_graph"})
FSDP2_REPLICATE = Subject("fsdp2-replicate", f"{_ADAPTERS}.of_torch:replicate_with_fsdp", _LITTLE)
TORCHFT = Subject("torchft", f"{_ADAPTERS}.of_torchft:managed", _LITTLE | _BUCKETS)
TORCHFT_PURE = Subject("torchft-pure", f"{_ADAPTERS}.of_torchft:pure", frozenset({"sparse_gradients"}))
FAIRSCALE = Subject("fairscale-sharded", f"{_ADAPTERS}.of_fairscale:sharded", _LITTLE)
DEEPSPEED = Subject("deepspeed-stage0", f"{_ADAPTERS}.of_deepspeed:stage_0", _LITTLE)

OTHERS = (REPLICATE, FSDP2_REPLICATE, TORCHFT, TORCHFT_PURE, FAIRSCALE, DEEPSPEED)

#: Subject name -> the distribution that contains it, if that is neither torch nor this one.
DISTRIBUTIONS = {
    TORCHFT.name: "torchft-nightly",
    TORCHFT_PURE.name: "torchft-nightly",
    FAIRSCALE.name: "fairscale",
    DEEPSPEED.name: "deepspeed",
}
