"""Reads and writes files in folders of strangers: plain ones, so that no pipe holds it up and no link leads on."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from conformance.errors import ReportError


def write_plain(path: Path, content: str | bytes) -> None:
    """Write a file anew; raises `ReportError`, also for a symbolic link, which may lead anywhere, outside /dev."""
    data = content if isinstance(content, bytes) else content.encode("utf-8", "replace")
    follow = 0 if Path("/dev") in path.parents else os.O_NOFOLLOW
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | follow, 0o666)
        with open(file, "wb") as opened:
            opened.write(data)
    except OSError as error:
        why = "it is a symbolic link, which may lead anywhere" if error.errno == errno.ELOOP else error.strerror
        raise ReportError(f"cannot write {path}: {why}") from error


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
