"""Reads a launcher's environment variables, and connects its processes with the one that leads."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from conformance.errors import ConformanceError

#: How long processes wait for each other at the start; a cluster may start them minutes apart.
MEETING_TIMEOUT_S = 300.0
#: How long a new connection may take to prove the secret: a port scanner that sends nothing must not block the agents.
_ANSWER_TIMEOUT_S = 10
_KEY = "ddp_conformance/controller"
_SIOCGIFADDR = 0x8915

#: For each launcher the variables that hold rank, world size and rank within the host.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
}


@dataclass(frozen=True, slots=True)
class Place:
    """One of `num_processes` processes of a launcher, and the address (`master`) at which they meet."""

    index: int
    num_processes: int
    local_index: int
    host: str
    master: str


def place_of(variables: Mapping[str, str]) -> Place:
    """Read this process's place from the launcher's environment variables.

    Raises:
        ConformanceError: no launcher has set its variables, or MASTER_ADDR or MASTER_PORT is not set.

    """
    for names in _LAUNCHERS.values():
        if all(name in variables for name in names):
            index, num_processes, local_index = (int(variables[name]) for name in names)
            break
    else:
        raise ConformanceError(
            "--attach is for processes that torchrun, srun or mpirun has started; none of them has set"
            f" {', '.join(names[0] for names in _LAUNCHERS.values())} here"
        )
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not variables.get(name)]:
        raise ConformanceError(f"set {' and '.join(missing)}, so that the {num_processes} processes can meet")
    return Place(index, num_processes, local_index, socket.gethostname(), variables["MASTER_ADDR"])


def meet(place: Place) -> Store:
    """Return the c10d store that all processes share; every process must call it."""
    os.environ.update(RANK=str(place.index), WORLD_SIZE=str(place.num_processes))  # as torchrun sets them
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=MEETING_TIMEOUT_S)))
    assert isinstance(store, Store)
    return store


class Door:
    """The controller's listening socket, and the secret that agents must prove to connect."""

    def __init__(self, place: Place, store: Store) -> None:
        """Listen on the first host's address; publish the address and the secret in `store`."""
        self._secret = secrets.token_bytes(32)
        self._socket = socket.create_server((place.master, 0))
        self._socket.settimeout(MEETING_TIMEOUT_S)
        address, port = self._socket.getsockname()[:2]
        self.address = str(address)
        store.set(_KEY, json.dumps([self.address, port, self._secret.hex()]))

    def admit(self) -> Connection:
        """Return the next agent's connection; close others. Raises `ConformanceError` if no agent comes in time."""
        while True:
            try:
                accepted, _ = self._socket.accept()
            except TimeoutError as error:
                raise ConformanceError(f"a process did not join within {MEETING_TIMEOUT_S:g} s") from error
            with accepted:
                connection = Connection(os.dup(accepted.fileno()))
                _limit_waiting(accepted, _ANSWER_TIMEOUT_S)
                try:
                    deliver_challenge(connection, self._secret)
                    answer_challenge(connection, self._secret)
                except (AuthenticationError, EOFError, OSError):
                    connection.close()
                    continue
                _limit_waiting(accepted, 0)
                return connection

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


def _limit_waiting(joined: socket.socket, seconds: int) -> None:
    """Limit how long a read from the socket waits, in seconds (0: no limit), also through another descriptor of it."""
    joined.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def knock(store: Store) -> tuple[Connection, str]:
    """Connect to the controller; returns the connection and this host's own address in it."""
    address, port, secret = json.loads(store.get(_KEY))
    joined = socket.create_connection((address, port), timeout=MEETING_TIMEOUT_S)
    joined.settimeout(None)
    own_address = str(joined.getsockname()[0])
    connection = Connection(joined.detach())
    answer_challenge(connection, bytes.fromhex(secret))
    deliver_challenge(connection, bytes.fromhex(secret))
    return connection, own_address


def interface_of(address: str) -> str:
    """Return the name of the network interface that has the IPv4 `address`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # the interface has no address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return "lo"
