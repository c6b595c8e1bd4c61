"""Programs for the tests of the workers: small, and badly behaved where they are asked to be."""

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from conformance.programs.rank_context import RankContext
from conformance.programs.registry import program_without_truth


@program_without_truth("workers/idle")
def idle(ctx: RankContext) -> None:
    ctx.observe("pid", os.getpid())


@program_without_truth("workers/misuse", misuses=True)
def misuse(ctx: RankContext) -> None:
    ctx.observe("pid", os.getpid())


@program_without_truth("workers/step")
def step(ctx: RankContext) -> None:
    """Train as the schedule says, without an optimizer."""
    ctx.observe("pid", os.getpid())
    model = ctx.wrap(ctx.build_model())
    for index, _ in enumerate(ctx.scenario.schedule):
        ctx.backward(ctx.loss(model, index), index)
        ctx.observe_gradients(f"step{index}", model)


@program_without_truth("workers/exit_without")
def exit_without(ctx: RankContext) -> None:
    """Take away what the rank ends with, and leave."""
    if ctx.scenario.arguments["what"] == "streams":
        sys.stdout.close()
        sys.stderr = None
    else:
        os._exit = lambda status: None  # type: ignore[assignment,return-value]
    sys.exit(3)


@program_without_truth("workers/await_interference")
def await_interference(ctx: RankContext) -> None:
    """Send the last rank's process id down a named pipe and wait for it in an all-reduce that it never joins.

    Other ranks that are `deaf` wait elsewhere and notice nothing. One that `spawns` does not wait alone.
    """
    with ctx.phase("forward", 0):
        if ctx.rank == ctx.world_size - 1:
            if ctx.arguments.get("spawns"):
                subprocess.Popen(["sleep", "1000"], start_new_session=True)
            with open(ctx.arguments["pipe"], "w") as pipe:
                pipe.write(str(os.getpid()))
            if ctx.arguments.get("holds_interpreter"):
                ctypes.PyDLL(None).pause()
            signal.pause()
        if ctx.arguments.get("deaf"):
            signal.pause()
        dist.all_reduce(torch.ones(3), group=ctx.process_group)


@program_without_truth("workers/raise")
def raise_(ctx: RankContext) -> None:
    """Raise on the ranks named in the arguments, after one all-reduce of all."""
    ctx.observe("pid", os.getpid())
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=ctx.process_group)
    if ctx.rank in ctx.arguments["ranks"]:
        print("about to raise", file=sys.stderr)
        raise ValueError("as asked")
    if ctx.arguments.get("meet"):
        dist.all_reduce(tensor, group=ctx.process_group)


@program_without_truth("workers/forget")
def forget(ctx: RankContext) -> None:
    """Issue an all-reduce on the ranks named in the arguments, and wait for nothing."""
    ctx.observe("pid", os.getpid())
    if ctx.rank in ctx.arguments["ranks"]:
        dist.all_reduce(torch.ones(3), group=ctx.process_group, async_op=True)


@program_without_truth("workers/fresh_memory")
def fresh_memory(ctx: RankContext) -> None:
    """Observe what is in tensors that nobody has written: small and large ones, and where others have been."""
    for numel in (3, 100, 100_000):
        torch.ones(numel).sum()
        ctx.observe(str(numel), torch.empty(numel).view(torch.int32).unique().tolist())


@program_without_truth("workers/likeness")
def likeness(ctx: RankContext) -> None:
    """Observe the hash of a text, and the order in which sets hold parameters, by the order of their making."""
    parameters = [torch.nn.Parameter(torch.empty(0)) for _ in range(64)]
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    ctx.observe("hash", hash("a text"))
    ctx.observe("order", [places[number] for number in set(places)])
    ctx.observe("parent", os.getppid())


@program_without_truth("workers/await_release")
def await_release(ctx: RankContext) -> None:
    """Wait on every rank until there is a letter for it in a named pipe."""
    with ctx.phase("forward", 0):
        _await_release(ctx.arguments["pipe"])


def _await_release(path: str) -> None:
    with open(path, "rb", buffering=0) as pipe:
        pipe.read(1)


@program_without_truth("workers/exit")
def exit_(ctx: RankContext) -> None:
    """Leave through sys.exit on rank 0, if so asked when told to."""
    if ctx.rank == 0:
        if pipe := ctx.arguments.get("pipe"):
            _await_release(pipe)
        print("leaving", file=sys.stderr)
        sys.exit(3)


class BaseError(BaseException):
    """An error that derives from BaseException itself, as torch's CheckpointException does."""


@program_without_truth("workers/base_error")
def base_error(ctx: RankContext) -> None:
    """Observe a BaseError, and let one through if so asked."""
    with ctx.catching("caught"):
        raise BaseError("as asked")
    if ctx.arguments.get("through"):
        raise BaseError("as asked")


@program_without_truth("workers/unsupported")
def unsupported(ctx: RankContext) -> None:
    ctx.observe("pid", os.getpid())
    ctx.unsupported("no such device")


