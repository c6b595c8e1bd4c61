"""Mutants of chapter membership: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from conformance.mutants.patches import Call, as_part, replaces
from ddp_impl import DistributedDataParallel as Ours
from ddp_impl.base.messages import FailureReport
from ddp_impl.buckets.bucket import Bucket
from ddp_impl.reducer.iteration import Iteration
from ddp_impl.reducer.reducer import Reducer
from ddp_impl.reducer.reduction import Reduction
from ddp_impl.wire import collectives
from ddp_impl.wire.peers import Peers


@replaces(Reducer, "reset")
def ResetForgetsHook(reducer: Reducer, reset: Call, group: Any) -> None:
    """BUG: after `_update_process_group` the comm hook is not called any more."""
    reset(group)
    reducer.reduction.comm_hook = None


@replaces(Ours, "_update_process_group")
def RefusesOutsiders(ddp: Ours, update_process_group: Call, new_process_group: Any) -> None:
    """BUG: a rank that is not in the new group cannot be given its placeholder."""
    if not isinstance(new_process_group, torch.distributed.ProcessGroup):
        raise TypeError("a process group is needed")
    update_process_group(new_process_group)


@replaces(Ours, "_update_process_group")
def TakesAnyGroup(ddp: Ours, update_process_group: Call, new_process_group: Any) -> None:
    """BUG: `_update_process_group` accepts what is no process group, and does nothing then."""
    with contextlib.suppress(TypeError):
        update_process_group(new_process_group)


@replaces(Ours, "_check_reducer_finalized")
def AlarmsUnderNoSync(ddp: Ours, check_reducer_finalized: Call) -> None:
    """BUG: `_check_reducer_finalized` raises after a backward under `no_sync`."""
    check_reducer_finalized()
    if not ddp.require_forward_param_sync:
        raise RuntimeError("the last backward was not reduced")


@replaces(Reducer, "remove_hooks")
def KeepsHooks(reducer: Reducer, remove_hooks: Call) -> None:
    """BUG: hooks stay on the parameters when they are to be removed."""


@replaces(Reducer, "reset")
def ResetKeepsDivisor(reducer: Reducer, reset: Call, group: dist.ProcessGroup) -> None:
    """BUG: after `_update_process_group` sums are divided by the size of the old group."""
    divisor = reducer.reduction.divisor
    reset(group)
    reducer.reduction.divisor = divisor


@replaces(Reducer, "reset")
def ResetKeepsIteration(reducer: Reducer, reset: Call, group: dist.ProcessGroup) -> None:
    """BUG: `_update_process_group` takes the new group, and does not forget an unfinished backward."""
    reducer.reduction.group = group
    reducer.reduction.divisor = dist.get_world_size(group)
    reducer.reduction.rank = dist.get_rank(group)


@replaces(Reducer, "reset")
def ResetKeepsStorage(reducer: Reducer, reset: Call, group: dist.ProcessGroup) -> None:
    """BUG: after `_update_process_group` buckets lie where abandoned collectives may still be writing."""
    with mock.patch.object(reducer.planning, "begin_to_learn"):
        reset(group)
    reducer.reduction.iteration = Iteration(reducer.reduction.rank, launch_order=range(len(reducer.buckets)))


@replaces(Reducer, "reset")
def ResetDropsGradients(reducer: Reducer, reset: Call, group: dist.ProcessGroup) -> None:
    """BUG: `_update_process_group` throws away what was accumulated under `no_sync`."""
    reset(group)
    for member in reducer.members:
        member.parameter.grad = None


@replaces(Reducer, "reset")
def AgreesOnNewGroup(reducer: Reducer, reset: Call, group: dist.ProcessGroup) -> None:
    """BUG: `_update_process_group` communicates, which ranks that arrive later do not answer."""
    reset(group)
    collectives.all_reduce_now(torch.zeros(1), group)


@replaces(Ours, "_check_reducer_finalized")
def NeverUnfinished(ddp: Ours, check_reducer_finalized: Call) -> None:
    """BUG: `_check_reducer_finalized` is always content."""


@replaces(Ours, "_update_process_group")
def StopsSyncingBuffers(ddp: Ours, update_process_group: Call, new_process_group: Any) -> None:
    """BUG: after `_update_process_group` buffers are not synchronised any more."""
    update_process_group(new_process_group)
    ddp.forward_sync_buffers = False


@replaces(Ours, "_update_process_group")
def SyncsBuffersAsBefore(ddp: Ours, update_process_group: Call, new_process_group: Any) -> None:
    """BUG: after `_update_process_group` each rank synchronises buffers if its own last forward asked for that."""
    before = ddp.require_forward_param_sync
    update_process_group(new_process_group)
    ddp.require_forward_param_sync = before


@replaces(Peers, "publish")
def FailsInSilence(peers: Peers, tell: Call, reason: str, **_: bool) -> None:
    """BUG: a rank that raises leaves no word of it."""


@replaces(Peers, "key_of")
def ReportsByTheHour(peers: Peers, key_of: Call, about: str) -> str:
    """BUG: ranks leave reports under the hour of their own clocks, and find none of a rank whose clock differs."""
    return f"{key_of(about)}/{int(time.time() // 3600)}"


@replaces(Peers, "reports")
def HearsOfItsOwnStepOnly(peers: Peers, reports: Call, **options: bool) -> list[FailureReport]:
    """BUG: a rank that waits in vain takes what another reported on the step before for something that is over."""
    return [each for each in reports(**options) or () if each.step >= peers.step]


@replaces(Peers, "why_lost")
def KnowsItsOwnFailureOnly(peers: Peers, why_lost: Call) -> str:
    """BUG: a wrapper goes on in a group in which the backward of another wrapper has broken off on this rank."""
    return peers.lost


@replaces(Peers, "awaiting")
@contextlib.contextmanager
def LeavesTheTimeoutAlone(peers: Peers, awaiting: Call, phase: str, what: str) -> Iterator[None]:
    """BUG: the error of a wait that failed is the backend's alone."""
    yield


