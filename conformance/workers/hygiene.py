"""Checks that a scenario leaves a rank's global state unchanged, so that the next scenario runs as on a fresh rank.

The rank records the process-wide state that a DDP or a program can change before a scenario and compares it afterwards.
A difference is a FAIL of the subject, and the controller replaces the pool: it does not restore state, because a
subject that leaks one thing may have leaked others. What a process may keep once (`KEPT_ONCE`) costs no pool, and is a
FAIL only if ranks that have it leave more when they run the scenario again. Random state is not compared, because every
scenario sets its seed.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import get_debug_level

from conformance.composed.observable import modes
from conformance.kept_waiting import own_seconds
from conformance.observation import PROCESSES
from conformance.workers.forked import children_of

#: Name of a piece of state -> its value, or a mapping of its items if it is a collection.
Surroundings = Mapping[str, object]

#: Those that a program may handle; STACK_SIGNAL is the harness's own.
_SIGNALS = tuple(signum for signum in signal.Signals if signum not in (signal.SIGKILL, signal.SIGSTOP))
#: Zero as soon as some code has made the processor flush subnormal numbers.
_SUBNORMAL = 5e-324
#: These may end, or take another name, by themselves at any time: only new ones count.
_LIVING = ("thread", PROCESSES)
#: How long threads may take to end, where they get a processor; those that never do cost as much, and then their ranks.
_THREADS_END_S = 0.5


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators (all devices), the same on every rank."""
    random.seed(seed)
    # Where there is no accelerator, torch.manual_seed notes for each kind of it, with a stack, that it is to be seeded.
    (torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed)(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def surroundings() -> Surroundings:
    """Return this process's global state; takes about 0.1 milliseconds."""
    return {
        **modes(),
        "environment": dict(os.environ),
        "thread": {
            str(thread.ident): thread.name
            for thread in threading.enumerate()
            if not isinstance(thread, threading._DummyThread)  # a C++ thread that once called into Python
        },
        "process group": {str(name): "" for name in dist.distributed_c10d._world.pg_names.values()},
        PROCESSES: _children(),
        "warnings filters": str(warnings.filters),  # their order matters: no mapping
        "working directory": _working_directory(),
        "signal handler": {str(signum): str(signal.getsignal(signum)) for signum in _SIGNALS},
        "profiler or tracer": f"{sys.getprofile()}, {sys.gettrace()}",
        "garbage collector": gc.isenabled(),
        "standard streams": f"{sys.stdout!r}, {sys.stderr!r}",
        "saved tensor hooks": str(torch._C._autograd._top_saved_tensors_default_hooks(True)),
        "multithreaded backward": torch._C._is_multithreading_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "oneDNN": torch._C._get_mkldnn_enabled(),
        "subnormal numbers": bool(_SUBNORMAL * 1.0),
        "cores": len(os.sched_getaffinity(0)),
        "random generator": f"{torch.default_generator!r}, {random._inst!r}",
        "deterministic warnings only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn deterministic": torch.backends.cudnn.deterministic,
        "cudnn benchmark": torch.backends.cudnn.benchmark,
        "distributed debug level": str(get_debug_level()),
    }


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # removed
        return ""


def _children() -> dict[str, str]:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # asks, and reaps nobody
    except ChildProcessError:
        return {}
    return {str(number): name for number, name in children_of(os.getpid()).items()}


def traces(before: Surroundings) -> tuple[str, ...]:
    """Return a phrase for everything that is not as it was `before` and stays so.

    A wrapper in a reference cycle gives back what it owns when the cycle is collected, and a thread that was told to
    end takes a moment. Where nothing was left this costs nothing more.
    """
    found = violations(before, surroundings())
    if found:
        gc.collect()
        found = violations(before, surroundings())
    if not any(map(_is_thread, found)):
        return found
    for _ in own_seconds(_THREADS_END_S, pause_s=0.01):
        found = violations(before, surroundings())
        if not any(map(_is_thread, found)):
            break
    return found


def _is_thread(phrase: str) -> bool:
    return phrase.startswith("thread left behind")


def violations(before: Surroundings, after: Surroundings) -> tuple[str, ...]:
    """Return a phrase for everything that is not as it was."""
    found: list[str] = []
    for name, old in before.items():
        new = after[name]
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            found += [f"{name} left behind: {_item(key, new)}" for key in new if key not in old]
            if name in _LIVING:
                continue
            found += [f"{name} taken away: {_item(key, old)}" for key in old if key not in new]
            found += [f"{name} changed: {_item(key, new)}" for key in new if key in old and new[key] != old[key]]
        else:
            found.append(f"{name} changed" + _transition(old, new))
    return tuple(found)


def _transition(old: object, new: object) -> str:
    text = f": {old} before, {new} after"
    return text if len(text) <= 100 else ""


def _item(key: str, items: Mapping[str, object]) -> str:
    value = str(items[key])
    return f"{key} ({value})" if 0 < len(value) <= 100 else key
