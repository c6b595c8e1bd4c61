"""Writes a starter: fills the templates of one kind in with a name."""

import importlib.util
import keyword
import re
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from conformance.errors import ConformanceError

KINDS = ("backend", "device", "subject")
_TEMPLATES = Path(__file__).parent
_SUFFIX = ".jinja"
#: Devices and backends of torch and of this suite: an adapter of such a name would never be found.
_TAKEN = {
    "cpu", "cuda", "gloo", "hpu", "meta", "mpi", "mps", "mtia", "nccl", "sim", "sim_alone", "sim_late", "ucc", "xccl",
    "xpu",
}  # fmt: skip
#: This part of a template's path stands for the name of the new package.
_PACKAGE = "package"


class StarterError(ConformanceError):
    """A starter cannot be written: its name is taken or invalid, or its folder exists."""


@dataclass(frozen=True, slots=True)
class Starter:
    """A package to be written: `name` is what the user types, `package` what Python imports."""

    kind: str
    name: str

    @property
    def package(self) -> str:
        """The name as an import package."""
        return self.name.lower().replace("-", "_")

    @property
    def class_name(self) -> str:
        """The name as a class."""
        return "".join(part.capitalize() for part in self.package.split("_"))

    def write(self, parent: Path) -> tuple[Path, ...]:
        """Write the starter into the new folder `parent`/`name` and return its files.

        Raises `StarterError`, before it writes anything, for a name that is no package name, for the name of an
        existing module, and for a folder that exists.
        """
        self._check(parent)
        root = parent / self.name
        environment = Environment(
            loader=FileSystemLoader(_TEMPLATES), undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
        )
        written = []
        for template in sorted((_TEMPLATES / self.kind).rglob(f"*{_SUFFIX}")):
            relative = template.relative_to(_TEMPLATES)
            parts = [part.replace(_PACKAGE, self.package) for part in relative.parts[1:]]
            path = root.joinpath(*parts).with_suffix("")
            path.parent.mkdir(parents=True, exist_ok=True)
            text = environment.get_template(relative.as_posix()).render(
                name=self.name, package=self.package, class_name=self.class_name
            )
            path.write_text(text)
            written.append(path)
        return tuple(written)

    def _check(self, parent: Path) -> None:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,99}", self.name) or keyword.iskeyword(self.package):
            raise StarterError(
                f"{self.name!r} cannot be the name of a package: expected a letter, then at most 99 letters, digits, - "
                "and _, and no word that Python keeps for itself"
            )
        if self.package in _TAKEN:
            raise StarterError(f"torch or this suite calls something else {self.name}; choose another name")
        if importlib.util.find_spec(self.package) is not None:
            raise StarterError(f"a module {self.package} exists already and would be hidden; choose another name")
        if (parent / self.name).exists():
            raise StarterError(f"{parent / self.name} exists already; nothing is overwritten")
