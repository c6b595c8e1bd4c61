"""The flight record: a rank's phases and collectives, in a file that the controller reads if the rank does not answer.

A rank that is stopped, killed, or holds the GIL in C code does not report. Therefore every rank writes each phase
before it enters it, and each collective before it issues it, into a file that it has mapped into memory. A write is one
`pack_into` (about a microsecond, no system call), so the record is always on. It needs no lock: there is one writer,
and the controller reads when the rank is at rest; after an early read a field may be half old, half new.
"""

import contextlib
import mmap
import os
import struct
import time
import types
import typing
from dataclasses import dataclass, fields, replace
from operator import attrgetter

import msgspec

from conformance.observation import Collective

_PHASE = struct.Struct("=q160s")  # step, phase
_COUNTS = struct.Struct("=qqd")  # collectives issued, faults fired, when the rank last wrote
_SLOT = struct.Struct("=H")  # length of the encoded collective
_SLOT_BYTES = 512
#: How many collectives the record keeps; a new one overwrites the oldest.
NUM_SLOTS = 256
_as_tuple = attrgetter(*(field.name for field in fields(Collective)))
_encode = msgspec.msgpack.Encoder().encode
_kinds = types.GenericAlias(tuple, tuple(typing.get_type_hints(Collective).values()))
_decode = msgspec.msgpack.Decoder(_kinds).decode
_COUNTS_AT = _PHASE.size
_SLOTS_AT = 192
_SIZE = _SLOTS_AT + NUM_SLOTS * _SLOT_BYTES


@dataclass(frozen=True, slots=True)
class LastSeen:
    """The content of one rank's record.

    `collectives` are the last `NUM_SLOTS`, oldest first, none of them marked as finished: the record has no waits.
    `alive_at` is the time of the last write, by the monotonic clock of the rank's host.
    """

    phase: str
    step: int
    num_collectives: int
    faults_fired: int
    collectives: tuple[Collective, ...]
    alive_at: float = 0.0


class FlightRecord:
    """One rank's record; a `PhaseListener`. Call no method of it from another rank."""

    def __init__(self, path: str) -> None:
        """Create the record in this process, which is its only writer."""
        with open(path, "w+b") as file:
            os.posix_fallocate(file.fileno(), 0, _SIZE)  # a full disk then raises here, instead of SIGBUS at a write
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._num_collectives = self._faults_fired = 0
        self.phase = ""

    def start(self) -> None:
        """Clear the record for a new scenario."""
        self._num_collectives = self._faults_fired = 0
        self.entered("start", -1, True)

    def entered(self, phase: str, step: int, sync: bool) -> None:
        """Record that the rank enters `phase`."""
        self.phase = phase
        _PHASE.pack_into(self._map, 0, step, phase.encode())
        self._write_counts()

    def issued(self, collective: Collective) -> None:
        """Record that the rank is about to issue `collective`."""
        slot = _SLOTS_AT + self._num_collectives % NUM_SLOTS * _SLOT_BYTES
        data = _encode(_as_tuple(collective))
        if len(data) > _SLOT_BYTES - _SLOT.size:  # many tensors or ranks: keep only the total number of elements
            dtypes = tuple(dict.fromkeys(collective.dtypes))
            short = replace(collective, shapes=((collective.numel,),), dtypes=dtypes, members=())
            data = _encode(_as_tuple(short))
        _SLOT.pack_into(self._map, slot, len(data))
        self._map[slot + _SLOT.size : slot + _SLOT.size + len(data)] = data
        self._num_collectives += 1
        self._write_counts()

    def fault_fires(self) -> None:
        """Record that an injected fault fires now; afterwards the rank may be gone."""
        self._faults_fired += 1
        self._write_counts()

    def _write_counts(self) -> None:
        _COUNTS.pack_into(self._map, _COUNTS_AT, self._num_collectives, self._faults_fired, time.monotonic())


def read_flight(path: str) -> LastSeen:
    """Read another process's record; returns an empty `LastSeen` if the rank has not created one."""
    try:
        # Do not block if a subject has replaced the file by a pipe.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            data = file.read(_SIZE) or b""
    except OSError:
        data = b""
    if len(data) < _SIZE:
        return LastSeen("", -1, 0, 0, ())
    step, phase = _PHASE.unpack_from(data)
    num_collectives, faults_fired, alive_at = _COUNTS.unpack_from(data, _COUNTS_AT)
    collectives = []
    for ordinal in range(max(0, num_collectives - NUM_SLOTS), num_collectives):
        slot = _SLOTS_AT + ordinal % NUM_SLOTS * _SLOT_BYTES
        (length,) = _SLOT.unpack_from(data, slot)
        start = slot + _SLOT.size
        with contextlib.suppress(msgspec.DecodeError):  # half written, or overwritten by the subject
            collectives.append(Collective(*_decode(data[start : start + length])))
    name = phase.rstrip(b"\0").decode(errors="replace")
    return LastSeen(name, step, num_collectives, faults_fired, tuple(collectives), alive_at)
