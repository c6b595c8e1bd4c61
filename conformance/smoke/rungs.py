"""The rungs of the smoke ladder, in order: what each checks, and what to do when it breaks.

They are the first page of profile `backend`: cells of its operations, and trials of its programs, the easiest first.
Each dtype and reduction that a backend may declare is tried in each operation, and each other capability once.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

from conformance.backends.backend import CAPABILITIES
from conformance.programs.operations.cell import BITWISE, Cell
from conformance.programs.operations.data import COMPLEX, FLOAT8
from conformance.programs.operations.description import COPYING, OPERATIONS, REDUCING
from conformance.scenario import Scenario, Step

#: By what names versions of torch call the process group's method for an operation, the latest first.
METHODS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "all_reduce": ("allreduce",),
        "broadcast": ("broadcast",),
        "all_gather": ("allgather",),
        "all_gather_single": ("all_gather_single", "_allgather_base"),
        "functional all_gather_single": ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
        "reduce_scatter": ("reduce_scatter",),
        "reduce_scatter_single": ("reduce_scatter_single", "_reduce_scatter_base"),
        "all_to_all": ("alltoall",),
        "all_to_all_single": ("all_to_all_single", "alltoall_base"),
        "all_to_all_uneven": ("all_to_all_single", "alltoall_base"),
        "gather": ("gather",),
        "scatter": ("scatter",),
        "send_recv": ("send",),
        "all_reduce_coalesced": ("allreduce_coalesced",),
        "reduce": ("reduce",),
        "all_gather_single_coalesced": ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
        "reduce_scatter_single_coalesced": ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
        "recv_anysource": ("recv_anysource",),
        "barrier": ("barrier",),
    }
)


@dataclass(frozen=True, slots=True)
class Rung:
    """One check of a backend: cells of its operations, or another program that every rank runs.

    `asks` states what must be true, `advice` what to look at if it is not. `capability` is the one that a backend
    declares for it; if it is empty, every DDP needs the rung. `operation` is what a rung without cells is about.
    One that `waits` is tried only if it is declared: where it does not work, nothing but the deadline ends it.
    """

    name: str
    asks: str
    advice: str
    cells: tuple[Cell, ...] = ()
    program: str = "operation_cells"
    capability: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    operation: str = ""
    fewest_ranks: int = 1
    waits: bool = False

    def method(self, where: str = "") -> str:
        """Return the method that the installed torch calls in the cell or trial called `where`; the first by default.

        It is empty where that is none in particular.
        """
        plain = (cell for cell in self.cells if cell.path != "functional")
        cell = next((cell for cell in self.cells if cell.describe() == where), next(plain, None))
        called = self.operation if cell is None else cell.operation
        names = METHODS.get(f"{cell.path} {called}" if cell else "", METHODS.get(called, ()))
        return next((name for name in names if hasattr(dist.ProcessGroup, name)), "")

    @property
    def hint(self) -> str:
        """What to look at, with the method that the installed torch calls."""
        return self.advice.replace("{method}", self.method())

    def is_tried(self, world_size: int, declared: Collection[str]) -> bool:
        """Whether so many ranks can try it, and do so on a backend that declares this."""
        return world_size >= self.fewest_ranks and (self.capability in declared or not self.waits)

    def scenario(self, world_size: int, deadline_s: float, declared: Collection[str] = CAPABILITIES) -> Scenario:
        """Return what the ranks run; cells are left out that so few ranks, or what is `declared`, cannot try."""
        arguments = dict(self.arguments)
        if self.cells:
            able = {*declared, self.capability}
            possible = (cell for cell in self.cells if cell.needs <= able and _is_possible(cell, world_size))
            arguments["cells"] = [cell.to_json() for cell in possible]
        return Scenario(
            f"smoke/{self.name}", ("SMOKE",), self.program, "mlp", world_size, arguments=arguments,
            min_collectives=0, deadline_s=deadline_s, schedule=(Step(),), recorded=self.program == "train",
        )  # fmt: skip


def _is_possible(cell: Cell, world_size: int) -> bool:
    return cell.root < world_size and not (world_size == 1 and cell.what.of_pairs)


def _from_every_root(*operations: str) -> tuple[Cell, ...]:
    return tuple(Cell(operation, root=root) for operation in operations for root in range(3))


def _each(operation: str, axis: str, values: Iterable[Any], **others: Any) -> tuple[Cell, ...]:
    return tuple(Cell(operation, **{axis: value}, **others) for value in values)


def _in_every(operations: Iterable[str], **axes: Any) -> tuple[Cell, ...]:
    cells = (Cell(name, root=int(OPERATIONS[name].rooted), **axes) for name in operations)
    return tuple(cell for cell in cells if cell.is_possible)


def _dtype(name: str, operations: Iterable[str] = OPERATIONS, **axes: Any) -> Rung:
    return Rung(
        name,
        f"every operation takes tensors of {name}",
        f"Look at what the method makes of {name}: the bytes of an element, and how elements are added; or leave {name}"
        " out of the capabilities.",
        (*_in_every(operations, dtype=name, **axes), Cell("all_reduce", name, numel=1_025, **axes)),
        capability=name,
    )


def _reductions(name: str, *ops: str, dtype: str, capability: str = "", groups: tuple[str, ...] = ()) -> Rung:
    return Rung(
        name,
        f"every operation that reduces knows {' and '.join(ops)}",
        "Look at the reduction in the method's options, opts.reduceOp"
        + (f"; or leave {capability} out of the capabilities." if capability else "."),
        tuple(cell for op in ops for cell in _in_every(REDUCING, op=op, dtype=dtype))
        + tuple(Cell("all_reduce", dtype, op, group=group) for op in ops for group in groups),
        capability=capability,
    )


#: gloo refuses complex numbers in gather, which profile `backend` tells with its source (DT-06).
_OF_COMPLEX = tuple(name for name in OPERATIONS if name != "gather")

ALL_REDUCE = Rung(
    "all_reduce",
    "every rank gets the sum of what all ranks pass, in place",
    "In allreduce, every rank's tensor must end up with the same sum, written into the tensor that was passed.",
    _each("all_reduce", "dtype", ("float32", "float64", "int32", "int64")),
)

COLLECTIVES: tuple[Rung, ...] = (
    Rung(
        "broadcast",
        "every rank gets what the root has",
        "In broadcast, the root sends its tensor and every other rank receives into the tensor that it passed; the root"
        " is opts.rootRank. Its Work, like every Work, has a wait() that returns once the tensor is there.",
        _from_every_root("broadcast"),
    ),
    ALL_REDUCE,
    Rung(
        "all_reduce sizes",
        "odd and large tensors are summed, every element of them",
        "In allreduce, look at how a tensor is cut into pieces, and at the last piece.",
        _each("all_reduce", "numel", (1, 1_009, 65_537, 1_048_583)),  # primes, and more than anybody sends in one piece
    ),
    Rung(
        "all_reduce max/min",
        "all_reduce honours reductions other than SUM",
        "In allreduce, look at opts.reduceOp: joining uneven inputs needs MAX.",
        _each("all_reduce", "op", ("MAX", "MIN"), dtype="int64") + _each("all_reduce", "op", ("MAX", "MIN")),
    ),
    Rung(
        "all_gather",
        "every rank gets every rank's tensor, by rank",
        "In allgather, slot r of the output list belongs to rank r, on every rank.",
        (Cell("all_gather"),),
    ),
    Rung(
        "all_gather_into_tensor",
        "the same, into one tensor",
        "In {method}, write the parts into the output in the order of the ranks.",
        (Cell("all_gather_single", path="functional"), Cell("all_gather_single")),
        capability="all_gather_into_tensor",
    ),
    Rung(
        "reduce_scatter",
        "rank r gets the sum of every rank's part r",
        "In reduce_scatter and {method}, rank r keeps the sum of part r of every input.",
        (Cell("reduce_scatter_single"), Cell("reduce_scatter")),
        capability="reduce_scatter",
    ),
    Rung(
        "all_to_all",
        "part d of rank s's input is part s of rank d's output",
        "In alltoall and {method}, what rank s has at place d goes to rank d, and to place s there; empty lists of"
        " split sizes mean equal parts.",
        (Cell("all_to_all_single"), Cell("all_to_all_uneven"), Cell("all_to_all")),
        capability="all_to_all",
    ),
    Rung(
        "reduce",
        "the root gets the sum of what all ranks pass",
        "In reduce, only the root's tensor must end up with the sum; the root is opts.rootRank.",
        _from_every_root("reduce"),
        capability="reduce",
    ),
    Rung(
        "gather/scatter",
        "the root collects from, and deals out to, every rank",
        "In gather and scatter, only the root passes a list; place r of it belongs to rank r.",
        _from_every_root("gather", "scatter"),
        capability="gather_scatter",
    ),
    Rung(
        "send/recv",
        "a rank receives what its neighbour sends",
        "The rank that send and recv take is the peer's; one rank must be able to send and receive at once.",
        (Cell("send_recv"),),
        capability="send_recv",
    ),
    Rung(
        "barrier",
        "no rank leaves before every rank has entered",
        "In barrier, wait() must not return before every rank has called barrier.",
        program="barriers",
        arguments={"trials": ["barrier"]},
        operation="barrier",
    ),
    Rung(
        "coalesced",
        "several tensors are summed in one call",
        "In allreduce_coalesced, reduce every tensor of the list, whatever their sizes.",
        (Cell("all_reduce_coalesced", path="group"),),
        capability="coalesced",
    ),
    Rung(
        "all_reduce sparse",
        "sparse tensors are summed row by row",
        "In allreduce, reduce tensors of layout torch.sparse_coo too, or leave sparse out of the capabilities.",
        program="smoke_sparse",
        capability="sparse",
        operation="all_reduce",
    ),
    Rung(
        "coalesced single",
        "several all-gathers or reduce-scatters of single tensors are done in one call",
        "In {method} and its like for reduce-scatters, treat every pair of tensors of the lists.",
        tuple(
            Cell(f"{name}_single_coalesced", path=path)
            for name in ("all_gather", "reduce_scatter")
            for path in ("group", "functional")
        ),
        capability="single_coalesced",
    ),
    Rung(
        "in place",
        "an input may be a part of the output",
        "Read the input before you write what overlaps with it, or leave in_place out of the capabilities.",
        _in_every(OPERATIONS, in_place=True),
        capability="in_place",
    ),
    Rung(
        "dtypes",
        "every operation takes the dtypes that every backend has",
        "Look at the bytes of an element, and at how elements are added.",
        tuple(cell for name in ("float64", "int32", "int64") for cell in _in_every(OPERATIONS, dtype=name)),
    ),
    *(_dtype(name) for name in ("float16", "bfloat16", "int8", "uint8", "int16")),
    _dtype("bool", op="MAX"),  # gloo adds bools as bytes, which profile `backend` tells with its source (DT-04)
    *(_dtype(name, _OF_COMPLEX) for name in COMPLEX),
    Rung(
        "float8",
        "operations that copy take the dtypes of 8 bits",
        "Copy bytes, or leave float8 out of the capabilities.",
        tuple(cell for name in FLOAT8 for cell in _in_every(COPYING, dtype=name, data="bits")),
        capability="float8",
    ),
    _reductions("reductions", "SUM", "MAX", "MIN", dtype="int64"),
    _reductions("avg", "AVG", dtype="float32", capability="avg", groups=("without-0",)),
    _reductions("product", "PRODUCT", dtype="float32", capability="product"),
    _reductions("bitwise", *BITWISE, dtype="int64", capability="bitwise"),
    _reductions("premul_sum", "PREMUL_SUM", dtype="float32", capability="premul_sum"),
    Rung(
        "gather single",
        "the root collects one tensor of every rank's",
        "In gather_single, rank r's tensor goes to place r of the root's, opts.rootRank; the others' output is empty.",
        _from_every_root("gather_single"),
        capability="gather_single",
    ),
    Rung(
        "async work",
        "several collectives may be in flight, and be waited for in any order",
        "Each call returns a Work of its own; wait() returns once that collective is done, and is_completed() is True"
        " from then on.",
        (
            Cell("all_reduce", lifetime="wait", neighbour="in-flight"),
            *_each("all_reduce", "lifetime", ("wait-late", "polled", "wait-twice", "wait-timeout")),
            Cell("all_gather_single", lifetime="wait-timeout"),
        ),
    ),
    Rung(
        "async calls",
        "a call with async_op=True comes back before the last rank has called",
        "Each call begins the collective and returns its Work; only wait() may wait for other ranks.",
        program="calls_before_the_last_rank",
        arguments={"operation": "all_reduce", "trials": ["the call of all_reduce before the last rank came"]},
        operation="all_reduce",
        fewest_ranks=2,
    ),
    Rung(
        "no elements",
        "tensors without elements are taken as others are",
        "A collective of 0 elements has nothing to move, and returns a Work that is done.",
        _in_every(("all_reduce", "broadcast", "all_gather"), numel=0)
        + _in_every(("all_reduce", "broadcast", "all_gather"), numel=0, lifetime="wait"),
    ),
    Rung(
        "strided outputs",
        "an output that does not lie in one piece is written by logical position, or refused",
        "Write into a contiguous copy and copy that into the tensor, or raise an error if not tensor.is_contiguous().",
        (
            *_each("all_gather", "writes", ("transposed", "strided"), numel=20),
            Cell("all_reduce", numel=20, reads="transposed", writes="transposed"),
        ),
        arguments={"refusable": True},
    ),
    Rung(
        "futures",
        "a Work's future is completed with the tensors",
        "Work.get_future() must return a torch.futures.Future that is completed, with the list of the tensors, when the"
        " collective is: DDPs wait for buckets by their futures.",
        _each("all_reduce", "lifetime", ("future-polled", "value", "then", "then-late")),
    ),
    Rung(
        "work status",
        "a Work that is done says so",
        "After wait(), is_success() is True, exception() is None, and result() is the list of the tensors, or empty.",
        program="status_of_works",
        arguments={
            "trials": [f"{asked} of all_reduce after wait()" for asked in ("is_success()", "exception()", "result()")]
        },
    ),
    # Before ranks have groups of which others are no members: torch hangs in it afterwards (pytorch/pytorch#173608).
    Rung(
        "local synchronization",
        "groups can be made by their members alone",
        "In create, need nothing of ranks that are no members; or leave local_synchronization out of the capabilities.",
        program="local_synchronisation",
        arguments={"trials": ["all_reduce in a group that only its members make"]},
        capability="local_synchronization",
        fewest_ranks=3,
        waits=True,
    ),
    Rung(
        "new_group",
        "some of the ranks form a group of their own",
        "Only the members of a new group call `create` again, with another store; rank and world size are those within"
        " the new group.",
        (*_each("all_reduce", "group", ("without-0", "ends")), Cell("broadcast", root=1, group="without-0")),
    ),
    Rung(
        "tags",
        "messages are told apart by their tags",
        "In send and recv, the tag counts as well as the peer; or leave tags out of the capabilities.",
        program="tagged_messages",
        capability="tags",
        fewest_ranks=2,
    ),
    Rung(
        "any source",
        "a receive without a source takes what any rank sends, and tells who it was",
        "In recv_anysource, the Work tells the sender; or leave any_source out of the capabilities.",
        program="unknown_senders",
        arguments={"trials": ["recv from anybody names the sender"]},
        capability="any_source",
        operation="recv_anysource",
        fewest_ranks=2,
    ),
    *(
        Rung(
            capability,
            asks,
            f"{advice}; or leave {capability} out of the capabilities.",
            program="nobody_comes",
            arguments={"operation": "all_reduce", "whose": whose, "dtype": "float32", "numel": 7, "before": 0},
            capability=capability,
            fewest_ranks=2,
            waits=True,
        )
        for capability, asks, whose, advice in (
            (
                "timeouts",
                "a wait for a rank that never comes ends with an error",
                "the group's timeout",
                "What `create` got as timeout bounds every operation, where its options give no other",
            ),
            (
                "set_timeout",
                "set_timeout holds for every later call",
                "the timeout of set_timeout",
                "The group's set_timeout replaces the timeout that `create` got",
            ),
        )
    ),
    Rung(
        "unordered groups",
        "ranks call two groups' operations in different orders",
        "An operation waits for none of another group; or leave unordered_groups out of the capabilities.",
        program="several_groups",
        arguments={"trials": ["all_reduce in two groups, in another order on each rank"]},
        capability="unordered_groups",
        fewest_ranks=2,
        waits=True,
    ),
    Rung(
        "monitored barrier",
        "a barrier names the rank that did not come",
        "Its error on rank 0 names the rank; or leave monitored_barrier out of the capabilities.",
        program="barrier_of_the_missing",
        arguments={"name_all": False},
        capability="monitored_barrier",
        fewest_ranks=2,
        waits=True,
    ),
    Rung(
        "hooks",
        "pre- and post-hooks of a group run round each of its operations",
        "A group in Python keeps the hooks that it gets, and calls them; or leave hooks out of the capabilities.",
        program="hooks_of_a_group",
        capability="hooks",
    ),
    Rung(
        "reconfigure",
        "a group gets its members by their handles, and other members later",
        "In reconfigure, ranks are numbered by the places of their handles in opts.handles; or leave reconfigure out of"
        " the capabilities.",
        program="reconfigured_groups",
        capability="reconfigure",
        fewest_ranks=2,
        waits=True,
    ),
    Rung(
        "abort",
        "abort() ends what waits",
        "In abort, let what is under way fail; or leave abort out of the capabilities.",
        program="abort_of_waiters",
        capability="abort",
        fewest_ranks=2,
        waits=True,
    ),
    Rung(
        "destroyed groups",
        "a destroyed group leaves no thread",
        "destroy_process_group calls the group's `shutdown`, which ends its threads and closes its connections.",
        program="smoke_end",
    ),
)

STEP = Rung(
    "step",
    "after one step of {ddp} every rank has the mean of the gradients",
    "Every collective holds by itself, so look at how this DDP uses them: the timing of wait() and of futures, and"
    " tensors that are views into a larger one.",
    program="train",
)
#: The same of a DDP that works on gloo: torch's own, and ddp_impl.
STEP_OF_KNOWN = replace(
    STEP,
    advice="This DDP works on gloo, so look at the backend. A DDP goes beyond the rungs that hold: it has several"
    " collectives in flight, waits for Works and futures late and in another thread, and passes views into a larger"
    " tensor. `ddp-conformance run --profile backend` tries all of it without a DDP.",
)
