"""Runs a command on a machine that is loaded N-fold: N processes a core want the processor all the time beside it.

    python ci/trust/load.py [--times 30] [--cores 0,1] COMMAND...

No verdict and no error text may depend on the load: compare the command's report with one of a quiet machine by
`ddp-conformance report diff`. Exits as the command does; the processes end with it, however it ends.
"""

import argparse
import multiprocessing
import os
import subprocess
import sys


def _spin(parent: int) -> None:
    os.setsid()  # Linux shares processors out among sessions: all of one would be a load of 1
    while os.getppid() == parent:
        for _ in range(1_000_000):
            pass


def main() -> int:
    """Start the load, run the command, end the load; return the command's exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--times", type=int, default=30, help="busy processes for each core")
    parser.add_argument("--cores", help="cores for the load and the command; default: all that this process has")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if not arguments.command:
        parser.error("name the command that is to run under load")
    if arguments.cores:
        os.sched_setaffinity(0, map(int, arguments.cores.split(",")))
    busy = arguments.times * len(os.sched_getaffinity(0))
    context = multiprocessing.get_context("fork")
    load = [context.Process(target=_spin, args=(os.getpid(),), daemon=True) for _ in range(busy)]
    for process in load:
        process.start()
    try:
        return subprocess.run(arguments.command, check=False).returncode
    finally:
        for process in load:
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
