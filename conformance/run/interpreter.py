"""What the harness asks of the Python that runs it."""

import os
import sys
from collections.abc import Sequence

from conformance.errors import InterpreterError


def check_working_directory() -> None:
    """Raise `InterpreterError` if the working directory has been removed; half of what Python does needs one."""
    try:
        os.getcwd()
    except OSError as error:
        raise InterpreterError(
            f"the working directory is gone ({error.strerror}); start this in another one"
        ) from error


def check_interpreter(
    optimisation: int = sys.flags.optimize, warning_options: Sequence[str] = tuple(sys.warnoptions)
) -> None:
    """Raise `InterpreterError` under `python -O` or PYTHONOPTIMIZE, which remove every `assert`, and `-W error`.

    Our own verdicts rest on none (ruff's S101 is on outside tests), but torch, backends and subjects assert what they
    were given: without these checks they would be other software than users run.
    """
    if optimisation:
        raise InterpreterError(
            f"this Python runs with optimisation level {optimisation} (python -O or PYTHONOPTIMIZE), which removes the"
            " assertions of torch and of the DDP under test; start it without -O and unset PYTHONOPTIMIZE"
        )
    if any(option.startswith("e") for option in warning_options):
        raise InterpreterError(
            f"this Python makes errors of warnings ({', '.join(warning_options)}), torch's own among them; start it"
            " without -W error and unset PYTHONWARNINGS"
        )
