"""What this package reports of a training: its log, and for the logging data how long parts of iterations took.

The log is beneath torch's logger of its own DDP: `TORCH_LOGS=+ddp` and `+distributed` print it, `ddp_graphs` and
`+dynamo` how graphs are cut. `TORCH_DISTRIBUTED_DEBUG` or `TORCH_CPP_LOG_LEVEL=INFO` sends milestones to stderr.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, TypeVar

from ddp_impl.torch_internals.compile import getArtifactLogger
from ddp_impl.torch_internals.distributed import DebugLevel, get_debug_level

AnyError = TypeVar("AnyError", bound=Exception)

_ALWAYS_SAMPLED = 10
_ENVIRONMENT = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME",
    "GLOO_DEVICE_TRANSPORT", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_NTHREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ENABLE_TIMING", "TORCH_NCCL_DESYNC_DEBUG", "TORCH_DISTRIBUTED_DEBUG",
    "DDP_OVERLAPPED_OPTIM_SET_GRADS_TO_NONE",
)  # fmt: skip


#: Reads a clock that nobody sets, in ns: durations are of it. A C function, which is read several times in a step.
now_ns = time.perf_counter_ns
NEVER: Final = 0


class Observer:
    """Listens to the backwards of one reducer, and decides nothing."""

    def backward_begins(self, *, is_first: bool) -> None:
        """Take note that a backward begins, `is_first` of its iteration."""

    def gradient_arrived(self, index: int) -> None:
        """Take note that a gradient has arrived, in an iteration that the reducer learns from."""

    def backward_ended(self, unused: Collection[int], prefix: str) -> None:
        """Take note that averages are due; parameters in `unused` have no gradient, `prefix` begins messages."""


@dataclass(slots=True)
class IterationTimes:
    """Host times of an iteration on the clock of `now_ns`; `zero_ns`: what the wall clock shows when that is 0."""

    forward_start: int = NEVER
    backward_start: int = NEVER
    first_launch: int = NEVER
    last_launch: int = NEVER
    end: int = NEVER
    zero_ns: int = 0

    def durations_ns(self) -> dict[str, int]:
        """Return torch's four durations: forward, backward compute, communication, and the overlap of the last two."""
        return {
            "forward_compute_time": self.backward_start - self.forward_start,
            "backward_compute_time": self.last_launch - self.backward_start,
            "backward_comm_time": self.end - self.first_launch,
            "backward_compute_comm_overlap_time": max(0, self.last_launch - self.first_launch),
        }

    def on_the_wall(self, moment: int) -> int:
        """Return what the clock on the wall showed then, in ns; 0 for `NEVER`."""
        return moment and self.zero_ns + moment


@dataclass(slots=True)
class Telemetry:
    """Times of the first ten iterations and of every `sample_rate`-th after them; what users were `warned` about."""

    sample_rate: int = 100
    num_iterations: int = 0
    num_samples: int = 0
    last_index: int = 0
    num_buckets_reduced: int = 0
    joined_uneven_inputs: bool = False
    comm_hook: str = ""
    error: str = ""
    warned: set[str] = field(default_factory=set)
    current: IterationTimes = field(default_factory=IterationTimes)
    last: IterationTimes = field(default_factory=IterationTimes)
    totals_ns: dict[str, int] = field(default_factory=dict)

    def end(self) -> bool:
        """Note that all averages are handed out; return whether the iteration is one of those that are sampled."""
        self.current.end = now_ns()
        finished, self.current = self.current, IterationTimes()
        index = self.num_iterations
        self.num_iterations += 1
        is_sampled = index < _ALWAYS_SAMPLED or index % self.sample_rate == 0
        if is_sampled:
            finished.zero_ns = time.time_ns() - now_ns()
            self.last, self.last_index = finished, index
            self.num_samples += 1
            for name, duration in self.last.durations_ns().items():
                self.totals_ns[name] = self.totals_ns.get(name, 0) + duration
        return is_sampled

    def averages_ns(self) -> dict[str, int]:
        """Return the averages of torch's four durations over the sampled iterations, of which there is one at least."""
        return {f"avg_{name}": total // self.num_samples for name, total in self.totals_ns.items()}

    def warn_once(self, about: str, text: str) -> None:
        """Warn, unless somebody has been warned `about` it; in the name of the caller's caller."""
        if about not in self.warned:
            self.warned.add(about)
            warnings.warn(text, stacklevel=3)

    def logged(self, error: AnyError) -> AnyError:
        """Keep the text of `error` for the logging data, and return it to be raised."""
        self.error = str(error)
        return error

    def logging_data(self) -> dict[str, int | str]:
        """Return times under torch's keys, in ns."""
        data: dict[str, int | str] = {}
        if self.comm_hook:
            data["comm_hook"] = self.comm_hook
        if self.error:
            data |= {"has_error": 1, "error": self.error, "iteration": self.num_iterations}
        if not self.num_samples:
            return data
        data |= self.last.durations_ns()
        data |= self.averages_ns()
        data |= {
            "iteration": self.last_index,
            "forward_compute_time_start": self.last.on_the_wall(self.last.forward_start),
            "backward_compute_time_start": self.last.on_the_wall(self.last.backward_start),
            "backward_comm_time_start": self.last.on_the_wall(self.last.first_launch),
            "backward_compute_time_end": self.last.on_the_wall(self.last.last_launch),
            "backward_comm_time_end": self.last.on_the_wall(self.last.end),
        }
        return data


def environment() -> dict[str, str]:
    """Return the environment variables that matter to distributed training, `N/A` for those not set."""
    return {name: os.environ.get(name, "N/A") for name in _ENVIRONMENT}


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
