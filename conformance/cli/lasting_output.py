"""Standard output that may fail: the terminal's reader has gone, or the disk of a log is full.

A run is worth its files and its exit code all the same. `| head` reads what it wants and leaves, which is no failure.
"""

import contextlib
import os
from typing import Any, TextIO


class LastingOutput:
    """A text stream that notes the first error of the one below, and from then on writes nowhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        """Write `text`, or note why that fails."""
        return self._tried(self._stream.write, text) or 0

    def flush(self) -> None:
        """Pass on what has been written, or note why that fails."""
        self._tried(self._stream.flush)

    @property
    def complaint(self) -> str:
        """Why something is missing from the output; nothing if nothing is, or if its reader did not want it."""
        if self.error is None or isinstance(self.error, BrokenPipeError):
            return ""
        return f"cannot write to standard output: {self.error.strerror}"

    def _tried(self, act: Any, *arguments: str) -> Any:
        if self.error is not None:
            return None
        try:
            return act(*arguments)
        except OSError as error:
            self.error = error
            with contextlib.suppress(OSError, ValueError):  # what is buffered must not fail again when Python ends
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)
            return None

    def __getattr__(self, name: str) -> Any:
        """Return whatever else the stream has."""
        return getattr(self._stream, name)
