"""Programs about a process of its own for each rank, which ends while its group is there, or begins anew before."""

import contextlib
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from conformance.checkers.explanation import shorten
from conformance.programs.judged import Trial, always, judged
from conformance.programs.operations.store_messages import Board
from conformance.programs.rank_context import RankContext
from conformance.waiting.kept_waiting import seconds_of

_NAMES = ("a process that has called all_reduce and exits without destroy_process_group",)
_AGAIN = ("a process that destroys all its groups and makes the default one again, twice",)
#: An interpreter that has nothing left to do ends within this time, not counting what it waits for a processor.
_PATIENCE_S = 4.0
#: So long the first rank waits for the others before it removes where their processes met.
_OTHERS = timedelta(seconds=30)
#: So often a rank looks how far its process is.
_PAUSE_S = 0.02


@judged("exits_without_destroy", always(*_NAMES))
def exits_without_destroy(ctx: RankContext) -> Mapping[str, Trial]:
    """Have each rank start such a process, and look how it ends."""
    return {_NAMES[0]: lambda: _ended(ctx, lives=0)}


@judged("begins_anew", always(*_AGAIN))
def begins_anew(ctx: RankContext) -> Mapping[str, Trial]:
    """Have each rank start such a process, and look how it ends."""
    return {_AGAIN[0]: lambda: _ended(ctx, lives=2)}


def _ended(ctx: RankContext, *, lives: int) -> str:
    """Return what is wrong with the end of a process that has had so many `lives` before, as a clause."""
    board = Board("exits")
    if ctx.rank:
        wrong = _ended_in(ctx, Path(board.read("folder")), lives)
        board.put(f"ended/{ctx.rank}")
        return wrong
    with tempfile.TemporaryDirectory(prefix="exits-") as folder:
        board.put("folder", folder)
        wrong = _ended_in(ctx, Path(folder), lives)
        board.lacking([f"ended/{rank}" for rank in range(1, ctx.world_size)], _OTHERS)
        return wrong


def _ended_in(ctx: RankContext, folder: Path, lives: int) -> str:
    log, exits_now = folder / f"stderr{ctx.rank}", folder / f"exits{ctx.rank}"
    with log.open("wb") as file:
        child = subprocess.Popen(ctx.lone_rank(folder, lives), stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    try:
        while child.poll() is None and not exits_now.exists():  # as long as the scenario may last
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_PAUSE_S)
        for _ in seconds_of([child.pid], _PATIENCE_S, pause_s=_PAUSE_S):
            if child.poll() is not None:
                break
        return _wrong(child.poll(), summed=exits_now.exists(), said=log.read_text(errors="replace"))
    finally:
        child.kill()
        child.wait()


def _wrong(status: int | None, *, summed: bool, said: str) -> str:
    if status == 0 and summed:
        return ""
    how = "has not ended" if status is None else f"ended with status {status}"
    if status is not None and status < 0:
        how = f"was killed by {signal.Signals(-status).name}"
    last = next((shorten(line) for line in reversed(said.splitlines()) if line.strip()), "")
    return f"it {how} {'at its exit' if summed else 'before all ranks had summed'}" + (f": {last}" if last else "")