@replaces(Reduction, "wait")
def WaitsForAFutureForEver(reduction: Reduction, wait: Call, bucket: Bucket) -> torch.Tensor:
    """BUG: the future that a comm hook has returned is waited for without bound, and hangs where it is never done."""
    _, pending = reduction.iteration.in_flight[bucket.index]
    if isinstance(pending, torch.futures.Future):
        pending.wait()
    reduced: torch.Tensor = wait(bucket)
    return reduced


@replaces(Peers, "exchange")
def KnowsItsOwnBranchOnly(peers: Peers, exchange: Call, reason: str) -> str:
    """BUG: an error about missing gradients does not say what is missing on other ranks."""
    peers.publish(reason)
    return ""


class _AsksUnlessLocal(Reducer):
    is_local = False

    def check_finished(self) -> None:
        if not self.is_local:
            super().check_finished()

    @contextlib.contextmanager
    def between_backwards(self, what: str) -> Iterator[None]:
        with self.peers.awaiting("forward", what):
            yield


@replaces(as_part(_AsksUnlessLocal), "_pre_forward")
def AsksSynchronisedForwardsOnly(ddp: Any, pre_forward: Call, /, *inputs: Any, **kwargs: Any) -> Any:
    """BUG: whether the last reduction is complete is asked before synchronised forwards, and nowhere else."""
    ddp.reducer.is_local = not ddp.require_backward_grad_sync
    return pre_forward(*inputs, **kwargs)


@replaces(Reducer, "backward_raised")
def HoldsExceptionsBack(reducer: Reducer, backward_raised: Call, *arguments: Any) -> None:
    """BUG: a rank whose backward raised before its first gradient waits for the others before it raises."""
    backward_raised(*arguments)
    if reducer.raised_early:
        collectives.all_reduce_now(torch.zeros(1), reducer.group)
