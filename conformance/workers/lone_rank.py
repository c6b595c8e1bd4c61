"""A rank in an interpreter of its own, as a user's script is one: it sums, and exits while its group is still there.

Run as a module, this is that process. The pool's ranks end without Python's last steps, and would not show what a
backend does in them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from conformance.backends.backend import get_backend
from conformance.recorder.group import init_process_group
from conformance.workers.interpreter import search_path


def command(backend: str, rank: int, world_size: int, device: torch.device, folder: Path) -> list[str]:
    """Return the command of that process; the ranks meet in `folder`, where `exits<rank>` tells that all have summed.

    It finds modules where this process does.
    """
    arguments = [backend, str(rank), str(world_size), str(device), str(folder)]
    return ["env", f"PYTHONPATH={search_path()}", sys.executable, "-P", "-m", __name__, *arguments]


def _main(backend: str, rank: int, world_size: int, device: str, folder: Path) -> None:
    store = FileStore(f"{folder}/rendezvous", world_size)
    group = init_process_group(get_backend(backend), None, store=store, rank=rank, world_size=world_size)
    tensor = torch.ones(3, device=device)
    dist.all_reduce(tensor, group=group)
    if tensor.tolist() != [float(world_size)] * 3:
        raise RuntimeError(f"all_reduce gave {tensor.tolist()}")
    store.set(f"summed/{rank}", "")
    store.wait([f"summed/{other}" for other in range(world_size)])
    (folder / f"exits{rank}").touch()


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
