"""`python -m ddp_impl.torch_internals`: which private names the installed torch has; exits with 1 if one is missing."""

from __future__ import annotations

import platform
import sys

import torch

from ddp_impl.torch_internals.names import is_there, needed


def _check() -> int:
    """Print a line for each name, and what is lost with those that are missing."""
    print(f"torch {torch.__version__} Python {platform.python_version()}")
    lost = set()
    for feature, names in needed().items():
        for name in names:
            there = is_there(name)
            lost |= set() if there else {feature}
            print(f"{'there' if there else 'MISSING':8}{name:90}{feature}")
    for feature in sorted(lost):
        kept = "nothing works" if feature == "averaging" else "all else works"
        print(f"torch {torch.__version__}: without {feature}, {kept}")
    return bool(lost)


if __name__ == "__main__":
    sys.exit(_check())
