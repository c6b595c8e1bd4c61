"""What the harness asks of the Python that runs it."""

from __future__ import annotations

import sys

from conformance.errors import InterpreterError


def check_interpreter(optimisation: int = sys.flags.optimize) -> None:
    """Raise `InterpreterError` under `python -O` or PYTHONOPTIMIZE, which remove every `assert`.

    The truth asserts that its means are exact, and programs assert what they rely on: without these checks a wrong DDP
    could pass.
    """
    if optimisation:
        raise InterpreterError(
            f"this Python runs with optimisation level {optimisation} (python -O or PYTHONOPTIMIZE), which removes the"
            " assertions that verdicts rest on; start it without -O and unset PYTHONOPTIMIZE"
        )
