"""What torch's DDP is known to do wrong in a client, with the issue that says so."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from conformance.errors import ClientError


@dataclass(frozen=True, slots=True)
class TorchFault:
    """A fault of torch's DDP; `evidence` is a part of the difference or exception that shows it."""

    sentence: str
    evidence: str
    link: str


def load_torch_faults(folder: Path) -> Mapping[str, TorchFault]:
    """Read `torch_faults.toml` of a folder of clients: the name of a client -> the fault that it shows.

    Raises:
        ClientError: an entry lacks a key, has another one, or is of no client.

    """
    file = folder / "torch_faults.toml"
    entries = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for name, entry in entries.items():
        if set(entry) != set(TorchFault.__slots__):
            raise ClientError(f"{file}, {name}: expected {', '.join(TorchFault.__slots__)}; found {', '.join(entry)}")
        if not (folder / f"{name}.py").is_file():
            raise ClientError(f"{file}, {name}: there is no client {name}.py beside it")
    return {name: TorchFault(**entry) for name, entry in entries.items()}
