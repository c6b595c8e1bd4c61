"""Where this package logs: beneath torch's logger of its own DDP, so that torch's switches hold for both.

`TORCH_LOGS=+ddp` and `TORCH_LOGS=+distributed` print the log, `TORCH_LOGS=ddp_graphs` how graphs are cut. With
`TORCH_DISTRIBUTED_DEBUG=INFO` or `DETAIL`, which torch's C++ reads, milestones go to stderr.
"""

from __future__ import annotations

import logging
import sys

from ddp_impl.torch_internals import DebugLevel, get_debug_level, getArtifactLogger

_NAME = "torch.nn.parallel.distributed.ddp_impl"

log = logging.getLogger(_NAME)
graph_log = getArtifactLogger(_NAME, "ddp_graphs")


def milestone(message: str) -> None:
    """Log what happens once or twice in a training, such as the planning of buckets."""
    if log.isEnabledFor(logging.INFO):
        log.info(message, stacklevel=2)
    elif get_debug_level() != DebugLevel.OFF:
        print(message, file=sys.stderr, flush=True)


def is_verbose() -> bool:
    """Whether `milestone` should hold every name."""
    return log.isEnabledFor(logging.DEBUG) or get_debug_level() == DebugLevel.DETAIL
