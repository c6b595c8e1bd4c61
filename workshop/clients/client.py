"""A client: a training script that knows torch's DDP, or leaves the DDP to a library, and nothing of this project."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance.errors import ClientError

#: The line by which a script names torch's DDP; another DDP comes in by another module's name.
_IMPORT = re.compile(r"^from torch\.nn\.parallel import DistributedDataParallel\b", re.MULTILINE)
#: What every script may import, and whose version says nothing about the client.
_EVERYWHERE = {"facts", "numpy", "torch", *sys.stdlib_module_names}


@dataclass(frozen=True, slots=True)
class Client:
    """One script of the folder of clients; `packages` are the libraries that it imports, `subject` its docstring."""

    name: str
    source: str
    subject: str
    packages: tuple[str, ...]

    @property
    def names_ddp(self) -> bool:
        """Whether the script itself wraps its model; otherwise a library does, and its import cannot be exchanged."""
        return _IMPORT.search(self.source) is not None

    def importing(self, module: str) -> str:
        """Return the source with the DDP imported from `module` instead of `torch.nn.parallel`."""
        return _IMPORT.sub(f"from {module} import DistributedDataParallel", self.source)

    @property
    def versions(self) -> tuple[str, ...]:
        """The libraries with their installed versions.

        Raises:
            ClientError: a library is not installed.

        """
        distributions = importlib.metadata.packages_distributions()
        if missing := [package for package in self.packages if package not in distributions]:
            raise ClientError(
                f"the client {self.name} imports {missing[0]}, which is not installed here:"
                " `bash ci/clients.sh` makes an environment that has it"
            )
        named = [distributions[package][0] for package in self.packages]
        return tuple(f"{name} {importlib.metadata.version(name)}" for name in named)


def load_clients(folder: Path, names: Sequence[str] = ()) -> tuple[Client, ...]:
    """Read the clients of a folder in the order of their names; all, if no names are given.

    Raises:
        ClientError: the folder has no clients, or none of a given name.

    """
    files = {file.stem: file for file in sorted(folder.glob("*.py")) if file.stem != "facts"}
    if not files:
        raise ClientError(
            f"there are no clients in {folder}: they are in a checkout of the repository, and in no wheel"
        )
    if unknown := [name for name in names if name not in files]:
        raise ClientError(f"there is no client {unknown[0]}; there are {', '.join(files)}")
    return tuple(_read(file) for name, file in files.items() if not names or name in names)


def _read(file: Path) -> Client:
    source = file.read_text(encoding="utf-8")
    tree = ast.parse(source, str(file))
    docstring = ast.get_docstring(tree)
    if docstring is None:
        raise ClientError(f"{file} has no docstring: its first line says what the client is")
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    return Client(file.stem, source, docstring.splitlines()[0].rstrip("."), tuple(sorted(imported - _EVERYWHERE)))
