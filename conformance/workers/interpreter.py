"""Starts Python interpreters from which ranks are forked, each connected by a channel."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import IO, Any

from conformance.workers.channel import Channel, pair

#: One thread per rank, because sums must not depend on the machine's cores; loopback; no variation between runs.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    # torch 2.13 takes meshes of one shape for the same, and gives one rank's graphs, with the names of its groups, to
    # another, or to a later run (pytorch/pytorch#188390).
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "1",
}
#: Set by torchrun or a cluster's launcher, or by a user who debugs: what a rank does must not depend on them.
_UNWANTED_VARIABLES = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCH_DISTRIBUTED_DEBUG",
    }
)
#: Variables of Python that a rank may inherit. All others stay behind, because they could change a verdict:
#: PYTHONOPTIMIZE removes assertions, PYTHONWARNINGS raises errors.
_KEPT_PYTHON_VARIABLES = frozenset(
    {"PYTHONDONTWRITEBYTECODE", "PYTHONFAULTHANDLER", "PYTHONHOME", "PYTHONPLATLIBDIR", "PYTHONPYCACHEPREFIX"}
)
_FIRST_HANDLE = 3
#: The first code of an interpreter. PYTHONPATH would be inherited by its children, and cannot hold every folder. Until
#: all is imported the garbage collector is off: it takes a sixth of the time, and nothing that is imported is garbage.
_START = (
    "import gc, json, runpy, sys; gc.disable(); sys.path[:] = json.loads(sys.argv.pop(1));"
    " runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def start_interpreter(
    module: str,
    *arguments: str,
    expects: Any,
    environment: Mapping[str, str],
    output: IO[bytes] | None = None,
) -> tuple[subprocess.Popen[bytes], Channel]:
    """Run a module as `python -m <module> <fd> <arguments>`; returns the process, and our end of the channel to `<fd>`.

    Our end expects messages of the type `expects`. The interpreter gets this process's module search path.
    `environment` overrides the usual variables of ranks. Without `output`, its stdout is discarded and its stderr is
    ours. It has its own session, so the terminal's Ctrl-C does not reach it.
    """
    ours, theirs = pair(expects, None)
    # The handle must not be 0, 1 or 2, which become the interpreter's standard streams: this process may lack its own.
    handle = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, _FIRST_HANDLE)
    theirs.close()
    inherited = {name: value for name, value in os.environ.items() if _may_be_inherited(name)}
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, json.dumps(_entries()), module, str(handle), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if output is None else output,
            stderr=output,
            env={**inherited, **_ENVIRONMENT, "PYTHONPATH": search_path(), **environment},
            pass_fds=(handle,),
            start_new_session=True,
        )
    finally:
        os.close(handle)
    return process, ours


def search_path() -> str:
    """Return the value of PYTHONPATH with which another interpreter finds modules where this process does.

    A folder with a colon in its name cannot be in it.
    """
    return os.pathsep.join(entry for entry in _entries() if os.pathsep not in entry)


def _entries() -> list[str]:
    return [entry or os.getcwd() for entry in sys.path]


def _may_be_inherited(name: str) -> bool:
    if name.startswith("PYTHON"):
        return name in _KEPT_PYTHON_VARIABLES
    return name not in _UNWANTED_VARIABLES
