"""Runs a function on forked ranks of a process group, and reports a rank that raises, dies or waits for ever.

Ranks are forked for each call: closures need no pickling, a rank that crashes takes nobody along, and nothing is left
of a hang. Ranks hang when none has been runnable for a multiple of the reference's time: a busy machine makes both
slower, and a rank that computes, reads or waits for a processor is not accused.
"""

import faulthandler
import os
import pickle
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from conformance.backends.backend import Backend
from conformance.backends.gloo import GLOO
from conformance.parity.random_state import seed_all
from conformance.parity.training import ParityError

T = TypeVar("T")
_POLL_S, _GRACE_S = 0.1, 2.0  # the grace is the others' time to notice that a rank has raised
_TICKS_OF_WORK = 2  # between two polls; a rank that sleeps and looks uses fewer, and waits
_FRAMES, _OUTPUT = 6, 1500  # of a rank's trace, and characters of its output


class RankError(Exception):
    """A rank raised, died, or waits for ever; the text names ranks and lines."""


@dataclass(frozen=True)
class _Rank:
    number: int
    pid: int
    folder: Path

    def file(self, name: str) -> Path:
        return self.folder / f"{name}{self.number}"

    def text(self, name: str) -> str:
        lines = self.file(name).read_text(errors="replace").splitlines() if self.file(name).exists() else []
        return "\n".join(line for line in lines if not line.startswith("USDT:"))  # the profiler's

    def keep(self, name: str, content: bytes) -> None:
        """Write a file that others see once it is whole."""
        self.file("part").write_bytes(content)
        self.file("part").rename(self.file(name))

    @property
    def status(self) -> os.waitid_result | None:
        """How the process ended; None while it runs."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    @property
    def raised(self) -> tuple[bool, str, str] | None:
        """Whether it raised a `ParityError`, the text of what it raised, and the trace."""
        kept = self.file("raised")
        return pickle.loads(kept.read_bytes()) if kept.exists() else None

    def fate(self) -> str:
        if self.file("result").exists():
            return f"rank {self.number} has finished."
        if self.raised:
            return f"rank {self.number} raised:\n{self.raised[2].strip()}"
        if status := self.status:
            by_signal = status.si_code != os.CLD_EXITED
            cause = f"was ended by {signal.Signals(status.si_status).name}" if by_signal else "exited"
            return f"rank {self.number} {cause}. {self.text('output')[-_OUTPUT:]}"
        return f"rank {self.number} waits in {self._place()}"

    def _place(self) -> str:
        """Return where the rank is: the innermost function, and the line of the user's code that called it."""
        os.kill(self.pid, signal.SIGUSR1)
        patience, before = time.monotonic() + _GRACE_S, ""
        while time.monotonic() < patience and (not before or before != self.text("stack")):
            before = self.text("stack")
            time.sleep(_POLL_S)
        frames = [line.split('"') for line in before.splitlines() if '"' in line]
        inside = ("/torch/", "/contextlib.py", str(Path(__file__).parent))
        users = [f"{Path(path).name}{at}" for _, path, at in frames if not any(part in path for part in inside)]
        innermost = frames[0][2].split()[-1] if frames else "C++"
        return f"{innermost}, called from {users[0] if users else 'no line of yours'}"

    def end(self) -> None:
        for kill in (os.killpg, os.kill):  # its workers, too
            with suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def on_ranks(
    function: Callable[[int], T], ranks: int, *, idle_s: float, total_s: float, backend: Backend = GLOO
) -> list[T]:
    """Return what `function(rank)` returned on every rank, in the order of ranks.

    `idle_s`: seconds after which ranks hang that are not runnable; `total_s`: after which they are given up anyway.
    Raises `RankError`, or `ParityError` where a rank raised that. Leaves no process behind.
    """
    started: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        done, report = os.pipe()
        leash, hold = os.pipe()  # ranks read from it when they have finished: no peer loses a connection early
        try:
            for number in range(ranks):
                with warnings.catch_warnings():  # a rank needs no thread of this process
                    warnings.simplefilter("ignore", DeprecationWarning)
                    pid = os.fork()
                if not pid:
                    os.close(hold)
                    _run(function, _Rank(number, 0, Path(folder)), ranks, total_s, report, leash, backend)
                started.append(_Rank(number, pid, Path(folder)))
            return _results(started, done, idle_s, total_s)
        finally:
            for end in (done, report, leash, hold):
                os.close(end)
            for rank in started:
                rank.end()


