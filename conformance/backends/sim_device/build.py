"""Compiles the device on first use with the installed C++ compiler, and caches the result."""

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from conformance.errors import BackendError, present

SOURCE = Path(__file__).with_name("device.cpp")
_NAME = "ddp_conformance_sim"


def cache_folder() -> Path:
    """Return the folder of compiled devices: `$XDG_CACHE_HOME/ddp-conformance`, by default in `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddp-conformance"


def compiled_path() -> Path:
    """Return the path of the compiled device for this torch, this Python and this source; it need not exist."""
    key = hashlib.sha256(SOURCE.read_bytes())
    key.update(f"{torch.__version__} {sys.version} {torch.__file__}".encode())
    return cache_folder() / f"sim-{torch.__version__}-{key.hexdigest()[:16]}.so"


def compiler() -> str:
    """Return the path of the C++ compiler (`$CXX`, else g++ or c++), empty if there is none."""
    return next(filter(None, map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "c++")))), "")


def why_unavailable() -> str:
    """Return an empty string if the device can be used here, else the reason in one line."""
    if compiled_path().exists() or compiler():
        return ""
    return "the simulated device must be compiled, and there is no C++ compiler: install g++, or set CXX"


def build() -> Path:
    """Compile the device unless it is cached, and return its path; other processes wait for the one that compiles.

    Raises `BackendError` if there is no compiler, or with the end of its output if it fails.
    """
    path = compiled_path()
    if path.exists():
        return path
    if reason := why_unavailable():
        raise BackendError(reason)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the process ends
        if not path.exists():
            _compile(path)
    return path


def _compile(path: Path) -> None:
    from torch.utils import cpp_extension

    handle, unfinished = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    libraries = cpp_extension.library_paths()[0]
    command = [
        compiler(), "-std=c++20", "-O0", "-shared", "-fPIC", "-w", str(SOURCE), "-o", unfinished,
        f"-DTORCH_EXTENSION_NAME={_NAME}", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-I{folder}" for folder in cpp_extension.include_paths()), f"-I{sysconfig.get_path('include')}",
        f"-L{libraries}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", f"-Wl,-rpath,{libraries}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        Path(unfinished).unlink()
        raise BackendError(f"the simulated device could not be compiled by {command[0]}:\n{done.stderr[-4000:]}")
    os.replace(unfinished, path)


@cache
def load() -> ModuleType:
    """Load the compiled device into this process, once; torch then knows it as its PrivateUse1 device."""
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(build()))
    spec = present(importlib.util.spec_from_loader(_NAME, loader))
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
