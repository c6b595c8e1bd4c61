"""Mutants of chapter telemetry: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import DebugLevel, get_debug_level

from conformance.mutants.bases import Reducing
from ddp_impl import DistributedDataParallel, collectives
from ddp_impl.bucket import ManagedParameter
from ddp_impl.reducer import Reducer
from ddp_impl.telemetry import Moment


class StumblesOverDebugLevels(Reducing):
    """BUG: at a debug level, gradients are divided twice."""

    class OwnReducer(Reducer):
        """Debugs wrongly."""

        def _finalize(self) -> None:
            super()._finalize()
            if get_debug_level() != DebugLevel.OFF:
                for member in self.members:
                    if member.parameter.grad is not None:
                        member.parameter.grad.div_(2)


Data = dict[str, int | str]


class _Telling(DistributedDataParallel):
    """Changes the logging data."""

    def _get_ddp_logging_data(self) -> Data:
        return self.told(super()._get_ddp_logging_data())

    def told(self, data: Data) -> Data:
        """Return what is told."""
        return data


class CountsFrozenParameters(_Telling):
    """BUG: the logged number of parameters counts those that are not averaged."""

    def told(self, data: Data) -> Data:
        """Count all, and one more."""
        return {**data, "num_parameter_tensors": len(list(self.module.parameters())) + 1}


class TellsOneDictionary(_Telling):
    """BUG: the logging data are one dictionary, which changes while its reader looks at it."""

    def told(self, data: Data) -> Data:
        """Fill and return the same one."""
        self.__dict__.setdefault("kept", {}).update(data)
        kept: Data = self.__dict__["kept"]
        return kept


class CommunicatesToTell(_Telling):
    """BUG: asking for the logging data waits for the other ranks."""

    def told(self, data: Data) -> Data:
        """Ask around."""
        collectives.all_reduce_now(torch.zeros(1), self.process_group)
        return data


class TellsDefaultCaps(_Telling):
    """BUG: the logged bucket cap is the default one."""

    def told(self, data: Data) -> Data:
        """Forget the caps that were asked for."""
        return {**data, "bucket_cap_bytes": 25 * 1024 * 1024}


class TellsFirstBuckets(_Telling):
    """BUG: the logged buckets are those before they were rebuilt."""

    def told(self, data: Data) -> Data:
        """Keep what was told first."""
        first = self.__dict__.setdefault("first", data)
        names = ("bucket_sizes", "rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices")
        return {**data, **{name: first["bucket_sizes"] for name in names if name in data}}


class TellsMicroseconds(_Telling):
    """BUG: durations are told in microseconds, not in nanoseconds."""

    def told(self, data: Data) -> Data:
        """Divide durations by a thousand."""
        names = [name for name in data if name.endswith("_time") and not name.startswith("avg_")]
        return {**data, **{name: int(data[name]) // 1000 for name in names}}


class TellsLastAsAverage(_Telling):
    """BUG: averages are the times of the last step."""

    def told(self, data: Data) -> Data:
        """Take the last for the average."""
        return {**data, **{name: data[name.removeprefix("avg_")] for name in data if name.startswith("avg_")}}


class TellsNothingUnused(_Telling):
    """BUG: unused parameters are told to be of no size."""

    def told(self, data: Data) -> Data:
        """Tell zero."""
        return {**data, "unused_parameter_size": 0}


class AlwaysLooksStatic(_Telling):
    """BUG: every graph is told to be static."""

    def told(self, data: Data) -> Data:
        """Tell one."""
        return {**data, "can_set_static_graph": 1}


class TellsNoError(_Telling):
    """BUG: the logging data do not tell that there was an error."""

    def told(self, data: Data) -> Data:
        """Leave it out."""
        return {name: value for name, value in data.items() if name not in ("has_error", "error")}


class TellsWholeEnvironment(_Telling):
    """BUG: variables of other backends, and all others, are told as well."""

    def told(self, data: Data) -> Data:
        """Add the environment."""
        return {**{name.lower(): value for name, value in os.environ.items()}, "nccl_debug": "N/A", **data}


class TellsRankOfWorld(_Telling):
    """BUG: rank and world size are told of the default group, one too many."""

    def told(self, data: Data) -> Data:
        """Miscount."""
        return {**data, "world_size": dist.get_world_size() + 1}


class CountsPauses(Reducing):
    """BUG: the time between forward and backward is counted as time of backward."""

    class OwnReducer(Reducer):
        """Begins too early."""

        def prepare_for_backward(self, outputs: Iterable[Tensor]) -> None:
            """Note the time."""
            super().prepare_for_backward(outputs)
            self._prepared = Moment.now()

        def _finalize(self) -> None:
            self.telemetry.current.backward_start = self._prepared
            super()._finalize()


class SamplesEveryStep(DistributedDataParallel):
    """BUG: the sample rate is ignored: every step is sampled."""

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        super()._attach_reducer(members)
        self.reducer.telemetry.sample_rate = 1

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            raise ValueError(f"the sample rate must be at least 1, got {sample_rate}")


class TakesAnyRate(DistributedDataParallel):
    """BUG: a sample rate of zero is accepted."""

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self.reducer.telemetry.sample_rate = max(1, sample_rate)


class SaysNothingOfItsBuckets(Reducing):
    """BUG: a rebuild of buckets leaves no trace in the log."""

    class OwnReducer(Reducer):
        """Is silent."""

        def log_plan(self, what: str) -> None:
            """Do nothing."""
