"""Finds out why a rank does not answer: from its exit status, its files, and the stack it writes on a signal."""

import os
import re
import signal
from collections.abc import Collection, Mapping

from conformance.observation import Ending, Observation
from conformance.recorder.flight_record import LastSeen, read_flight
from conformance.surroundings.processes import is_stopped
from conformance.waiting.kept_waiting import seconds_of
from conformance.waiting.limits import LOOK_AGAIN_S, MOMENT_S
from conformance.workers.forked import name_of_signal
from conformance.workers.messages import STACK_SIGNAL, Seat
from conformance.workers.zygote_process import ZygoteProcess

_STACK_MOST_TIMES = 4
_OUTERMOST = " in _run_module_as_main"
_TAIL_BYTES = 4096
_READ_BYTES = 1 << 17
_CPP_FRAME = re.compile(r"\s*frame #\d+: ")
_STACK_BYTES = 1 << 20
_STACK_NOISE = (
    "conformance/workers/zygote.py",
    "conformance/workers/rank_process.py",
    "<frozen runpy>",
    "Extension modules:",
)


def death(status: int) -> Ending:
    """Return the fate of a rank with this exit status, which is negative for a signal."""
    if status < 0:
        return Ending("killed", -status, f"killed by {name_of_signal(-status)}")
    return Ending("exited", status, f"exited {status}")


def examine_living(
    zygote: ZygoteProcess, pids: Mapping[Seat, int], kind: str, half: Collection[int] = (), deaf: Collection[int] = ()
) -> dict[int, Observation]:
    """Observe ranks that live but do not answer, as `hung` or `abandoned`. They cannot be used afterwards.

    The ranks in `half` have sent a part of their answer. Those that are `deaf` have closed their connection, so that
    they are at fault, whatever `kind` says.

    A stopped rank cannot write its stack, so this function notes that it was stopped and continues it. The signal that
    asks for the stack arrives first, so the stack shows where the rank was stopped.
    """
    seen = {seat: (read_flight(seat.file("flight")), is_stopped(pid)) for seat, pid in pids.items()}
    for seat, (_, stopped) in seen.items():
        zygote.signal(seat, STACK_SIGNAL)
        if stopped:
            zygote.signal(seat, signal.SIGCONT)
    _await_stacks(pids)
    observations = {}
    for seat, (last_seen, stopped) in seen.items():
        where = f" in {last_seen.phase}" if last_seen.phase else ""
        own_kind = "hung" if seat.rank in deaf else kind
        detail = f"{own_kind}{where}" + (", stopped by a signal" if stopped else "")
        detail += ", in the middle of its answer" if seat.rank in half else ""
        detail += ", after its connection to the harness was closed" if seat.rank in deaf else ""
        detail += "; a signal has stopped the zygote too" if zygote.is_stopped else ""
        fate = Ending(own_kind, detail=detail)
        observations[seat.rank] = observe_from_files(seat, fate, last_seen)
    return observations


def observe_from_files(seat: Seat, fate: Ending, last_seen: LastSeen | None = None) -> Observation:
    """Return an observation of a rank without an answer: its fate, and what its files say."""
    last_seen = last_seen or read_flight(seat.file("flight"))
    return Observation(
        seat.rank,
        fate,
        history=last_seen.collectives,
        phase=last_seen.phase,
        faults_fired=last_seen.faults_fired,
        stack=_stack(seat),
        stderr=tail(seat),
    )


def tail(seat: Seat) -> str:
    """Return the end of what the rank printed in this scenario, but for the frames of stacks of C++.

    What torch raises in a thread of its own, as NCCL's watchdog does, has its message above dozens of them.
    """
    lines = _text(seat.file("output"), last_bytes=_READ_BYTES).splitlines(keepends=True)
    return "".join(line for line in lines if not _CPP_FRAME.match(line))[-_TAIL_BYTES:]


def _stack(seat: Seat) -> str:
    """Return the Python stacks that the rank wrote, without the lines that are the same for every rank."""
    lines = _text(seat.file("stack")).splitlines(keepends=True)
    return "".join(line for line in lines if not any(noise in line for noise in _STACK_NOISE))


def _await_stacks(pids: Mapping[Seat, int]) -> None:
    """Wait until every rank has written a complete stack, or had the time to."""
    for _ in seconds_of(pids.values(), MOMENT_S, pause_s=LOOK_AGAIN_S, most_times=_STACK_MOST_TIMES):
        if all(_is_whole(_text(seat.file("stack"))) for seat in pids):
            break


def _is_whole(stack: str) -> bool:
    """Whether the file holds the main thread, which faulthandler writes last, to its outermost frame or to the limit.

    faulthandler needs many system calls for a stack, and a busy machine may suspend the rank between any two of them.
    """
    last = stack.rstrip("\n").rpartition("\n")[2]
    return stack.endswith("\n") and (last.endswith(_OUTERMOST) or last == "  ...")


def _text(path: str, last_bytes: int = _STACK_BYTES) -> str:
    """Return the end of a file of the rank's; nothing if its program has replaced the file by something else."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - last_bytes))
            return (file.read(last_bytes) or b"").decode(errors="replace")
    except OSError:
        return ""
