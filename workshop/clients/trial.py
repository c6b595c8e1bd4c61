"""One run of a client under torchrun, and the facts that its ranks recorded."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.errors import ClientError
from workshop.clients.client import Client
from workshop.clients.way import THE_DDP, Way

WORLD_SIZE = 2
_TORCHRUN = (
    *("-m", "torch.distributed.run", "--nproc-per-node", str(WORLD_SIZE), "--redirects", "3"),
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "127.0.0.1"),
)
#: One thread, so that sums have one order; no network, no accelerator.
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}
_TIMEOUT_S = 150.0
_EXCEPTION = re.compile(
    r"^(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt|Failure)\b.*)$", re.MULTILINE
)

Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of one run: the facts of each rank, and how it failed, "" if it did not."""

    facts: tuple[Facts, ...]
    error: str
    duration_s: float


def tried(client: Client, way: Way, folder: Path) -> Trial:
    """Run `client` of `folder` with the DDP that it gets by `way`, in a private working folder."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="client-") as private:
        place = Path(private)
        (place / "work").mkdir()
        script = place / f"{client.name}.py"
        script.write_text(client.importing(way.module) if way.module else client.source, encoding="utf-8")
        command = [sys.executable, *_TORCHRUN, "--log-dir", str(place / "log")]
        command += [str(folder.parent / "without_teardown.py"), *way.launcher, str(script)]
        path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))
        environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": path, "CLIENT_FACTS": str(place)}
        status = _status(command, place / "work", environment)
        error = "" if status == 0 else _error(status, place / "log")
        facts = tuple(_facts(place / f"rank{rank}.jsonl", way) for rank in range(WORLD_SIZE))
    if not error and (idle := [rank for rank, of_rank in enumerate(facts) if not _mentions_ddp(of_rank)]):
        error = f"rank {idle[0]} recorded no model of class {way.ddp_class}"
    return Trial(facts, error, time.monotonic() - begun)


def _status(command: list[str], work: Path, environment: dict[str, str]) -> int | None:
    """Return the exit status, None when it took too long; no process of it is left."""
    with subprocess.Popen(
        command, cwd=work, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as torchrun:
        try:
            return torchrun.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            torchrun.terminate()  # torchrun then ends its ranks, by force after half a minute
            torchrun.wait()


def _error(status: int | None, log: Path) -> str:
    """Return the last exception of the rank that printed one, in the order of the ranks."""
    if status is None:
        return f"it ran for more than {_TIMEOUT_S:.0f} s"
    for file in sorted(log.rglob("stderr.log")):
        if found := _EXCEPTION.findall(file.read_text(encoding="utf-8", errors="replace")):
            return f"rank {file.parent.name}: {found[-1]}"
    return f"torchrun exited with {status}, and no rank printed an exception"


def _facts(file: Path, way: Way) -> Facts:
    """Read what one rank recorded."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    facts: dict[str, Any] = {}
    for name, value in map(json.loads, lines):
        if name in facts:
            raise ClientError(f"{file.name}: the client records {name!r} twice; each fact needs a name of its own")
        facts[name] = _with_ddp_named(value, way)
    return facts


def _with_ddp_named(value: Any, way: Way) -> Any:
    if isinstance(value, dict):
        return {key: _with_ddp_named(one, way) for key, one in value.items()}
    if isinstance(value, list):
        return [_with_ddp_named(one, way) for one in value]
    return THE_DDP if value == way.ddp_class else value


def _mentions_ddp(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_mentions_ddp, value.values()))
    return any(map(_mentions_ddp, value)) if isinstance(value, list) else value == THE_DDP
