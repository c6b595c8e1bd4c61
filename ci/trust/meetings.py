"""Lets new ranks meet again and again beside a program that connects to every port they listen on.

    python ci/trust/meetings.py [--meetings 20000] [--seconds 3600]

The stranger connects, sends nothing, rubbish or half a greeting, and leaves or stays. Exits with 1 for a lost meeting.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import time
from pathlib import Path

from conformance.backends.gloo import GLOO
from conformance.scenario import Scenario, Step
from conformance.subjects.subject import KNOWN
from conformance.tests.processes import processes_under
from conformance.workers.controller import Controller

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
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == _LISTENING and f"socket:[{fields[9]}]" in inodes:
            address, port = fields[1].split(":")
            found.add((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


def bother(work_dir: str, number: multiprocessing.sharedctypes.Synchronized[int]) -> None:
    """Connect to whatever the processes of `work_dir` listen on, until the parent is gone."""
    parent, chooser = os.getppid(), random.Random(0)
    kept: list[socket.socket] = []
    while os.getppid() == parent:
        for address in listeners_of(processes_under(Path(work_dir))):
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


def main() -> None:
    """Let ranks meet as often as the arguments ask for, and print the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--meetings", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=3600.0)
    arguments = parser.parse_args()
    scenario = Scenario("meetings/MEET-01/x", ("MEET-01",), "train", schedule=(Step(),), deadline_s=10.0)
    started = time.monotonic()
    met, lost = 0, 0
    number = multiprocessing.Value("l", 0)
    with tempfile.TemporaryDirectory() as folder, Controller(GLOO, work_dir=Path(folder)) as controller:
        stranger = multiprocessing.Process(target=bother, args=(folder, number), daemon=True)
        stranger.start()
        while met < arguments.meetings and time.monotonic() - started < arguments.seconds:
            size = 2 + met % 3
            seen = controller.run(scenario.replace(world_size=size), KNOWN["torch"], fresh=True)
            met += 1
            if any(one.fate.kind != "returned" for one in seen.values()):
                lost += 1
                print(f"LOST {size} ranks: {[str(one.raised or one.fate) for one in seen.values()]}", flush=True)
        stranger.terminate()
    print(f"{met} meetings of 2 to 4 ranks, {number.value} stray connections, {lost} lost")
    sys.exit(lost > 0 or number.value == 0)


if __name__ == "__main__":
    main()
