"""Other projects' DDPs as subjects, with the capabilities they declare: `--ddp conformance.subjects.others:REPLICATE`.

Ranks import their libraries; the extra `scoreboard` installs those that are not torch's. The module of each adapter
documents what it adds to the DDP, so that the DDP can be called like torch's.
"""

from __future__ import annotations

from conformance.subjects.subject import Subject

_ADAPTERS = "conformance.subjects.adapters"

REPLICATE = Subject(
    "replicate",
    f"{_ADAPTERS}.of_torch:replicate",
    frozenset(
        {
            "bucket_cap_mb",
            "comm_hook",
            "find_unused_parameters",
            "gradient_as_bucket_view",
            "no_sync",
            "sparse_gradients",
            "static_graph",
        }
    ),
)
FSDP2_REPLICATE = Subject(
    "fsdp2-replicate", f"{_ADAPTERS}.of_torch:replicate_with_fsdp", frozenset({"no_sync", "sparse_gradients"})
)
TORCHFT = Subject(
    "torchft",
    f"{_ADAPTERS}.of_torchft:managed",
    frozenset({"bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view", "no_sync", "sparse_gradients"}),
)
TORCHFT_PURE = Subject("torchft-pure", f"{_ADAPTERS}.of_torchft:pure", frozenset({"sparse_gradients"}))
FAIRSCALE = Subject(
    "fairscale-sharded", f"{_ADAPTERS}.of_fairscale:sharded", frozenset({"no_sync", "sparse_gradients"})
)
DEEPSPEED = Subject("deepspeed-stage0", f"{_ADAPTERS}.of_deepspeed:stage_0", frozenset({"no_sync", "sparse_gradients"}))

OTHERS = (REPLICATE, FSDP2_REPLICATE, TORCHFT, TORCHFT_PURE, FAIRSCALE, DEEPSPEED)

#: Subject name -> the distribution that contains it, if that is neither torch nor this one.
DISTRIBUTIONS = {
    TORCHFT.name: "torchft-nightly",
    TORCHFT_PURE.name: "torchft-nightly",
    FAIRSCALE.name: "fairscale",
    DEEPSPEED.name: "deepspeed",
}
