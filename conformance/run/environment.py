"""Where a run took place: versions and machine, as plain data for the report."""

import datetime
import importlib.metadata
import os
import platform
from typing import Any

from conformance.workers.numerics import PINNED

PACKAGES = ("ddp-conformance", "torch", "numpy", "pytest")
#: Whose DDPs may be judged; listed where they are installed.
SUBJECT_PACKAGES = ("deepspeed", "fairscale", "torchft-nightly")
#: Prefixes of variables that ranks inherit, and with which torch, its kernels or a backend work differently.
CHANGE_RUNS = ("TORCH", "PYTORCH", "NCCL_", "GLOO_", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "CUDA_", "CUBLAS_")
_ABSENT = "absent"


def capture_environment() -> dict[str, Any]:
    """Return the date (UTC), versions, platform, cores and the environment variables that change what a run does."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": available_cores(),
        "packages": {
            name: version
            for name in (*PACKAGES, *SUBJECT_PACKAGES)
            if (version := package_version(name)) != _ABSENT or name in PACKAGES
        },
        "accelerators": accelerators(),
        "pinned on accelerators": dict(PINNED),
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(CHANGE_RUNS)},
    }


def accelerators() -> list[str]:
    """Return the names of the devices of this process's accelerator, whosever it is; none without one."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    name_of = getattr(torch.get_device_module(accelerator), "get_device_name", lambda index: accelerator.type)
    return [str(name_of(index)) for index in range(torch.accelerator.device_count())]


def available_cores() -> int:
    """Return how many cores this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def package_version(name: str) -> str:
    """Return the installed version of a distribution, or `absent`."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return _ABSENT
