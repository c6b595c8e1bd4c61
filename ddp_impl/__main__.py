"""`python -m ddp_impl train.py ...` runs an unmodified training script on this DistributedDataParallel.

With torchrun: `torchrun --nproc-per-node 2 -m ddp_impl train.py --epochs 3`. Python processes that the script starts
use it too.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

USAGE = """usage: python -m ddp_impl SCRIPT [ARGUMENTS ...]
       python -m ddp_impl -m MODULE [ARGUMENTS ...]

Runs a training script with ddp_impl's DistributedDataParallel in the place of torch's.
On several ranks: torchrun --nproc-per-node 2 -m ddp_impl SCRIPT [ARGUMENTS ...]"""

ACTIVE = "ddp_impl: training with ddp_impl.DistributedDataParallel in the place of torch's"


def main() -> None:
    """Install our class, then run the script as if Python had been given it."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE)
        return
    if not arguments or arguments == ["-m"]:
        _refuse(USAGE)
    if arguments[0] != "-m" and not Path(arguments[0]).exists():
        _refuse(f"python -m ddp_impl: no script {arguments[0]} here ({Path.cwd()})")
    from ddp_impl.api.distributed import install

    install()
    _install_in_children()
    if os.environ.get("RANK", "0") == "0":
        print(ACTIVE, file=sys.stderr, flush=True)
    run: Callable[[list[str]], object] = _run
    if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun, whose summary names this module and not the script
        from torch.distributed.elastic.multiprocessing.errors import record

        run = record(run)
    run(arguments)


def _run(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        if not sys.flags.safe_path:
            sys.path[0] = str(Path(arguments[0]).resolve().parent)  # where scripts look for their own modules
        runpy.run_path(arguments[0], run_name="__main__")


def _install_in_children() -> None:
    """Let Python processes started from here on find `startup/sitecustomize.py`: spawned ranks, launchers' scripts."""
    startup = str(Path(__file__).parent / "startup")
    inherited = os.environ.get("PYTHONPATH", "")
    if startup not in inherited.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (startup, inherited)))


def _refuse(message: str) -> None:
    print(message, file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
