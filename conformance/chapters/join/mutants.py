"""Mutants of chapter join: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

import contextlib
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from conformance.mutants.patches import Call, as_part, replaces
from ddp_impl import DistributedDataParallel as Ours
from ddp_impl.api.join import UnevenInputs
from ddp_impl.buckets.bucket import Bucket
from ddp_impl.reducer.reduction import Reduction


@replaces(TorchDDP, "register_comm_hook", "_register_builtin_comm_hook", "_register_buffer_comm_hook")
def IgnoresHooks(ddp: TorchDDP, register: Call, *args: Any, **kwargs: Any) -> None:
    """BUG: hooks of any kind are accepted and never called."""


@replaces(TorchDDP, "join_hook")
def JoinsByEffective(ddp: TorchDDP, join_hook: Call, **kwargs: Any) -> Any:
    """BUG: whatever is asked for, sums are divided by the number of ranks that still have data."""
    return join_hook(**{**kwargs, "divide_by_initial_world_size": False})


@replaces(TorchDDP, "join_hook")
def JoinsByInitial(ddp: TorchDDP, join_hook: Call, **kwargs: Any) -> Any:
    """BUG: whatever is asked for, sums are divided by the initial world size."""
    return join_hook(**{**kwargs, "divide_by_initial_world_size": True})


@replaces(TorchDDP, "_sync_final_model")
def EndsWithOwnModel(ddp: TorchDDP, sync_final_model: Call, is_last_joiner: bool) -> None:
    """BUG: at the end of a join context every rank keeps the model that it had when it ran out of data."""


@replaces(TorchDDP, "_find_common_rank")
def JoinBuffersOfRank0(ddp: TorchDDP, find_common_rank: Call, input_rank: int, rank_cond: bool) -> int:
    """BUG: inside a join context buffers are copied from rank 0 although it may have joined."""
    find_common_rank(input_rank, rank_cond)
    return 0


@replaces(TorchDDP, "join")
def AlwaysJoins(ddp: TorchDDP, join: Call, *args: Any, **kwargs: Any) -> Any:
    """BUG: `enable=False` does not disable a join context."""
    return join(*args, **{**kwargs, "enable": True})


@replaces(TorchDDP, "join")
def NeverThrows(ddp: TorchDDP, join: Call, *args: Any, **kwargs: Any) -> Any:
    """BUG: `throw_on_early_termination` is ignored."""
    return join(*args, **{**kwargs, "throw_on_early_termination": False})


class _OwnContext(TorchDDP):
    """Gives `context`, a kind of `Join`, for a join context."""

    context: type[Join] = Join

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Any:
        return self.context(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
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
    """BUG: an exception inside a join context does not leave it."""

    context = _Swallowing


@replaces(TorchDDP, "_sync_final_model")
def LocalAfterJoin(ddp: TorchDDP, sync_final_model: Call, is_last_joiner: bool) -> None:
    """BUG: once a join context has been left, gradients are never synchronised again."""
    sync_final_model(is_last_joiner)
    ddp.require_backward_grad_sync = False


@replaces(TorchDDP, "join_hook")
def JoinedRanksKeepFirstBuckets(ddp: TorchDDP, join_hook: Call, **kwargs: Any) -> Any:
    """BUG: ranks that have joined do not rebuild their buckets when the others do."""
    hook = join_hook(**kwargs)
    main_hook = hook.main_hook

    def without_rebuilding() -> None:
        reducer = ddp.reducer
        ddp.reducer = _NeverRebuilds(reducer)  # type: ignore[assignment]
        main_hook()
        ddp.reducer = reducer

    hook.main_hook = without_rebuilding
    return hook


@as_part
class JoinsWithOldMemory(Reduction):
    """BUG: ranks without data contribute memory that was never written, which is zero by luck."""

    _is_idle = False

    def send_zeros(self) -> None:
        self._is_idle = True
        super().send_zeros()
        self._is_idle = False

    def send(self, bucket: Bucket, buffer: Tensor) -> None:
        super().send(bucket, torch.empty_like(buffer) if self._is_idle else buffer)


class _NeverRebuilds:
    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


@replaces(TorchDDP, "_get_ddp_logging_data")
def LogsNoJoin(ddp: TorchDDP, get_ddp_logging_data: Call) -> Any:
    """BUG: the logging data does not report that a join context was used."""
    return {key: value for key, value in get_ddp_logging_data().items() if key != "join_uneven_inputs"}


@replaces(TorchDDP, "join_process_group")
def JoinsAnyGroup(ddp: TorchDDP, join_process_group: Call) -> Any:
    """BUG: whatever its process group, it reports the default group to a join context."""
    return dist.group.WORLD


class NoJoinable(TorchDDP):
    """BUG: `join()` gives a context that does nothing, on a device that does not exist."""

    def join(self, *args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext()

    @property
    def join_device(self) -> torch.device:
        return torch.device("meta")


class _Staying(UnevenInputs):
    def __exit__(self, *raised: Any) -> None:
        config = self._ddp._join_config
        try:
            super().__exit__(*raised)
        except RuntimeError:
            self._ddp._join_config = config
            raise


@replaces(Ours, "join")
def StaysInItsContext(ddp: Ours, join: Call, /, *args: Any, **kwargs: Any) -> UnevenInputs:
    """BUG: a rank that a context terminates early, at its end, stays in the context."""
    context: UnevenInputs = join(*args, **kwargs)
    context.__class__ = _Staying
    return context


@replaces(Ours, "divisor_in_join")
def DividesOnlyWhatAllUse(ddp: Ours, divisor_in_join: Call, num_syncing: Tensor) -> int:
    """BUG: by the number of ranks that still have data nothing is divided where ranks may leave parameters out."""
    by_effective = not ddp._divide_by_initial_world_size and ddp.find_unused_parameters
    return 1 if by_effective else divisor_in_join(num_syncing)


@replaces(TorchDDP, "join_hook")
def ClearsJoinedGradients(ddp: TorchDDP, join_hook: Call, **kwargs: Any) -> Any:
    """BUG: a rank that has run out of data loses what it had accumulated."""
    hook = join_hook(**kwargs)
    shadow = hook.main_hook

    def clear() -> None:
        ddp.zero_grad()
        shadow()

    hook.main_hook = clear
    return hook


@replaces(Ours, "join_hook")
def CopiesBuffersBehindLocalForwards(ddp: Ours, join_hook: Call, **kwargs: Any) -> Any:
    """BUG: a rank without data copies buffers before each forward, also behind one under no_sync."""
    hook = join_hook(**kwargs)
    main_hook = hook.main_hook

    def main() -> None:
        main_hook()
        ddp.require_forward_param_sync = True

    hook.main_hook = main
    return hook
