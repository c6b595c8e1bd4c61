"""What torch's DDP is known to do wrong in a client, with the issue that says so."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from conformance.errors import ClientError

_KEYS = {"sentence", "evidence", "link"}


@dataclass(frozen=True, slots=True)
class TorchFault:
    """A fault of torch's DDP; it explains the differences and the exception that contain one of the `evidence`."""

    sentence: str
    evidence: tuple[str, ...]
    link: str

    def explains(self, difference: str) -> bool:
        """Whether this fault shows itself by such a difference."""
        return any(part in difference for part in self.evidence)


def load_torch_faults(folder: Path) -> Mapping[str, TorchFault]:
    """Read `torch_faults.toml` of a folder of clients: the name of a client -> the fault that it shows.

    Raises:
        ClientError: an entry lacks a key, has another one, or is of no client.

    """
    file = folder / "torch_faults.toml"
    entries = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for name, entry in entries.items():
        if set(entry) != _KEYS:
            raise ClientError(f"{file}, {name}: expected {', '.join(sorted(_KEYS))}; found {', '.join(entry)}")
        if not (folder / f"{name}.py").is_file():
            raise ClientError(f"{file}, {name}: there is no client {name}.py beside it")
    return {
        name: TorchFault(entry["sentence"], tuple(entry["evidence"]), entry["link"]) for name, entry in entries.items()
    }
