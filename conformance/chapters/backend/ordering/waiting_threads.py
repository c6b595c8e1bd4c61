"""Program `calls_beside_a_wait`."""

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from conformance.programs.judged import Trial, first_wrong, judged
from conformance.programs.operations.calls import Issued
from conformance.programs.operations.cell import Cell
from conformance.programs.operations.description import CALLED, Place
from conformance.programs.operations.judging import Truth
from conformance.programs.operations.store_messages import Board
from conformance.programs.operations.tensors import Tensors
from conformance.programs.rank_context import RankContext
from conformance.scenario import Scenario

#: So long the last rank waits for the others' second calls; a rank that does not call in this time waits for the first.
_PATIENCE = timedelta(seconds=3)
#: A thread that says that it is going to wait is in the wait so much later.
_SOON_S = 0.01


def _names(scenario: Scenario) -> tuple[str, ...]:
    operation = scenario.arguments["operation"]
    return (f"{operation} while another thread waits for {operation}", f"the results of {operation}")


@judged("calls_beside_a_wait", _names)
def calls_beside_a_wait(ctx: RankContext) -> Mapping[str, Trial]:
    """Call `operation`, have a thread wait for it, and call it again; the last rank calls after that. All run it."""
    operation, last = str(ctx.arguments["operation"]), ctx.world_size - 1
    root = CALLED[operation].root_needing(last)
    board, cell = Board("beside a wait"), Cell(operation, "int64", lifetime="wait", root=root)
    first, second = (
        Tensors.of(Truth(cell, Place(ctx.rank, ctx.world_size, root, turn=turn)), ctx.device) for turn in range(2)
    )

    def wait(issued: Issued, begins: threading.Event) -> None:
        begins.set()
        for work in issued.works[::-1]:  # of a message first for the receive, which is what cannot be done
            work.wait()

    def called() -> str:
        missing, begins = [], threading.Event()
        if ctx.rank == last:
            missing = board.lacking([f"called/{rank}" for rank in range(last)], _PATIENCE)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(wait, first.issue(ctx.process_group), begins)
            begins.wait()
            time.sleep(_SOON_S)
            again = second.issue(ctx.process_group)
            board.put(f"called/{ctx.rank}")
            waiting.result()
        for work in again.works:
            work.wait()
        return "some rank's call came back only when the wait in its other thread had" if missing else ""

    name, results = _names(ctx.scenario)
    return {name: called, results: lambda: first_wrong(first.wrong(), second.wrong())}
