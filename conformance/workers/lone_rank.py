"""A rank in its own interpreter, as in a user's script: it sums, and exits while its process group still exists.

Before that it may have made and destroyed all its groups several times (`lives`). A pool's ranks skip the interpreter's
finalisation, so they would not show how a backend behaves in it. Run as a module, this file is the rank's process.
"""

import gc
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, TCPStore

from conformance.backends.backend import get_backend
from conformance.recorder.group import init_process_group
from conformance.workers.interpreter import search_path


def command(backend: str, rank: int, world_size: int, device: torch.device, folder: Path, lives: int = 0) -> list[str]:
    """Return the command of that process; the ranks meet in `folder`, where `exits<rank>` tells that all have summed.

    Each of `lives` earlier lives ends with `destroy_process_group`; if there are any, so does the last one, and a group
    of one rank precedes them all. The process finds modules where this one does.
    """
    arguments = [backend, str(rank), str(world_size), str(device), str(folder), str(lives)]
    return ["env", f"PYTHONPATH={search_path()}", sys.executable, "-P", "-m", __name__, *arguments]


def _live_alone(backend: str, device: str) -> None:
    """Make a group of one rank over a TCP store, and destroy it; raises `RuntimeError` if the store still listens."""
    store = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    port = store.port
    init_process_group(get_backend(backend), None, store=store, rank=0, world_size=1)
    dist.all_reduce(torch.ones(3, device=device))
    dist.destroy_process_group()
    del store
    gc.collect()
    with socket.socket() as client:
        if client.connect_ex(("127.0.0.1", port)) == 0:
            raise RuntimeError("a group that was destroyed keeps its store: the port still listens")


def _main(backend: str, rank: int, world_size: int, device: str, folder: Path, lives: int) -> None:
    if lives:
        _live_alone(backend, device)
    for life in range(lives + 1):
        store = FileStore(f"{folder}/rendezvous{life}", world_size)
        group = init_process_group(get_backend(backend), None, store=store, rank=rank, world_size=world_size)
        for each in (group, dist.new_group()) if life < lives else (group,):
            dist.all_reduce(torch.ones(3, device=device), group=each, async_op=True)  # for which nobody waits
            tensor = torch.ones(3, device=device)
            dist.all_reduce(tensor, group=each)
            if tensor.tolist() != [float(world_size)] * 3:
                raise RuntimeError(f"all_reduce gave {tensor.tolist()} in life {life} of the process")
        store.set(f"summed/{rank}", "")
        store.wait([f"summed/{other}" for other in range(world_size)])
        if life == lives:
            (folder / f"exits{rank}").touch()
        if lives:
            dist.destroy_process_group()


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5]), int(sys.argv[6]))