def _run(
    function: Callable[[int], Any], own: _Rank, ranks: int, total_s: float, report: int, leash: int, backend: Backend
) -> NoReturn:
    """Be a rank: keep what the function returns or raises, and wait until no peer needs this process."""
    try:
        os.setsid()
        output = os.open(own.file("output"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
        faulthandler.register(signal.SIGUSR1, file=own.file("stack").open("w"), all_threads=False)
        torch.set_num_threads(1)  # the parent's pool of threads does not survive the fork
        os.environ |= {"RANK": str(own.number), "LOCAL_RANK": str(own.number)}
        os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store, timeout = FileStore(str(own.folder / "store"), ranks), timedelta(seconds=total_s)
        if backend.name not in dist.Backend.backend_list:
            dist.Backend.register_backend(backend.name, backend.create, devices=[backend.device_type])
        dist.init_process_group(backend.name, store=store, rank=own.number, world_size=ranks, timeout=timeout)
        seed_all(0)
        own.keep("result", pickle.dumps(function(own.number)))
        os.write(report, b".")
        os.read(leash, 1)
    except BaseException as error:
        said = isinstance(error, ParityError), str(error), traceback.format_exc(limit=-_FRAMES)
        own.keep("raised", pickle.dumps(said))
    finally:
        sys.stdout.flush()
        os._exit(1)


def _results(ranks: Sequence[_Rank], done: int, idle_s: float, total_s: float) -> list[Any]:
    began = last = time.monotonic()
    idle, raised_at, ticks = 0.0, None, 0
    while True:
        now = time.monotonic()
        runnable, used = _processor_time({rank.pid for rank in ranks})
        idle += min(now - last, 2 * _POLL_S)  # a busy machine stops this process, too
        if runnable or used >= ticks + _TICKS_OF_WORK:
            idle = 0.0
        last, ticks = now, used
        dead = [rank for rank in ranks if rank.status]
        # Looked for last: a rank that was idle a moment ago may have finished.
        missing = [rank for rank in ranks if not rank.file("result").exists()]
        if not missing:
            return [pickle.loads(rank.file("result").read_bytes()) for rank in ranks]
        ended = [rank for rank in missing if rank in dead]
        raised_at = raised_at or (now if ended else None)
        hung = idle > idle_s or now > began + total_s
        if len(ended) == len(missing) or hung or (raised_at and now > raised_at + _GRACE_S):
            break
        if select.select([done], [], [], _POLL_S)[0]:
            os.read(done, len(ranks))
    for rank in ended:
        if rank.raised and rank.raised[0]:
            raise ParityError(rank.raised[1])
    lost = [rank for rank in ended if rank.raised and "onnection" in rank.raised[1]]  # a peer was the first to end
    first = sorted(ended, key=lambda rank: rank in lost)
    raise RankError("\n".join(rank.fate().strip() for rank in dict.fromkeys([*first, *ranks])))


def _processor_time(sessions: set[int]) -> tuple[bool, int]:
    """Return whether a thread of these sessions may run, and the clock ticks that all have used.

    The thread that a process began with sleeps while gloo's threads wait for a processor.
    """
    runnable, ticks = False, 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) in sessions:
                threads = [task.read_text().rpartition(")")[2].split()[0] for task in stat.parent.glob("task/*/stat")]
                runnable |= not {"R", "D"}.isdisjoint(threads)
                ticks += int(fields[11]) + int(fields[12])
    return runnable, ticks
