"""The rungs of the smoke ladder, in order: what each checks, and what to do when it breaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from conformance.scenario import Scenario, Step
from conformance.smoke.programs.arrivals import LINGER


@dataclass(frozen=True, slots=True)
class Rung:
    """One check of a backend, by one program that every rank runs.

    `asks` states what must be true, `advice` what to look at if it is not. `capability` is the one that a backend
    declares for it; if it is empty, every DDP needs the rung. `methods` are the names by which versions of torch call
    the group's method, the latest first.
    """

    name: str
    asks: str
    advice: str
    program: str
    capability: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    methods: tuple[str, ...] = ()

    @property
    def method(self) -> str:
        """The method of a process group that the installed torch calls here; empty if it is none in particular."""
        return next((name for name in self.methods if hasattr(dist.ProcessGroup, name)), "")

    @property
    def hint(self) -> str:
        """What to look at, with the method that the installed torch calls."""
        return self.advice.replace("{method}", self.method)

    def scenario(self, world_size: int, deadline_s: float, linger_s: float = 0.0) -> Scenario:
        """Return what the ranks run; with `linger_s` they look at what arrived once more, that much later."""
        return Scenario(
            f"smoke/{self.name}", ("SMOKE",), self.program, "mlp", world_size,
            arguments={**self.arguments, **({LINGER: linger_s} if linger_s else {})},
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
        " is opts.rootRank. Its Work, like every Work, has a wait() that returns once the tensor is there.",
        "smoke_broadcast",
        methods=("broadcast",),
    ),
    Rung(
        "all_reduce",
        "every rank gets the sum of what all ranks pass, in place",
        "In allreduce, every rank's tensor must end up with the same sum, written into the tensor that was passed.",
        "smoke_all_reduce",
        methods=("allreduce",),
    ),
    Rung(
        "all_reduce sizes",
        "odd and large tensors are summed, every element of them",
        "In allreduce, look at how a tensor is cut into pieces, and at the last piece.",
        "smoke_all_reduce_sizes",
        methods=("allreduce",),
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
        methods=("allgather",),
    ),
    Rung(
        "all_gather_into_tensor",
        "the same, into one tensor",
        "In {method}, write the parts into the output in the order of the ranks.",
        "smoke_all_gather_into_tensor",
        methods=("all_gather_single", "_allgather_base"),
        capability="all_gather_into_tensor",
    ),
    Rung(
        "reduce_scatter",
        "rank r gets the sum of every rank's part r",
        "In {method}, rank r keeps the sum of part r of every input.",
        "smoke_reduce_scatter",
        methods=("reduce_scatter_single", "_reduce_scatter_base"),
        capability="reduce_scatter",
    ),
    Rung(
        "all_to_all",
        "part d of rank s's input is part s of rank d's output",
        "In {method}, what rank s has at place d goes to rank d, and to place s there; empty lists of split sizes"
        " mean equal parts.",
        "smoke_all_to_all",
        methods=("all_to_all_single", "alltoall_base"),
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
        methods=("barrier",),
    ),
    Rung(
        "coalesced",
        "several tensors are summed in one call",
        "In allreduce_coalesced, reduce every tensor of the list, whatever their sizes.",
        "smoke_all_reduce_coalesced",
        methods=("allreduce_coalesced",),
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
        " the new group. `shutdown` of a destroyed group ends its threads.",
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
