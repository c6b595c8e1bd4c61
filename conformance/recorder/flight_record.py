"""The flight record: what a rank was doing, in a file that the controller can read when the rank does not answer.

A rank that is stopped, or that sits in C code without letting go of the interpreter, will not report; one that was
killed cannot. So every rank writes where it is into a file that it has mapped into memory, before it goes there: the
phase, and each collective as it is issued. The controller maps the same file. A write is one `pack_into` (about a
microsecond, no system call), cheap enough to be always on. There is one writer and the reader comes when the writer
is at rest, so no lock is needed; a reader who comes too early sees a field half old, half new, and nothing worse.
"""

from __future__ import annotations

import marshal
import mmap
import os
import struct
import time
from dataclasses import dataclass, fields, replace
from operator import attrgetter

from conformance.history import Collective

_PHASE = struct.Struct("=q32s")  # step, phase
_COUNTS = struct.Struct("=qqd")  # collectives issued, faults fired, when the rank last wrote
_SLOT = struct.Struct("=H")  # length of the marshalled collective
_SLOT_BYTES = 512
#: The last so many collectives are kept; older ones make room.
NUM_SLOTS = 256
_as_tuple = attrgetter(*(field.name for field in fields(Collective)))
_COUNTS_AT = _PHASE.size
_SLOTS_AT = 64
_SIZE = _SLOTS_AT + NUM_SLOTS * _SLOT_BYTES


@dataclass(frozen=True, slots=True)
class LastSeen:
    """What the record of one rank said.

    `collectives` are the last `NUM_SLOTS` at most, oldest first, as they were when they were issued: none is marked as
    finished, since whether somebody waited for one is known to the rank alone. `alive_at` is when the rank last wrote,
    by the monotonic clock of its host.
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
            os.posix_fallocate(file.fileno(), 0, _SIZE)  # on a full disk an error here, and not SIGBUS at some write
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._num_collectives = self._faults_fired = 0
        self.phase = ""

    def start(self) -> None:
        """Forget everything: a new scenario begins."""
        self._num_collectives = self._faults_fired = 0
        self.entered("start", -1, True)

    def entered(self, phase: str, step: int, sync: bool) -> None:
        """Note that the rank enters `phase`."""
        self.phase = phase
        _PHASE.pack_into(self._map, 0, step, phase.encode())
        self._write_counts()

    def issued(self, collective: Collective) -> None:
        """Note that the rank is about to issue `collective`."""
        slot = _SLOTS_AT + self._num_collectives % NUM_SLOTS * _SLOT_BYTES
        data = marshal.dumps(_as_tuple(collective))
        if len(data) > _SLOT_BYTES - _SLOT.size:  # many tensors, or ranks: the number of elements must do
            dtypes = tuple(dict.fromkeys(collective.dtypes))
            short = replace(collective, shapes=((collective.numel,),), dtypes=dtypes, members=())
            data = marshal.dumps(_as_tuple(short))
        _SLOT.pack_into(self._map, slot, len(data))
        self._map[slot + _SLOT.size : slot + _SLOT.size + len(data)] = data
        self._num_collectives += 1
        self._write_counts()

    def fault_fires(self) -> None:
        """Note that an injected fault fires now; afterwards the rank may be gone."""
        self._faults_fired += 1
        self._write_counts()

    def _write_counts(self) -> None:
        _COUNTS.pack_into(self._map, _COUNTS_AT, self._num_collectives, self._faults_fired, time.monotonic())


def read_flight(path: str) -> LastSeen:
    """Read another process's record; a rank that did not get as far as creating one gives an empty `LastSeen`."""
    try:
        with open(path, "rb") as file:
            data = file.read(_SIZE)
    except FileNotFoundError:
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
        collectives.append(Collective(*marshal.loads(data[start : start + length])))
    name = phase.rstrip(b"\0").decode(errors="replace")
    return LastSeen(name, step, num_collectives, faults_fired, tuple(collectives), alive_at)
