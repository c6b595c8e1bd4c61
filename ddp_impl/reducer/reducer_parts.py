"""`ReducerParts`: what the parts of one reducer work with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ddp_impl.autograd.graph_search import GraphSearch
from ddp_impl.base.errors import ReductionError
from ddp_impl.base.telemetry import Telemetry
from ddp_impl.buckets.arrivals import Arrivals
from ddp_impl.buckets.bucket import Bucket, ManagedParameter
from ddp_impl.buckets.early_moves import EarlyMoves
from ddp_impl.reducer.parameter_usage import ParameterUsage
from ddp_impl.reducer.reducer_state import ReducerState


@dataclass(frozen=True, slots=True, eq=False)
class ReducerParts:
    """The objects that a reducer, its planning and its reduction of buckets share, for as long as the reducer lives.

    What may become another object is not among them: the group and its peers, the options, the iteration.
    """

    members: tuple[ManagedParameter, ...]
    device: torch.device
    state: ReducerState
    arrivals: Arrivals
    search: GraphSearch
    usage: ParameterUsage
    early_moves: EarlyMoves
    telemetry: Telemetry = field(default_factory=Telemetry)
    buckets: list[Bucket] = field(default_factory=list)

    @classmethod
    def of(cls, members: Sequence[ManagedParameter], device: torch.device, rank: int) -> ReducerParts:
        """Make them for an idle reducer of `members`, without buckets; errors name this `rank`."""
        return cls(
            members=tuple(members),
            device=device,
            state=ReducerState(rank),
            arrivals=Arrivals(len(members)),
            search=GraphSearch([member.parameter for member in members]),
            usage=ParameterUsage(len(members)),
            early_moves=EarlyMoves(len(members)),
        )

    @property
    def devices(self) -> set[torch.device]:
        """The devices of the parameters; autograd has a thread for each."""
        return {member.parameter.device for member in self.members}

    def error(self, message: str) -> ReductionError:
        """Return an error to be raised, which the logging data will tell, too."""
        return self.telemetry.logged(ReductionError(message))
