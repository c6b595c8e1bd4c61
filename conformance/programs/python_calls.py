"""Counts calls of Python functions: a cost without noise."""

import sys
from collections.abc import Callable


def num_calls(function: Callable[[], object]) -> int:
    """Return how many functions of Python this thread calls within `function`, which counts as one."""
    num = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal num
        num += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return num
