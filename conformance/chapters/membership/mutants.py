"""Mutants of chapter membership: DDPs with one bug each; `mutants.toml` names the requirements that detect it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from conformance.mutants.bases import Reducing
from ddp_impl import DistributedDataParallel, collectives
from ddp_impl.bucket import ManagedParameter
from ddp_impl.peers import Peers
from ddp_impl.reducer import Reducer


class ResetForgetsHook(Reducing):
    """BUG: after `_update_process_group` the comm hook is not called any more."""

    class OwnReducer(Reducer):
        """Clears too much."""

        def reset(self, group: Any) -> None:
            """Take the new group and forget the hook."""
            super().reset(group)
            self.comm_hook = None


class RefusesOutsiders(DistributedDataParallel):
    """BUG: a rank that is not in the new group cannot be told so."""

    def _update_process_group(self, new_process_group: Any) -> None:
        if not isinstance(new_process_group, torch.distributed.ProcessGroup):
            raise TypeError("a process group is needed")
        super()._update_process_group(new_process_group)


class TakesAnyGroup(DistributedDataParallel):
    """BUG: `_update_process_group` accepts what is no process group, and does nothing then."""

    def _update_process_group(self, new_process_group: Any) -> None:
        with contextlib.suppress(TypeError):
            super()._update_process_group(new_process_group)


class AlarmsUnderNoSync(DistributedDataParallel):
    """BUG: `_check_reducer_finalized` raises after a backward under `no_sync`."""

    def _check_reducer_finalized(self) -> None:
        super()._check_reducer_finalized()
        if not self.require_forward_param_sync:
            raise RuntimeError("the last backward was not reduced")


class KeepsHooks(Reducing):
    """BUG: hooks stay on the parameters when they are to be removed."""

    class OwnReducer(Reducer):
        """Holds on."""

        def remove_hooks(self) -> None:
            """Do nothing."""


class ResetKeepsDivisor(Reducing):
    """BUG: after `_update_process_group` sums are divided by the size of the old group."""

    class OwnReducer(Reducer):
        """Keeps its divisor."""

        def reset(self, group: dist.ProcessGroup) -> None:
            """Take the new group and the old divisor."""
            divisor = self.divisor
            super().reset(group)
            self.divisor = divisor


class ResetKeepsIteration(Reducing):
    """BUG: `_update_process_group` takes the new group, and does not forget an unfinished backward."""

    class OwnReducer(Reducer):
        """Changes the group and nothing else."""

        def reset(self, group: dist.ProcessGroup) -> None:
            """Take the new group."""
            self.group = group
            self.divisor = dist.get_world_size(group)
            self.state.rank = dist.get_rank(group)


class ResetKeepsStorage(Reducing):
    """BUG: after `_update_process_group` buckets lie where abandoned collectives may still be writing."""

    class OwnReducer(Reducer):
        """Keeps its buckets."""

        def _begin_to_learn(self) -> None:
            if self.buckets:
                self.state.replan(len(self.buckets))
            else:
                super()._begin_to_learn()


class ResetDropsGradients(Reducing):
    """BUG: `_update_process_group` throws away what was accumulated under `no_sync`."""

    class OwnReducer(Reducer):
        """Clears too much."""

        def reset(self, group: dist.ProcessGroup) -> None:
            """Take the new group and drop gradients."""
            super().reset(group)
            for member in self.members:
                member.parameter.grad = None


class AgreesOnNewGroup(Reducing):
    """BUG: `_update_process_group` communicates, which ranks that come later do not answer."""

    class OwnReducer(Reducer):
        """Asks around."""

        def reset(self, group: dist.ProcessGroup) -> None:
            """Take the new group and tell everybody in it."""
            super().reset(group)
            collectives.all_reduce_now(torch.zeros(1), group)


class NeverUnfinished(DistributedDataParallel):
    """BUG: `_check_reducer_finalized` is always content."""

    def _check_reducer_finalized(self) -> None:
        pass


class StopsSyncingBuffers(DistributedDataParallel):
    """BUG: after `_update_process_group` buffers are not synchronised any more."""

    def _update_process_group(self, new_process_group: Any) -> None:
        super()._update_process_group(new_process_group)
        self.forward_sync_buffers = False


class SyncsBuffersAsBefore(DistributedDataParallel):
    """BUG: after `_update_process_group` each rank synchronises buffers if its own last forward asked for that."""

    def _update_process_group(self, new_process_group: Any) -> None:
        before = self.require_forward_param_sync
        super()._update_process_group(new_process_group)
        self.require_forward_param_sync = before


class _Talking(DistributedDataParallel):
    """Gives a DDP the way of talking to other ranks that a mutant defines."""

    OwnPeers: type[Peers] = Peers

    def _attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        self._peers.__class__ = self.OwnPeers
        super()._attach_reducer(members)


class FailsInSilence(_Talking):
    """BUG: a rank that raises leaves no word of it."""

    class OwnPeers(Peers):
        """Says nothing."""

        def tell(self, reason: str, *, waited: bool = False, unfinished: bool = False) -> None:
            """Do nothing."""


class LeavesTheTimeoutAlone(_Talking):
    """BUG: the error of a wait that failed is the backend's alone."""

    class OwnPeers(Peers):
        """Adds nothing."""

        @contextlib.contextmanager
        def awaiting(self, phase: str, what: str) -> Iterator[None]:
            """Run the block."""
            yield


class KnowsItsOwnBranchOnly(_Talking):
    """BUG: an error about missing gradients does not say what is missing on other ranks."""

    class OwnPeers(Peers):
        """Does not listen."""

        def exchange(self, reason: str) -> str:
            """Leave the reason."""
            self.tell(reason)
            return ""


class AsksSynchronisedForwardsOnly(Reducing):
    """BUG: whether the last reduction is complete is asked before synchronised forwards, and nowhere else."""

    class OwnReducer(Reducer):
        """Communicates without asking."""

        is_local = False

        def check_finished(self) -> None:
            """Ask outside of `no_sync`."""
            if not self.is_local:
                super().check_finished()

        @contextlib.contextmanager
        def between_backwards(self, what: str) -> Iterator[None]:
            """Wait for other ranks."""
            with self.peers.awaiting("forward", what):
                yield

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        reducer: Any = self.reducer
        reducer.is_local = not self.require_backward_grad_sync
        return super()._pre_forward(*inputs, **kwargs)


class HoldsExceptionsBack(Reducing):
    """BUG: a rank whose backward raised before its first gradient waits for the others before its user hears of it."""

    class OwnReducer(Reducer):
        """Meets them."""

        def backward_raised(self, *arguments: Any) -> None:
            """Take note, and wait."""
            super().backward_raised(*arguments)
            if self._raised_early:
                collectives.all_reduce_now(torch.zeros(1), self.group)
