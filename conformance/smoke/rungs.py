"""The rungs of the smoke ladder, in order: what each checks, and what to do when it breaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.scenario import Scenario, Step


@dataclass(frozen=True, slots=True)
class Rung:
    """One check of a backend, by one program that every rank runs.

    `asks` states what must be true, `advice` what to look at if it is not. `capability` is the one that a backend
    declares for it; if it is empty, every DDP needs the rung.
    """

    name: str
    asks: str
    advice: str
    program: str
    capability: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def scenario(self, world_size: int, deadline_s: float) -> Scenario:
        """Return what the ranks run."""
        return Scenario(
            f"smoke/{self.name}", ("SMOKE",), self.program, "mlp", world_size, arguments=self.arguments,
            min_collectives=0, deadline_s=deadline_s, schedule=(Step(),),
        )  # fmt: skip


def _dtype(name: str) -> Rung:
    return Rung(
        f"all_reduce {name}",
        f"a sum of {name} tensors is exact",
        f"Sum in {name}, or leave {name} out of the capabilities.",
        "smoke_all_reduce_dtype",
        capability=name,
        arguments={"dtype": name},
    )


COLLECTIVES: tuple[Rung, ...] = (
    Rung(
        "broadcast",
        "every rank gets what the root has",
        "In broadcast, the root sends its tensor and every other rank receives into the tensor that it passed; the root"
        " is opts.rootRank.",
        "smoke_broadcast",
    ),
    Rung(
        "all_reduce",
        "every rank gets the sum of what all ranks pass, in place",
        "In allreduce, every rank's tensor must end up with the same sum, written into the tensor that was passed.",
        "smoke_all_reduce",
    ),
    Rung(
        "all_reduce max/min",
        "all_reduce honours reductions other than SUM",
        "In allreduce, look at opts.reduceOp: joining uneven inputs needs MAX.",
        "smoke_all_reduce_extrema",
    ),
    Rung(
        "all_reduce avg",
        "AVG is the sum divided by the world size",
        "In allreduce, divide by the world size after summing when opts.reduceOp is AVG, or leave avg out of the"
        " capabilities.",
        "smoke_all_reduce_avg",
        capability="avg",
    ),
    Rung(
        "all_gather",
        "every rank gets every rank's tensor, by rank",
        "In allgather, slot r of the output list belongs to rank r, on every rank.",
        "smoke_all_gather",
    ),
    Rung(
        "all_gather_into_tensor",
        "the same, into one tensor",
        "In _allgather_base, write the parts into the output in the order of the ranks.",
        "smoke_all_gather_into_tensor",
        capability="all_gather_into_tensor",
    ),
    Rung(
        "reduce_scatter",
        "rank r gets the sum of every rank's part r",
        "In _reduce_scatter_base, rank r keeps the sum of part r of every input.",
        "smoke_reduce_scatter",
        capability="reduce_scatter",
    ),
    Rung(
        "all_to_all",
        "part d of rank s's input is part s of rank d's output",
        "In alltoall_base, what rank s has at place d goes to rank d, and to place s there; empty lists of split sizes"
        " mean equal parts.",
        "smoke_all_to_all",
        capability="all_to_all",
    ),
    Rung(
        "gather/scatter",
        "the root collects from, and deals out to, every rank",
        "In gather and scatter, only the root passes a list; place r of it belongs to rank r.",
        "smoke_gather_scatter",
        capability="gather_scatter",
    ),
    Rung(
        "send/recv",
        "a rank receives what its neighbour sends",
        "The rank that send and recv take is the peer's; one rank must be able to send and receive at once.",
        "smoke_send_recv",
        capability="send_recv",
    ),
    Rung(
        "barrier",
        "no rank leaves before every rank has entered",
        "In barrier, wait() must not return before every rank has called barrier.",
        "smoke_barrier",
    ),
    Rung(
        "coalesced",
        "several tensors are summed in one call",
        "In allreduce_coalesced, reduce every tensor of the list, whatever their sizes.",
        "smoke_all_reduce_coalesced",
        capability="coalesced",
    ),
    Rung(
        "all_reduce sparse",
        "sparse tensors are summed row by row",
        "In allreduce, reduce tensors of layout torch.sparse_coo too, or leave sparse out of the capabilities.",
        "smoke_all_reduce_sparse",
        capability="sparse",
    ),
    _dtype("float16"),
    _dtype("bfloat16"),
    _dtype("complex64"),
    Rung(
        "async work",
        "several collectives may be in flight, and be waited for in any order",
        "Each call returns a Work of its own; wait() returns once that collective is done, and is_completed() is True"
        " from then on.",
        "smoke_async",
    ),
    Rung(
        "futures",
        "a Work's future is completed with the tensors",
        "Work.get_future() must return a torch.futures.Future that is completed, with the list of the tensors, when the"
        " collective is: DDPs wait for buckets by their futures.",
        "smoke_future",
    ),
    Rung(
        "new_group",
        "some of the ranks form a group of their own",
        "Only the members of a new group call `create` again, with another store; rank and world size are those within"
        " the new group.",
        "smoke_new_group",
    ),
)

STEP = Rung(
    "step",
    "after one step of {ddp} every rank has the mean of the gradients",
    "All collectives below work, so look at how this DDP uses them: the timing of wait() and of futures, and"
    " tensors that are views into a larger one.",
    "train",
)
