"""Reads and writes files in folders of strangers: plain ones, so that no pipe holds it up and no link leads on.

Stored reports are compressed: where `report.json` is not there and `report.json.gz` is, the latter is read.
"""

import errno
import gzip
import io
import os
import stat
import zlib
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
    """Return the bytes of a plain file, decompressed if it ends in `.gz`; without `follow`, a symbolic link is none.

    Raises:
        ReportError: it cannot be read or decompressed, is a pipe, a device, a socket or a folder, or has more than
            `most_bytes`.

    """
    compressed = path.with_name(f"{path.name}.gz")
    if not os.path.lexists(path) and os.path.lexists(compressed):
        path = compressed
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
        with open(file, "rb") as opened:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise ReportError(f"cannot read {path}: it is no plain file")
            if most_bytes is not None and (length := os.fstat(file).st_size) > most_bytes:
                raise ReportError(f"{path} has {length:,} bytes, and may have {most_bytes:,}: is it one report?")
            content = opened.read()
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}") from error
    return _decompressed(path, content, most_bytes) if path.suffix == ".gz" else content


def _decompressed(path: Path, content: bytes, most_bytes: int | None) -> bytes:
    """Return what was compressed, without unpacking more of a stranger's file than it may have."""
    try:
        found = gzip.GzipFile(fileobj=io.BytesIO(content)).read(-1 if most_bytes is None else most_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ReportError(f"cannot read {path}: gzip cannot decompress it") from error
    if most_bytes is not None and len(found) > most_bytes:
        raise ReportError(f"{path} holds more than {most_bytes:,} bytes: is it one report?")
    return found
