"""Checks that a scenario leaves a rank's global state unchanged, so that the next scenario runs as on a fresh rank.

The rank records the process-wide state before a scenario and compares it afterwards. A difference is a FAIL of the
subject, and the controller replaces the pool without restoring state, because a subject that leaks one thing may have
leaked others. What a process may keep once (`KEPT_ONCE`) costs no pool, and is a FAIL only if ranks leave more when
they run the scenario again. Random state is not compared, because every scenario sets its seed.
"""

import atexit
import contextlib
import gc
import locale
import logging
import os
import random
import resource
import signal
import socket
import stat
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cache, lru_cache, partial
from itertools import product
from typing import cast

import torch
import torch.__future__
import torch.distributed as dist
import torch.library
from torch._C._distributed_c10d import get_debug_level
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._config_module import ConfigModule

from conformance.observation import PROCESSES
from conformance.surroundings.observable import modes
from conformance.surroundings.processes import children_of
from conformance.waiting.kept_waiting import process_seconds

#: Name of a piece of state -> its value, or a mapping of its items if it is a collection.
Surroundings = Mapping[str, object]

#: The signals that a program may handle.
_SIGNALS = tuple(signum for signum in signal.Signals if signum not in (signal.SIGKILL, signal.SIGSTOP))
#: Zero as soon as some code has made the processor flush subnormal numbers.
_SUBNORMAL = 5e-324
#: Their sum and differences round to `_ONE`, unless some code has set a rounding direction.
_ONE, _LITTLE = 1.0, 1e-30
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_DISPATCH_KEYS = (torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set)
_LIMITS = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
#: Functions of `sys` that read settings.
_OF_PYTHON = (
    "getdlopenflags", "getprofile", "getswitchinterval", "gettrace", "get_asyncgen_hooks",
    "get_coroutine_origin_tracking_depth", "get_int_max_str_digits",
)  # fmt: skip
#: Replaceable functions of `sys` that Python calls.
_HOOKS = ("breakpointhook", "displayhook", "excepthook", "unraisablehook")
#: Flags of torch that do not affect results, that need an initialised GPU to be read, or that torch sets itself: the
#: first attention on a CUDA device sets the order of kernels.
_NO_FLAGS = ("thread_name", "blas_preferred_backend", "linalg_preferred_backend", "sdp_priority_order")
#: The value of a flag that torch refuses to read, before the reason.
_NO_VALUE = "no value:"
#: These may end or change by themselves: only new ones count.
_LIVING = ("thread", PROCESSES, "open file")
#: How long threads may take to end and to close files, while they have a processor.
_THREADS_END_S = 0.5


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators (all devices), the same on every rank."""
    random.seed(seed)
    # Without an accelerator, torch.manual_seed keeps a stack for each kind of device that it must seed later.
    (torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed)(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def surroundings() -> Surroundings:
    """Return this process's global state; takes about 0.2 milliseconds."""
    return {
        **modes(),
        "environment": dict(os.environ),
        "thread": _threads(),
        "process group": {str(name): "" for name in dist.distributed_c10d._world.pg_names.values()},
        # Within a block that its caller has left by an exception, torch executes no collective any more.
        "open coalescing blocks": len(dist.distributed_c10d._world.pg_coalesce_state),
        PROCESSES: _children(),
        "open file": _files(),
        "callback at exit": {str(number): "" for number in range(atexit._ncallbacks())},
        "warnings filters": str(warnings.filters),  # their order matters: no mapping
        "working directory": _working_directory(),
        "signal handler": {str(signum): str(signal.getsignal(signum)) for signum in _SIGNALS},
        "setting of Python": _of_python(),
        "recursion limit": sys.getrecursionlimit(),
        "path of modules": str(sys.path),
        "standard streams": f"{sys.stdout!r}, {sys.stderr!r}",
        "files 1 and 2": [_file(1), _file(2)],
        "blocked signals": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "timer": [signal.getitimer(one) != (0.0, 0.0) for one in _TIMERS],
        "resource limit": {name: resource.getrlimit(limit) for name, limit in _LIMITS.items()},
        "cores": len(os.sched_getaffinity(0)),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "saved tensor hooks": str(torch._C._autograd._top_saved_tensors_default_hooks(True)),
        "profiler": torch._C._autograd._profiler_enabled(),
        "level of forward differentiation": torch.autograd.forward_ad._current_level,
        "autocast nesting": (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting())[1],
        "optimizer hooks": [len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)],
        "torch flag": {name: _read(get) for name, get in _flags().items()}
        | {name: str(value) for name, value in vars(torch.__future__).items() if isinstance(value, bool)},
        "dispatch keys": [keys().raw_repr() for keys in _DISPATCH_KEYS],
        "settings of torch": {config.__name__: config.get_hash() for config in _configs()},
        "replaced kernels": _replaced_kernels(len(torch.library._impls)),
        "default process group": _default_group(),
        "subnormal numbers": bool(_SUBNORMAL * 1.0),
        "rounding": [_ONE + _LITTLE, _ONE - _LITTLE, -_ONE - _LITTLE],
        "random generator": f"{torch.default_generator!r}, {random._inst!r}",
        "deterministic warnings only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "distributed debug level": str(get_debug_level()),
    }


def _threads() -> dict[str, str]:
    return {
        str(thread.ident): thread.name
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread)  # a C++ thread that once called into Python
    }