@program_without_truth("workers/half_unsupported")
def half_unsupported(ctx: RankContext) -> None:
    """Say on rank 0 at once, and on the others when they are told to, that it cannot be done here."""
    if ctx.rank > 0:
        _await_release(ctx.arguments["pipe"])
    ctx.unsupported("no such device")


@program_without_truth("workers/slow")
def slow(ctx: RankContext) -> None:
    """Enter a phase every so many seconds, so many times.

    A stop shortens a sleep by as much; where that matters, `sleeps` says how many make the seconds.
    """
    _go_on(ctx, ctx.arguments["times"])


def _go_on(ctx: RankContext, times: int) -> None:
    sleeps = ctx.arguments.get("sleeps", 1)
    for step in range(times):
        with ctx.phase("forward", step):
            for _ in range(sleeps):
                time.sleep(ctx.arguments["seconds"] / sleeps)


@program_without_truth("workers/wait_for_the_last")
def wait_for_the_last(ctx: RankContext) -> None:
    """Meet the last rank, which enters a phase every so many seconds, so many times, before."""
    if ctx.rank == ctx.world_size - 1:
        _go_on(ctx, ctx.arguments["times"])
    dist.all_reduce(torch.ones(1))


@program_without_truth("workers/raise_one_by_one")
def raise_one_by_one(ctx: RankContext) -> None:
    """Raise on every rank, on each so many phases of so many seconds later than on the one before."""
    _go_on(ctx, ctx.rank * ctx.arguments["times"])
    raise ValueError("as asked")


@program_without_truth("workers/long_answer")
def long_answer(ctx: RankContext) -> None:
    """Observe more than a connection holds that nobody reads."""
    ctx.observe("much", torch.arange(4_000_000))


@program_without_truth("workers/random")
def random_numbers(ctx: RankContext) -> None:
    ctx.observe("drawn", torch.rand(4))


@program_without_truth("workers/environment")
def environment(ctx: RankContext) -> None:
    ctx.observe("torch_threads", torch.get_num_threads())
    threads = map(int, os.listdir("/proc/self/task"))  # the backend's, too
    ctx.observe("policies", sorted({os.sched_getscheduler(thread) for thread in threads}))
    ctx.observe("backend", dist.get_backend())
    ctx.observe("world", [dist.get_rank(), dist.get_world_size()])
    ctx.observe("group_type", type(ctx.process_group).__name__)
    tensor = torch.full((2,), float(ctx.rank))
    dist.all_reduce(tensor)
    ctx.observe("sum", tensor)


class Unreadable:
    """No data."""


@program_without_truth("workers/unreadable")
def unreadable(ctx: RankContext) -> None:
    ctx.facts["smuggled"] = Unreadable()


@program_without_truth("workers/spawn")
def spawn(ctx: RankContext) -> None:
    """Start a process that outlives the scenario, or, if so asked, the rank; `alone` in a session of its own."""
    child = subprocess.Popen(["sleep", "1000"], start_new_session=ctx.arguments.get("alone", False)).pid
    ctx.observe("child", child)
    if ctx.arguments.get("exits"):
        print(child, file=sys.stderr)
        os._exit(4)


def _leak_thread() -> None:
    threading.Thread(target=threading.Event().wait, name="leaked", daemon=True).start()


def _leak_group() -> None:
    dist.new_group([0, 1])


#: One of each kind that a pool treats differently: what hostile subjects do besides is in fixtures/hostile_subjects.py.
LEAKS: dict[str, tuple[Callable[[], object], str]] = {
    "environment": (lambda: os.environ.update(LEAKED="1"), "environment left behind: LEAKED (1)"),
    "thread": (_leak_thread, "(leaked)"),
    "process_group": (_leak_group, "process group left behind"),
    "grad_mode": (lambda: torch.set_grad_enabled(False), "grad mode changed: True before, False after"),
}


@program_without_truth("workers/leak")
def leak(ctx: RankContext) -> None:
    ctx.observe("pid", os.getpid())
    LEAKS[ctx.arguments["what"]][0]()


class _Owner:
    """Is in a cycle, and gives back what it owns when it is collected."""

    def __init__(self, give_back: Callable[[], object]) -> None:
        self.itself = self
        weakref.finalize(self, give_back)


def _own_group() -> _Owner:
    group = dist.new_group()
    return _Owner(lambda: dist.destroy_process_group(group))


def _own_thread() -> _Owner:
    told = threading.Event()

    def end_soon() -> None:
        told.wait()
        time.sleep(0.05)

    threading.Thread(target=end_soon, daemon=True).start()
    return _Owner(told.set)


OWNERS: dict[str, Callable[[], _Owner]] = {"group": _own_group, "thread": _own_thread}


@program_without_truth("workers/own")
def own(ctx: RankContext) -> None:
    """Drop an owner, which the garbage collector has to find."""
    ctx.observe("pid", os.getpid())
    gc.collect()
    OWNERS[ctx.arguments["what"]]()
