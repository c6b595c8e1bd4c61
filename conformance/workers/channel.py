"""`Channel`: one end of a connection between two processes that need not trust each other.

Messages are data: `msgspec` decodes them into the types that this end expects, and nothing that arrives is imported,
called or unpickled. No read waits without a deadline, also not in the middle of a message: a process that announces a
message and then says no more is as silent as one that says nothing at all.
"""

import select
import socket
import struct
from collections.abc import Collection, Iterable, Sequence
from multiprocessing import connection
from typing import Any, Protocol

import msgspec

from conformance.waiting import machine_time
from conformance.waiting.limits import LOST_S

#: The longest message: thousands of times what a rank observes, and little enough to hold in memory.
LIMIT_BYTES = 1 << 28

_LENGTH = struct.Struct("=I")
_CHUNK_BYTES = 1 << 20
_HANDLES_AT_ONCE = 100  # Linux takes 253
_encoder = msgspec.msgpack.Encoder()


class Readable(Protocol):
    """What has a file descriptor: a channel, a socket."""

    def fileno(self) -> int:
        """Return the file descriptor."""


def wait(sources: Iterable[Readable | int], timeout_s: float | None) -> Collection[object]:
    """Return those of `sources` that can be read or have ended, as soon as there is one, at most after `timeout_s`.

    `timeout_s` is in seconds of `machine_time`.
    """
    readable: Any = list(sources)
    return machine_time.wait_for(lambda turn_s: connection.wait(readable, turn_s), timeout_s)


class MessageError(Exception):
    """What arrived is no message that this end expects: too long, malformed, or of another kind."""


def _from_extension(code: int, data: memoryview) -> Any:
    """Return what an extension holds; the first imports torch, which a zygote that was begun before does meanwhile."""
    from conformance.workers.tensors import from_extension

    return from_extension(code, data)


class Channel:
    """Sends and receives whole messages over a connected stream socket. One thread may send while another receives."""

    def __init__(self, connected: socket.socket, expects: Any, limit_bytes: int = LIMIT_BYTES) -> None:
        """Take over the socket; `expects` is the type, or the union of types, of the messages that arrive here."""
        connected.setblocking(False)
        self._socket = connected
        self._decoder = msgspec.msgpack.Decoder(expects, ext_hook=_from_extension)
        self.limit_bytes = limit_bytes
        self._arrived = bytearray()

    def fileno(self) -> int:
        """Return the file descriptor, for `wait`."""
        return self._socket.fileno()

    def send(self, message: object, timeout_s: float | None = LOST_S, handles: Sequence[int] = ()) -> None:
        """Send one message, and after it the file descriptors `handles`.

        Raises `OSError` when the other side is gone or, `TimeoutError`, has not read the message after `timeout_s`.
        """
        data = _encoder.encode(message)
        if len(data) > self.limit_bytes:
            raise MessageError(f"a message of {len(data)} bytes is too long; at most {self.limit_bytes} are sent")
        deadline = None if timeout_s is None else machine_time.now() + timeout_s
        left = memoryview(_LENGTH.pack(len(data)) + data)
        while left:
            try:
                left = left[self._socket.send(left, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                self._await(select.POLLOUT, deadline)
        for start in range(0, len(handles), _HANDLES_AT_ONCE):
            self._await(select.POLLOUT, deadline)
            socket.send_fds(self._socket, [b"\0"], handles[start : start + _HANDLES_AT_ONCE])

    def receive(self, timeout_s: float | None) -> Any:
        """Return the next message. Raises `TimeoutError` if it is not here, whole, after `timeout_s`; see `arrived`."""
        deadline = None if timeout_s is None else machine_time.now() + timeout_s
        while (message := self.arrived()) is None:
            self._await(select.POLLIN, deadline)
        return message

    def arrived(self) -> Any | None:
        """Return the next message if all of it is here, else None. Does not wait.

        Raises:
            EOFError: the other side is gone.
            OSError: the connection is broken.
            MessageError: this is no message that this end expects; nothing after it can be read.

        """
        if len(self._arrived) < _LENGTH.size and not self._read_up_to(_LENGTH.size):
            return None
        (length,) = _LENGTH.unpack_from(self._arrived)
        if length > self.limit_bytes:
            raise MessageError(f"announced a message of {length} bytes; at most {self.limit_bytes} are expected")
        if not self._read_up_to(_LENGTH.size + length):
            return None
        data, self._arrived = memoryview(self._arrived)[_LENGTH.size :], bytearray()
        try:
            return self._decoder.decode(data)
        except Exception as error:  # also what building a value from its fields raises
            raise MessageError(f"not a message that is expected here: {error}") from error

    def receive_handles(self, number: int, timeout_s: float) -> list[int]:
        """Return the file descriptors that follow a message. Raises as `receive` does."""
        deadline = machine_time.now() + timeout_s
        received: list[int] = []
        while len(received) < number:
            self._await(select.POLLIN, deadline)
            byte, handles, _, _ = socket.recv_fds(self._socket, 1, _HANDLES_AT_ONCE)
            if not byte:
                raise EOFError
            received += handles
        return received

    @property
    def half_a_message(self) -> bool:
        """Whether the other side has begun a message and not ended it."""
        return bool(self._arrived)

    def readable(self) -> bool:
        """Whether there is something to read, be it the end."""
        return bool(connection.wait([self._socket], 0))

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _read_up_to(self, size: int) -> bool:
        """Read until `size` bytes are here, never more, so that the rest stays visible to `wait`."""
        while (missing := size - len(self._arrived)) > 0:
            try:
                chunk = self._socket.recv(min(missing, _CHUNK_BYTES))
            except BlockingIOError:
                return False
            if not chunk:
                raise EOFError
            self._arrived += chunk
        return True

    def _await(self, event: int, deadline: float | None) -> None:
        poll = select.poll()
        poll.register(self._socket, event)
        left_s = None if deadline is None else max(0.0, deadline - machine_time.now())
        if not machine_time.wait_for(lambda turn_s: poll.poll(None if turn_s is None else 1000 * turn_s), left_s):
            raise TimeoutError("half of a message, and no more" if self.half_a_message else "no message")


def pair(ours: Any, theirs: Any) -> tuple[Channel, Channel]:
    """Return two connected channels, the first of which expects `ours` and the second `theirs`."""
    one, other = socket.socketpair()
    return Channel(one, ours), Channel(other, theirs)
