"""The messages between controller, zygote and ranks, and how they are pickled.

`multiprocessing.connection` frames the messages; this module pickles them. torch's own pickling would send every tensor
through shared memory, which disappears with the rank that observed it, and plain pickle would write a zip-like archive
per tensor. A fact is a few numbers, so this module sends a tensor as its bytes, with dtype, shape and strides.
"""

from __future__ import annotations

import io
import pickle
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from conformance.observation import Observation, Raised
from conformance.subjects.subject import Subject

# ---------------------------------------------------------------------------------------------- controller <-> rank


@dataclass(frozen=True, slots=True)
class Job:
    """Controller to rank: run this scenario on this subject. The scenario is sent as its JSON data."""

    scenario: dict[str, Any]
    subject: Subject


@dataclass(frozen=True, slots=True)
class Ready:
    """Rank to controller, once: the default group is connected (`error` is None), or the error that prevented it."""

    error: Raised | None = None


#: Rank to controller: `Ready` once, then an `Observation` per `Job`.
FromRank = Ready | Observation

#: Makes a rank write every thread's Python stack into its stack file, whatever it is doing. A real-time signal, because
#: programs and subjects may use SIGUSR1 themselves.
STACK_SIGNAL = signal.SIGRTMIN + 3

# -------------------------------------------------------------------------------------------- controller <-> zygote


@dataclass(frozen=True, slots=True)
class Seat:
    """Everything that a forked process must know to become a rank.

    `backend` is the argument of `get_backend`. `directory` is private to the pool and holds the rendezvous file and the
    ranks' files. Without `recorded`, the default group is the backend's own, without a recorder. Ranks of several hosts
    rendezvous through a TCP store at `meeting` (host, port, prefix); `device_index` counts within a host.
    """

    pool: int
    rank: int
    world_size: int
    backend: str
    directory: str
    recorded: bool = True
    meeting: tuple[str, int, str] | None = None
    device_index: int | None = None

    def file(self, kind: str) -> str:
        """Return the path of this rank's file of that kind: `flight`, `stack` or `output`."""
        return f"{self.directory}/rank{self.rank}.{kind}"


@dataclass(frozen=True, slots=True)
class ForkPool:
    """Controller to zygote: fork these ranks; the rank's end of each connection follows as a handle."""

    seats: tuple[Seat, ...]


@dataclass(frozen=True, slots=True)
class SignalRank:
    """Controller to zygote: send `signum` to a rank and the processes that it has started, if it still lives."""

    pool: int
    rank: int
    signum: int


@dataclass(frozen=True, slots=True)
class Preloaded:
    """Zygote to controller, once: all imports are done (`error` is empty), or the traceback of the one that failed."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class Forked:
    """Zygote to controller: the process ids, in the order of the seats."""

    pool: int
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """Zygote to controller: a rank has ended; `status` is from `os.waitstatus_to_exitcode` (negative: a signal)."""

    pool: int
    rank: int
    status: int


# ----------------------------------------------------------------------------------------------------------- bytes


def send(connection: Connection, message: Any) -> None:
    """Send one message; raises `OSError` when the other side is gone."""
    connection.send_bytes(dumps(message))


def receive(connection: Connection) -> Any:
    """Receive one message; raises `EOFError` or `OSError` when the other side is gone."""
    return pickle.loads(connection.recv_bytes())


def dumps(message: Any) -> bytes:
    """Pickle `message`, tensors as their bytes."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(message)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> tuple[Callable[..., Any], tuple[Any, ...]] | Any:
        if type(value) is not Tensor or value.device.type != "cpu" or value.is_quantized:
            return NotImplemented
        if value.layout is torch.strided:
            dense = value.detach().resolve_conj().resolve_neg()
            data = dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
            strides = torch.empty_like(dense).stride()  # the tensor's own, unless its elements overlap or have gaps
            return _strided, (data, dense.dtype, tuple(dense.shape), strides)
        if value.layout is torch.sparse_coo:
            sparse = value.detach()
            return _sparse, (sparse._indices(), sparse._values(), tuple(sparse.shape), sparse.is_coalesced())
        return NotImplemented


def _strided(data: bytes, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    tensor = torch.empty_strided(shape, stride, dtype=dtype)
    if data:
        tensor.copy_(torch.frombuffer(bytearray(data), dtype=dtype).view(shape))
    return tensor


def _sparse(indices: Tensor, values: Tensor, shape: tuple[int, ...], coalesced: bool) -> Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=coalesced, check_invariants=True)
