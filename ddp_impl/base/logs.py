"""Where this package logs: beneath torch's logger of its own DDP, so that torch's switches hold for both.

`TORCH_LOGS=+ddp` and `TORCH_LOGS=+distributed` print the log, `TORCH_LOGS=ddp_graphs` and `TORCH_LOGS=+dynamo` how
graphs are cut. With `TORCH_DISTRIBUTED_DEBUG=INFO` or `DETAIL`, or `TORCH_CPP_LOG_LEVEL=INFO`, which torch's C++ reads,
milestones go to stderr.
"""

from __future__ import annotations

import logging
import os
import sys

from ddp_impl.torch_internals.compile import getArtifactLogger
from ddp_impl.torch_internals.distributed import DebugLevel, get_debug_level

_NAME = "torch.nn.parallel.distributed.ddp_impl"

log = logging.getLogger(_NAME)
graph_log = getArtifactLogger(_NAME, "ddp_graphs")
#: Beneath Dynamo's logger: torch tells there how its own class cuts graphs.
dynamo_log = logging.getLogger("torch._dynamo.ddp_impl")


def milestone(message: str) -> None:
    """Log what happens once or twice in a training, such as the planning of buckets."""
    if log.isEnabledFor(logging.INFO):
        log.info(message, stacklevel=2)
    elif get_debug_level() != DebugLevel.OFF or os.environ.get("TORCH_CPP_LOG_LEVEL") == "INFO":
        print(message, file=sys.stderr, flush=True)


def log_cuts(summary: str, table: str) -> None:
    """Log how a graph is cut: the summary for users, the table of buckets for those who ask for details."""
    shown_by = log if log.isEnabledFor(logging.INFO) else dynamo_log
    shown_by.info(summary)
    shown_by.debug("buckets of the graph:\n%s", table)
    graph_log.debug("buckets of the graph\n%s", table)


def is_verbose() -> bool:
    """Whether `milestone` should hold every name."""
    return log.isEnabledFor(logging.DEBUG) or get_debug_level() == DebugLevel.DETAIL
