"""Mutants of chapter scale: DDPs that are right up to some number, size, length or precision, and wrong beyond it."""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from conformance.mutants.patches import Call, replaces
from ddp_impl import DistributedDataParallel as Ours
from ddp_impl.api.copied_state import broadcast_state
from ddp_impl.buckets.bucket import Bucket, ManagedParameter
from ddp_impl.reducer.reducer import Reducer
from ddp_impl.reducer.reduction import Reduction
from ddp_impl.wire import collectives
from ddp_impl.wire.peers import Peers, Wait


@replaces(Reduction, "hand_out")
def MasksSixtyFourParameters(reduction: Reduction, hand_out: Call, bucket: Bucket, buffer: Tensor, used: Any) -> None:
    """BUG: a mask of 64 bits says which parameters have a gradient; those from the 65th on get zeros."""
    for member, view in zip(bucket.members, bucket.views, strict=False):
        if member.index >= 64:
            view.zero_()
    hand_out(bucket, buffer, used)


@replaces(Reduction, "used")
def TellsTheUseOfSixtyFour(reduction: Reduction, call: Call, used_before: Collection[int] = ()) -> list[bool]:
    """BUG: ranks exchange of 64 parameters whether they use them; all others count as used."""
    return [used or index >= 64 for index, used in enumerate(call(used_before))]


@replaces(Reduction, "hand_out")
def CountsBucketsInAByte(reduction: Reduction, hand_out: Call, bucket: Bucket, buffer: Tensor, used: Any) -> None:
    """BUG: sums in the 256th bucket and those behind it are not divided."""
    if bucket.index >= 255:
        buffer.mul_(reduction.divisor)
    hand_out(bucket, buffer, used)


@replaces(Reduction, "hand_out")
def KeepsTheLastGradients(reduction: Reduction, hand_out: Call, bucket: Bucket, buffer: Tensor, used: Any) -> None:
    """BUG: gradients that the user has dropped stay until those of the next step take their place."""
    hand_out(bucket, buffer, used)
    bucket.gradients = [parameter.grad for parameter in bucket.parameters]


@replaces(Reduction, "send")
def SendsOneMebibyte(reduction: Reduction, start: Call, bucket: Bucket, buffer: Tensor) -> None:
    """BUG: of a bucket of more than 1 MiB, only so much is sent."""
    fits = 2**20 // buffer.element_size()
    start(bucket, buffer if reduction.comm_hook is not None or bucket.sparse else buffer[:fits])


@replaces(Reduction, "hand_out")
def CountsStepsInAByte(reduction: Any, hand_out: Call, bucket: Bucket, buffer: Tensor, used: Any) -> None:
    """BUG: the counter of steps overflows after 127, and from then on sums are not divided."""
    reduction.num_steps = getattr(reduction, "num_steps", 0) + (bucket.index == 0)
    if reduction.num_steps > 127:
        buffer.mul_(reduction.divisor)
    hand_out(bucket, buffer, used)


@replaces(Reduction, "hand_out")
def IsWrongInEveryHundredthStep(reduction: Any, hand_out: Call, bucket: Bucket, buffer: Tensor, used: Any) -> None:
    """BUG: in every hundredth step, in which it measures times, sums are not divided."""
    reduction.num_steps = getattr(reduction, "num_steps", 0) + (bucket.index == 0)
    if reduction.num_steps % 100 == 0:
        buffer.mul_(reduction.divisor)
    hand_out(bucket, buffer, used)


@replaces(Ours, "_sync_buffers")
def TiresOfBuffers(ddp: Any, sync_buffers: Call, authoritative: bool = True) -> None:
    """BUG: buffers are copied before the first 256 forwards only."""
    ddp.num_copies = getattr(ddp, "num_copies", 0) + 1
    if ddp.num_copies <= 256:
        sync_buffers(authoritative)


@replaces(Reduction, "send")
def SendsTwentyThreeBits(reduction: Reduction, start: Call, bucket: Bucket, buffer: Tensor) -> None:
    """BUG: gradients travel without the last bit of their mantissas."""
    if not bucket.sparse and buffer.dtype is torch.float32:
        buffer.view(torch.int32).bitwise_and_(-2)
    start(bucket, buffer)


@replaces(Reduction, "hand_out")
def TakesSmallAveragesForNoise(reduction: Reduction, hand_out: Call, bucket: Bucket, buffer: Tensor, used: Any) -> None:
    """BUG: averages below 1e-8 become zero."""
    if not bucket.sparse and buffer.is_floating_point():
        buffer[buffer.abs() < 1e-8] = 0
    hand_out(bucket, buffer, used)


@replaces(Ours, "named_module_buffers")
def CopiesSixteenBuffers(ddp: Ours, named_module_buffers: Call) -> dict[str, Tensor]:
    """BUG: only the first 16 buffers are copied."""
    return dict(list(named_module_buffers().items())[:16])


@replaces(Ours, "named_module_buffers")
def CopiesSmallBuffers(ddp: Ours, named_module_buffers: Call) -> dict[str, Tensor]:
    """BUG: buffers of more than 64 KiB are not copied."""
    return {name: value for name, value in named_module_buffers().items() if value.nbytes <= 2**16}


@replaces(Ours, "synchronise_state")
def CopiesTheStateOfSixtyFour(ddp: Ours, synchronise_state: Call, with_buffers: bool, group_src: int = 0) -> None:
    """BUG: of all parameters and buffers together, the first 64 are copied at construction."""

    def broadcast_some(tensors: Sequence[Tensor], *rest: Any) -> None:
        broadcast_state(tensors[:64], *rest)

    with mock.patch("ddp_impl.api.copied_state.broadcast_state", broadcast_some):
        synchronise_state(with_buffers, group_src)


