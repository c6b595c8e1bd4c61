"""Lets ranks meet again and again beside a program that connects to every port they listen on.

    python ci/trust/meetings.py [--meetings 20000] [--seconds 3600] [--worlds 4]

Several worlds of 2 to 4 ranks meet at once. Each rank connects as those of a pool do, sums a number with the others,
leaves, and meets them again at another place; after a hundred meetings its process ends and new ones take over. The
stranger connects, sends nothing, rubbish or half a greeting, and leaves or stays. Exits with 1 for a lost meeting.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.sharedctypes
import os
import random
import socket
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from conformance.backends.gloo import GLOO
from conformance.recorder.group import init_process_group

MEETINGS_OF_A_PROCESS = 100
MEETING_TIMEOUT = timedelta(seconds=120)
#: The stranger finds new ports this often: far more often than ranks meet, and it leaves the processors to them.
STRANGERS_REST_S = 0.005
_LISTENING = "0A"
SENT = (b"", b"\0", b"GET / HTTP/1.0\r\n\r\n", os.urandom(64), b"\xff" * 4096)


def listeners_of(pids: list[int]) -> set[tuple[str, int]]:
    """Return the addresses on which processes listen."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(entry))
    found = set()
    with open("/proc/net/tcp") as table:
        next(table)
        for line in table:
            fields = line.split()
            if fields[3] != _LISTENING:
                break  # the kernel lists what listens first; thousands of closed connections follow
            if f"socket:[{fields[9]}]" in inodes:
                address, port = fields[1].split(":")
                found.add((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


def family_of(pid: int) -> list[int]:
    """Return the processes that `pid` has started, and those that these have started."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found, new = [], [pid]
    while new:
        found += (new := [child for parent in new for child in children.get(parent, ())])
    return found


def bother(number: multiprocessing.sharedctypes.Synchronized[int]) -> None:
    """Connect to whatever the processes of the parent listen on, until the parent is gone."""
    parent, chooser = os.getppid(), random.Random(0)
    kept: list[socket.socket] = []
    while os.getppid() == parent:
        for address in listeners_of(family_of(parent)):
            with contextlib.suppress(OSError):
                stray = socket.create_connection(address, timeout=0.2)
                number.value += 1
                stray.sendall(chooser.choice(SENT))
                if chooser.random() < 0.5:
                    kept.append(stray)
                else:
                    stray.close()
        while len(kept) > 100:
            kept.pop(0).close()
        time.sleep(STRANGERS_REST_S)


def meet_often(folder: str, rank: int, world_size: int, outcome: multiprocessing.connection.Connection) -> None:
    """Meet the other ranks again and again as this rank, and tell after each meeting how it went."""
    torch.set_num_threads(1)
    for number in range(MEETINGS_OF_A_PROCESS):
        try:
            place = FileStore(f"{folder}/{number}", world_size)
            init_process_group(GLOO, None, store=place, rank=rank, world_size=world_size, timeout=MEETING_TIMEOUT)
            ranks = torch.tensor([rank])
            dist.all_reduce(ranks)  # nobody leaves before all have come
            dist.destroy_process_group()
            said = "" if ranks.item() == sum(range(world_size)) else f"rank {rank} got the sum {ranks.item()}"
        except Exception as error:
            said = f"rank {rank}: {type(error).__name__}: {error}"
        outcome.send(said)
        if said:
            return


def meetings_of_new_processes(world_size: int) -> tuple[int, list[str]]:
    """Let new processes meet a hundred times; return how often they met, and what was said of a lost meeting."""
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ends:
        readers, ranks = [], []
        for rank in range(world_size):
            reader, writer = context.Pipe(duplex=False)
            ends.callback(reader.close)
            readers.append(reader)
            ranks.append(context.Process(target=meet_often, args=(folder, rank, world_size, writer), daemon=True))
            ends.callback(ranks[-1].kill)
            ranks[-1].start()
            writer.close()
        for number in range(MEETINGS_OF_A_PROCESS):
            said = [_heard(reader, rank) for rank, reader in enumerate(readers)]
            if any(said):
                return number, list(filter(None, said))
    return MEETINGS_OF_A_PROCESS, []


def _heard(reader: multiprocessing.connection.Connection, rank: int) -> str:
    try:
        return str(reader.recv()) if reader.poll(2 * MEETING_TIMEOUT.total_seconds()) else f"rank {rank} says nothing"
    except EOFError:
        return f"rank {rank} died"


def main() -> None:
    """Let ranks meet as often as the arguments ask for, and print the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--meetings", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--worlds", type=int, default=4, help="worlds that meet at the same time")
    arguments = parser.parse_args()
    multiprocessing.set_forkserver_preload(["torch.distributed", "conformance.recorder.group"])
    started = time.monotonic()
    met, lost, turn = 0, 0, 0
    number = multiprocessing.Value("l", 0)
    stranger = multiprocessing.Process(target=bother, args=(number,), daemon=True)
    stranger.start()
    with ThreadPoolExecutor(arguments.worlds) as worlds:
        while met < arguments.meetings and time.monotonic() - started < arguments.seconds:
            sizes = [2 + (turn + world) % 3 for world in range(arguments.worlds)]
            turn += 1
            for size, (times, said) in zip(sizes, worlds.map(meetings_of_new_processes, sizes), strict=True):
                met += times
                if said:
                    lost += 1
                    print(f"LOST {size} ranks: {said}", flush=True)
    stranger.terminate()
    print(
        f"{met} meetings of 2 to 4 ranks, {arguments.worlds} worlds at once, {number.value} stray connections, "
        f"{time.monotonic() - started:.0f} s, {lost} lost"
    )
    sys.exit(lost > 0 or number.value == 0)


if __name__ == "__main__":
    main()
