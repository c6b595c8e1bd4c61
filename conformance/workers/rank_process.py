"""Makes a process a rank: one that the zygote has forked, or, for ranks that are apart, a new interpreter in its place.

Forked ranks are twins: strings have the same hashes in all of them, and objects the same addresses. So every rank
iterates over a set in the same order, which is not so where a launcher starts an interpreter for each. A rank that is
apart has other hashes and addresses; it keeps its process, which is the zygote's child.
"""

import ctypes
import gc
import importlib
import os
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import msgspec

from conformance.recorder import group as recorder_group
from conformance.surroundings.hygiene import surroundings
from conformance.surroundings.relied_functions import look_anew, make_first_uses
from conformance.workers.channel import Channel
from conformance.workers.forked import end_process
from conformance.workers.messages import Job, Seat
from conformance.workers.rank_main import rank_main

#: Modules of every rank: torch's DDP constructor would import torch._dynamo for more than a second, once per rank.
PRELOAD = ("torch._dynamo", "torch.nn.parallel", "ddp_impl", "numpy", "conformance.backends.gloo")

_PR_SET_NAME = 15


def preload(modules: Sequence[str]) -> None:
    """Import everything that ranks share. Raises what an import raises, and `RuntimeError` if one starts a thread."""
    gc.disable()
    from conformance.models.catalogue import load_fixtures
    from conformance.programs.registry import load_programs

    load_programs()
    load_fixtures()
    for name in (*modules, *PRELOAD):
        importlib.import_module(name)
        if (num_threads := len(os.listdir("/proc/self/task"))) > 1:
            raise RuntimeError(f"importing {name} started {num_threads - 1} thread(s), which a forked rank would lack")
    make_first_uses()
    recorder_group.prepare()
    look_anew()  # also where ranks have been forked before, and further modules are imported
    surroundings()  # finds out, once for all ranks, which flags this torch has
    gc.collect()
    gc.freeze()  # ranks run gc after every scenario; without this, each run would walk, and copy, all of torch
    gc.enable()


def be_rank(seat: Seat, connection: int) -> NoReturn:
    """Run the rank whose end of the connection is the file `connection`, and end this process."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"rank{seat.rank}of{seat.world_size}".encode(), 0, 0, 0)
        rank_main(seat, Channel(socket.socket(fileno=connection), Job))
        status = 0
    except SystemExit as end:  # a program called sys.exit: the rank exits with that code, which is no harness error
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        end_process(status)


def exec_rank(seat: Seat, connection: int, modules: Sequence[str]) -> NoReturn:
    """Run the rank in a new interpreter, which replaces this forked child: for `Scenario.apart`, as a launcher does."""
    os.set_inheritable(connection, True)
    arguments = (str(connection), msgspec.json.encode(seat).decode(), *modules)
    environment = {**os.environ, "PYTHONHASHSEED": str(1 + seat.rank)}
    os.execve(sys.executable, (sys.executable, "-P", "-m", __name__, *arguments), environment)


if __name__ == "__main__":
    _connection, _seat, *_modules = sys.argv[1:]
    os.set_inheritable(int(_connection), False)
    preload(_modules)
    be_rank(msgspec.json.decode(_seat, type=Seat), int(_connection))
