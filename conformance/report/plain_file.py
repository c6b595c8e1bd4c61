"""Reads files that strangers may have written: plain ones only, so that no pipe holds up the reader."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from conformance.errors import ReportError


def read_plain(path: Path, *, follow: bool = True, most_bytes: int | None = None) -> bytes:
    """Return the bytes of a plain file; without `follow`, a symbolic link is none.

    Raises:
        ReportError: it cannot be read, is a pipe, a device, a socket or a folder, or has more than `most_bytes`.

    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
        with open(file, "rb") as opened:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise ReportError(f"cannot read {path}: it is no plain file")
            if most_bytes is not None and (length := os.fstat(file).st_size) > most_bytes:
                raise ReportError(f"{path} has {length:,} bytes, and may have {most_bytes:,}: is it one report?")
            return opened.read()
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}") from error
