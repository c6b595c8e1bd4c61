"""The socket in a zygote's private directory, to which further controllers connect."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NAME = "zygote.socket"
#: More controllers than these wait in `connect` until the zygote has accepted one.
_BACKLOG = 128


def listen_for_controllers(directory: str | Path) -> socket.socket:
    """Return the socket of the zygote in `directory`, to which further controllers `connect`."""
    listener = socket.socket(socket.AF_UNIX)
    with _address(directory) as address:
        listener.bind(address)
    listener.listen(_BACKLOG)
    return listener


def accepted(listener: socket.socket) -> socket.socket:
    """Return a connection of one who has connected; waits until somebody does."""
    return listener.accept()[0]


def connect(directory: str | Path) -> socket.socket:
    """Return a connection to the zygote of `directory`. Raises `OSError` if there is none any more."""
    connected = socket.socket(socket.AF_UNIX)
    try:
        with _address(directory) as address:
            connected.connect(address)
    except OSError:
        connected.close()
        raise
    return connected


@contextmanager
def _address(directory: str | Path) -> Iterator[str]:
    """Yield an address that is short enough for a socket, whatever the name of the directory."""
    handle = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{_NAME}"
    finally:
        os.close(handle)
