"""The shortcuts that accelerators take with numbers, and that ranks forbid: equal inputs give equal results there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: What is pinned in each rank whose device is not the CPU; the report of a run says so.
PINNED: Mapping[str, str] = {
    "TF32": "off",
    "cuDNN autotuning": "off",
    "cuDNN": "deterministic",
    "algorithms": "deterministic where there are such, else a warning",
}


def pin_numerics(device: torch.device) -> None:
    """Forbid what `PINNED` lists, in this process, if `device` is an accelerator."""
    if device.type == "cpu":
        return
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS has no deterministic sums without
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Else torch would fill new memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