def _of_python() -> dict[str, str]:
    """Return the settings of the interpreter and of NumPy, and the process's language and mask of files."""
    mask = os.umask(0o077)
    os.umask(mask)
    numpy = sys.modules.get("numpy")
    return {
        **{name: str(getattr(sys, name)()) for name in _OF_PYTHON},
        # By name: torch makes a new function of one name whenever the default group is initialised.
        **{name: getattr(getattr(sys, name), "__qualname__", "nameless") for name in _HOOKS},
        "garbage collector": f"{gc.isenabled()}, {gc.get_threshold()}, {gc.get_debug()}, {len(gc.callbacks)} callbacks",
        "logging": str([logging.root.level, logging.root.handlers, logging.root.manager.disable]),
        "timeout of sockets": str(socket.getdefaulttimeout()),
        "errors of NumPy": str(numpy and numpy.geterr()),
        "locale": locale.setlocale(locale.LC_ALL),
        "umask": oct(mask),
    }


@cache
def _configs() -> tuple[ConfigModule, ...]:
    """Return torch's modules of settings, such as `torch._dynamo.config`, that had been imported at the first call."""
    return tuple(module for module in list(sys.modules.values()) if isinstance(module, ConfigModule))


@cache
def _flags() -> Mapping[str, Callable[[], object]]:
    """Return the getter of every flag that the installed torch can set; deprecated flags have successors among them."""
    found: dict[str, Callable[[], object]] = {
        f"autocast_dtype of {kind}": partial(torch.get_autocast_dtype, kind) for kind in ("cpu", _accelerator())
    }
    precision: Callable[[str, str], object] = getattr(torch._C, "_get_fp32_precision_getter", _unknown)
    for backend, operation in product(("generic", "cuda", "mkldnn"), ("all", "matmul", "conv", "rnn")):
        read = partial(precision, backend, operation)
        if _can_be_read(read):
            found[f"fp32_precision of {backend} {operation}"] = read
    for setter in dir(torch._C):
        prefix, _, name = setter.partition("set_")
        if prefix not in ("", "_") or name in _NO_FLAGS:
            continue
        stem = name.removesuffix("_enabled")
        sdp = f"_get_{name.removeprefix('sdp_use_')}_sdp_enabled"  # of scaled dot product attention
        for getter in (f"get_{name}", f"_get_{name}", f"is_{name}", f"_is_{name}", f"_get_{stem}", f"_{name}", sdp):
            get = getattr(torch._C, getter, _unknown)
            if _can_be_read(get):
                found[name] = get
                break
    return found


def _accelerator() -> str:
    accelerator = torch.accelerator.current_accelerator()
    return accelerator.type if accelerator else "cpu"


def _unknown(*arguments: object) -> object:
    raise AttributeError("this torch has no such function")


def _can_be_read(get: Callable[[], object]) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return not _read(get).startswith(_NO_VALUE)


def _read(get: Callable[[], object]) -> str:
    """Return the flag's value, or why torch refuses to read it, as it does if a flag was set in both of two ways."""
    try:
        return str(get())
    except Exception as error:
        return f"{_NO_VALUE} {error}"


def _file(number: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(number)
    except OSError:  # closed
        return None
    return status.st_dev, status.st_ino


def _files() -> dict[str, str]:
    """Return the descriptors of all open regular files; pipes, sockets, devices and shared memory are the backend's."""
    found = {}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):  # that of the folder itself
            status = os.fstat(int(name))
            if stat.S_ISREG(status.st_mode) and status.st_dev != _shared_memory():
                found[name] = ""
    return found


@cache
def _shared_memory() -> int | None:
    try:
        return os.stat("/dev/shm").st_dev
    except OSError:
        return None


def _default_group() -> list[object]:
    group = dist.distributed_c10d._world.default_pg
    return [id(group), sorted(vars(group)) if hasattr(group, "__dict__") else []]


@lru_cache(maxsize=1)
def _replaced_kernels(_: int) -> tuple[str, ...]:
    """Return the operators of torch with a replaced kernel; the argument, their number, invalidates the cache."""
    return tuple(name for name in torch.library._impls if name.startswith("aten/") and not name.endswith("/Meta"))


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # removed
        return ""


def _children() -> dict[str, str]:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # reaps nothing
    except ChildProcessError:
        return {}
    return {str(number): name for number, name in children_of(os.getpid()).items()}


def knowing(before: Surroundings, threads: Iterable[threading.Thread]) -> Surroundings:
    """Return `before` with these `threads`, which are then no traces."""
    known = cast("dict[str, str]", before["thread"])
    return {**before, "thread": {**known, **{str(thread.ident): thread.name for thread in threads}}}


def traces(before: Surroundings) -> tuple[tuple[str, ...], Surroundings]:
    """Return a phrase for every lasting difference from `before`, and the current state.

    Differences are compared again after a garbage collection and after a wait for threads that end.
    """
    found = violations(before, now := surroundings())
    if found:
        gc.collect()
        found = violations(before, now := surroundings())
    if not any(phrase.startswith(("thread left behind", "open file left behind")) for phrase in found):
        return found, now
    ending = {"thread": before["thread"], "open file": before["open file"]}
    for _ in process_seconds(_THREADS_END_S, pause_s=0.01):
        if not violations(ending, {"thread": _threads(), "open file": _files()}):
            break
    now = surroundings()
    return violations(before, now), now


def violations(before: Surroundings, after: Surroundings) -> tuple[str, ...]:
    """Return a phrase for every difference."""
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
            text = f": {old} before, {new} after"
            found.append(f"{name} changed" + (text if len(text) <= 100 else ""))
    return tuple(found)


def _item(key: str, items: Mapping[str, object]) -> str:
    value = str(items[key])
    return f"{key} ({value})" if 0 < len(value) <= 100 else key
