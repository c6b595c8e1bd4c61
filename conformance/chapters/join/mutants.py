"""Mutants of chapter join: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from conformance.mutants.bases import Reducing
from ddp_impl.bucket import Bucket
from ddp_impl.reducer import Reducer


class IgnoresHooks(DistributedDataParallel):
    """BUG: hooks of any kind are accepted and never called."""

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Do nothing."""

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        pass

    def _register_buffer_comm_hook(self, state: Any, hook: Any, comm_hook_location: Any = None) -> None:
        pass


class JoinsByEffective(DistributedDataParallel):
    """BUG: whatever is asked for, sums are divided by the number of ranks that still have data."""

    def join_hook(self, **kwargs: Any) -> Any:
        """Ask for the effective world size."""
        return super().join_hook(**{**kwargs, "divide_by_initial_world_size": False})


class JoinsByInitial(DistributedDataParallel):
    """BUG: whatever is asked for, sums are divided by the initial world size."""

    def join_hook(self, **kwargs: Any) -> Any:
        """Ask for the initial world size."""
        return super().join_hook(**{**kwargs, "divide_by_initial_world_size": True})


class EndsWithOwnModel(DistributedDataParallel):
    """BUG: at the end of a join context every rank keeps the model that it had when it ran out of data."""

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        pass


class JoinBuffersOfRank0(DistributedDataParallel):
    """BUG: inside a join context buffers come from rank 0 although it may have joined."""

    def _find_common_rank(self, input_rank: int, rank_cond: bool) -> int:
        super()._find_common_rank(input_rank, rank_cond)
        return 0


class AlwaysJoins(DistributedDataParallel):
    """BUG: `enable=False` does not disable a join context."""

    def join(self, *args: Any, **kwargs: Any) -> Any:
        """Enable it."""
        return super().join(*args, **{**kwargs, "enable": True})


class NeverThrows(DistributedDataParallel):
    """BUG: `throw_on_early_termination` is ignored."""

    def join(self, *args: Any, **kwargs: Any) -> Any:
        """Leave it out."""
        return super().join(*args, **{**kwargs, "throw_on_early_termination": False})


class _OwnContext(DistributedDataParallel):
    """Gives `context`, a kind of `Join`, for a join context."""

    context: type[Join] = Join

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Any:
        """Return the context."""
        return self.context(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )


class _Throwing(Join):
    def __exit__(
        self, type: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(type, value, traceback)
        if self._throw_on_early_termination and type is None:
            raise RuntimeError("some rank has run out of data")


class AlwaysThrows(_OwnContext):
    """BUG: with `throw_on_early_termination` a context that ends evenly raises as well."""

    context = _Throwing


class _Swallowing(Join):
    def __exit__(
        self, type: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        super().__exit__(type, value, traceback)
        return type is not None


class SwallowsExceptions(_OwnContext):
    """BUG: an exception inside a join context does not come out of it."""

    context = _Swallowing


class LocalAfterJoin(DistributedDataParallel):
    """BUG: once a join context has been left, gradients are never synchronised again."""

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        super()._sync_final_model(is_last_joiner)
        self.require_backward_grad_sync = False


class JoinedRanksKeepFirstBuckets(DistributedDataParallel):
    """BUG: ranks that have joined do not rebuild their buckets when the others do."""

    def join_hook(self, **kwargs: Any) -> Any:
        """Return a hook that is blind to rebuilt buckets."""
        hook = super().join_hook(**kwargs)
        main_hook = hook.main_hook

        def without_rebuilding() -> None:
            reducer = self.reducer
            self.reducer = _NeverRebuilds(reducer)  # type: ignore[assignment]
            main_hook()
            self.reducer = reducer

        hook.main_hook = without_rebuilding
        return hook


class JoinsWithOldMemory(Reducing):
    """BUG: ranks without data contribute memory that nobody has written, which is zero by luck."""

    class OwnReducer(Reducer):
        """Forgets to fill what it contributes."""

        _is_idle = False

        def _contribute_zeros(self) -> None:
            self._is_idle = True
            super()._contribute_zeros()
            self._is_idle = False

        def _start(self, bucket: Bucket, buffer: Tensor) -> None:
            super()._start(bucket, torch.empty_like(buffer) if self._is_idle else buffer)


class _NeverRebuilds:
    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


class LogsNoJoin(DistributedDataParallel):
    """BUG: the logging data does not tell that a join context was used."""

    def _get_ddp_logging_data(self) -> Any:
        return {key: value for key, value in super()._get_ddp_logging_data().items() if key != "join_uneven_inputs"}


class JoinsAnyGroup(DistributedDataParallel):
    """BUG: whatever its process group, it says to a join context that it is the default group."""

    @property
    def join_process_group(self) -> Any:
        """Return the default group."""
        return dist.group.WORLD


class NoJoinable(DistributedDataParallel):
    """BUG: `join()` gives a context that does nothing, on a device that does not exist."""

    def join(self, *args: Any, **kwargs: Any) -> Any:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    @property
    def join_device(self) -> torch.device:
        """Return the device of no data."""
        return torch.device("meta")