@replaces(Ours, "synchronise_state", "_sync_buffers")
def SendsTheFirstChunk(ddp: Ours, call: Call, *args: Any) -> None:
    """BUG: of what does not fit into one broadcast, only the first one is sent."""
    with mock.patch("ddp_impl.wire.collectives.rounds_of_chunks", _first_chunks):
        call(*args)


@replaces(Ours, "synchronise_state")
def SendsEveryDtypeAsItIs(ddp: Ours, synchronise_state: Call, with_buffers: bool, group_src: int = 0) -> None:
    """BUG: state goes to the backend in its own dtype, also where the backend does not support it."""
    all_dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    with mock.patch("ddp_impl.wire.collectives.SENT_AS_THEY_ARE", all_dtypes):
        synchronise_state(with_buffers, group_src)


@replaces(Ours, "synchronise_state", "_sync_buffers")
def SendsHalvesAsFloats(ddp: Ours, call: Call, *args: Any) -> None:
    """BUG: state in half precision travels as float32, which no not-a-number survives as it is."""
    call(*args)
    for tensor in (*ddp.module.parameters(), *ddp.module.buffers()):
        if tensor.dtype in (torch.float16, torch.bfloat16):
            tensor.data.copy_(tensor.data.float())


_all_chunks = collectives.rounds_of_chunks


def _first_chunks(tensors: Iterable[Tensor]) -> Iterator[list[list[Tensor]]]:
    known: set[torch.dtype] = set()
    for chunks in _all_chunks(tensors):
        new = [chunk for chunk in chunks if chunk[0].dtype not in known]
        known.update(chunk[0].dtype for chunk in new)
        yield new


@replaces(Ours, "attach_reducer")
def DividesByEightAtMost(ddp: Ours, attach_reducer: Call, members: Sequence[ManagedParameter]) -> None:
    """BUG: a number of ranks is kept in three bits: sums over more than eight ranks are divided by eight."""
    attach_reducer(members)
    ddp.reducer.reduction.divisor = min(ddp.reducer.reduction.divisor, 8)


@replaces(Reduction, "wait")
def CallsItsHookThirtyTwoTimes(reduction: Any, wait_for: Call, bucket: Bucket) -> Tensor:
    """BUG: what a comm hook makes of a bucket counts 32 times; from then on gradients stay this rank's own."""
    reduction.num_calls = getattr(reduction, "num_calls", 0) + (reduction.comm_hook is not None)
    mine = bucket.flat.clone()
    reduced: Tensor = wait_for(bucket)
    return mine if reduction.num_calls > 32 else reduced


@replaces(Ours, "no_sync")
@contextlib.contextmanager
def IsLocalNineTimes(ddp: Any, no_sync: Call) -> Iterator[None]:
    """BUG: the tenth `no_sync` does nothing, nor do those that follow."""
    ddp.num_local = getattr(ddp, "num_local", 0) + 1
    with no_sync() if ddp.num_local < 10 else contextlib.nullcontext():
        yield


@replaces(Ours, "join")
def JoinsTwice(ddp: Any, join: Call, divide_by_initial_world_size: bool = True, **options: Any) -> Any:
    """BUG: from the third join on, sums are divided by the number of ranks that still have data."""
    ddp.num_joins = getattr(ddp, "num_joins", 0) + 1
    return join(divide_by_initial_world_size and ddp.num_joins < 3, **options)


@replaces(Reduction, "hand_out")
def ComparesEachParameterWithAll(reduction: Reduction, hand_out: Call, bucket: Bucket, *given: Any) -> None:
    """BUG: it looks for each parameter in a list of all, so that a step's cost grows with their square."""
    for member in bucket.members:
        next(one for one in reduction.members if _are_one(one, member))
    hand_out(bucket, *given)


def _are_one(first: Any, second: Any) -> bool:
    return first is second


@replaces(TorchDDP, "forward")
def CopiesParametersInForward(ddp: TorchDDP, forward: Call, *inputs: Any, **options: Any) -> Any:
    """BUG: each forward makes a copy of all parameters, for nothing."""
    _ = [parameter.detach().clone() for parameter in ddp.module.parameters()]
    return forward(*inputs, **options)


@replaces(Reduction, "hand_out")
def WritesAveragesTwiceMore(reduction: Reduction, hand_out: Call, bucket: Bucket, buffer: Tensor, used: Any) -> None:
    """BUG: averages go through two further buffers on their way back."""
    hand_out(bucket, buffer.copy_(buffer.clone()), used)


@replaces(Reducer, "rebuild_buckets")
def KeepsBucketsBesideNewOnes(reducer: Any, rebuild_buckets: Call) -> bool:
    """BUG: the buckets that it had at construction stay when it plans new ones."""
    reducer.had = [*getattr(reducer, "had", ()), *(bucket.flat for bucket in reducer.buckets)]
    return bool(rebuild_buckets())


@replaces(Peers, "answer")
def KeepsItsLongWait(peers: Any, answer: Call, wait: Wait, seconds: float) -> None:
    """BUG: after a long wait for the other ranks it keeps what it waited for, a bucket that has been replaced since."""
    if seconds > 1:
        peers.long_wait = wait
    answer(wait, seconds)


@replaces(Reduction, "finalize_buckets")
def WalksThroughEveryStepBefore(reduction: Any, finalize_buckets: Call) -> None:
    """BUG: at the end of each step it looks at all steps before, whose number grows."""
    reduction.steps = [*getattr(reduction, "steps", ()), reduction.iteration]
    _ = [_are_one(step, reduction.iteration) for step in reduction.steps]
    finalize_buckets()
