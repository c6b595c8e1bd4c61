"""Caches the suite's scenarios beside its bytecode: making them takes seconds, and imports torch and every chapter.

They depend on the suite's own files, Python and torch alone. A file that is older, torn or of another release is
rewritten; where Python may write no bytecode, nothing is cached.
"""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import marshal
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from conformance.scenario import Fault, Scenario, Step

_SUITE = Path(__file__).parent.parent


def kept_scenarios(make: Callable[[], tuple[Scenario, ...]], suite: Path = _SUITE) -> tuple[Scenario, ...]:
    """Return `make()`, from the file of an earlier call if no file of `suite` has changed."""
    file = Path(importlib.util.cache_from_source(str(suite / "scenarios.py"))).with_suffix(".kept")
    made_of = fingerprint(suite)
    with contextlib.suppress(OSError, ValueError, EOFError, TypeError):  # what marshal raises for a torn file
        kept_of, kept = marshal.loads(file.read_bytes())
        if kept_of == made_of:
            return tuple(_scenario(fields) for fields in kept)
    scenarios = make()
    if not sys.dont_write_bytecode:
        with contextlib.suppress(OSError):
            _write(file, marshal.dumps((made_of, [scenario.to_json() for scenario in scenarios])))
    return scenarios


def fingerprint(suite: Path = _SUITE) -> str:
    """Return a digest of versions and of names, sizes and times of all files on which scenarios depend."""
    digest = hashlib.sha256(f"{sys.version} {importlib.metadata.version('torch')}".encode())
    for path, status in sorted(_sources(suite)):
        digest.update(f"{path} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _sources(folder: str | os.PathLike[str]) -> Iterator[tuple[str, os.stat_result]]:
    for entry in os.scandir(folder):
        if entry.is_dir():
            if entry.name not in ("__pycache__", "tests"):
                yield from _sources(entry.path)
        elif entry.name.endswith((".py", ".toml")):
            yield entry.path, entry.stat()


def _scenario(fields: dict[str, Any]) -> Scenario:
    """Return the scenario without the checks of `Scenario.from_json`: this module wrote the fields itself."""
    del fields["schema_version"]
    steps = tuple(Step(**step) for step in fields["schedule"])
    faults = tuple(Fault(**fault) for fault in fields["faults"])
    return Scenario(**{**fields, "schedule": steps, "faults": faults})


def _write(file: Path, data: bytes) -> None:
    file.parent.mkdir(exist_ok=True)
    own = file.with_suffix(f".{os.getpid()}")
    own.write_bytes(data)
    own.replace(file)
