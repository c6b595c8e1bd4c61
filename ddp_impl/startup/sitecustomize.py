"""Run by Python in processes that a script under `python -m ddp_impl` starts: torch's import ends in `install`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_HERE = Path(__file__).resolve().parent


class AfterTorch(MetaPathFinder):
    """Finds `torch` as usual, and installs our class when its import is complete."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return torch's own spec with an import that ends in `install`; None for any other module."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        import_torch = loader.exec_module

        def import_and_install(module: ModuleType) -> None:
            import_torch(module)
            if (root := str(_HERE.parent.parent)) not in sys.path:
                sys.path.append(root)
            from ddp_impl.api.distributed import install

            install()

        loader.exec_module = import_and_install
        return spec


def run_hidden() -> None:
    """Run the `sitecustomize` that Python would have run without this one, if there is any."""
    elsewhere = [place for place in sys.path if Path(place).resolve() != _HERE]
    spec = PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, AfterTorch())
    run_hidden()
