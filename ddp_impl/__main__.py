"""`python -m ddp_impl train.py ...` runs an unmodified training script on this DistributedDataParallel.

With torchrun: `torchrun --nproc-per-node 2 -m ddp_impl train.py --epochs 3`.
"""

from __future__ import annotations

import runpy
import sys

USAGE = """usage: python -m ddp_impl SCRIPT [ARGUMENTS ...]
       python -m ddp_impl -m MODULE [ARGUMENTS ...]

Runs a training script with ddp_impl's DistributedDataParallel in the place of torch's.
On several ranks: torchrun --nproc-per-node 2 -m ddp_impl SCRIPT [ARGUMENTS ...]"""


def main() -> None:
    """Install our class, then run the script as if Python had been given it."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help") or arguments == ["-m"]:
        print(USAGE, file=sys.stdout if arguments and arguments[0] != "-m" else sys.stderr)
        raise SystemExit(0 if arguments and arguments[0] != "-m" else 2)
    from ddp_impl.installation import install

    install()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
