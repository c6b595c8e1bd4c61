"""What the package of a wrapper's class offers beside the class."""

import importlib
from typing import Any


def offered_beside(wrapper: type, name: str) -> Any:
    """Return `name` of the package of a class, or of a class that it derives from; None if none has it."""
    packages = (importlib.import_module(base.__module__.partition(".")[0]) for base in wrapper.__mro__)
    return next((getattr(package, name) for package in packages if hasattr(package, name)), None)
