"""Reads a launcher's environment variables, and connects its processes with the one that leads."""

import contextlib
import fcntl
import hmac
import json
import logging
import os
import re
import secrets
import socket
import stat
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from conformance.errors import ConformanceError
from conformance.waiting import machine_time
from conformance.waiting.limits import LOST_S, START_TIMEOUT_S, TURN_S
from conformance.workers.attached_messages import Challenge, FromAgent, Proof, ToAgent
from conformance.workers.channel import LIMIT_BYTES, Channel, MessageError, wait

_MOST_BYTES_UNPROVED = 1024
#: The environment variable that holds the secret; with `_FILE` after it, the one that holds the path of a file with it.
SECRET = "DDP_CONFORMANCE_SECRET"
_LEAST_SECRET_BYTES = 16
_KEY = "ddp_conformance/controller"
_SECRET_KEY = "ddp_conformance/secret"
_SIOCGIFADDR = 0x8915

#: For each launcher the variables that hold rank, world size and rank within the host.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
}
#: Each launcher's variable for the number of processes on this host.
_LOCAL_SIZES = {"torchrun": "LOCAL_WORLD_SIZE", "srun": "SLURM_NTASKS_PER_NODE", "mpirun": "OMPI_COMM_WORLD_LOCAL_SIZE"}


@dataclass(frozen=True, slots=True)
class Place:
    """One of `num_processes` processes of a launcher, and the address (`master`) at which they meet.

    With `one_host` the launcher says that all of them are on this host.
    """

    index: int
    num_processes: int
    local_index: int
    host: str
    master: str
    one_host: bool = False


def place_of(variables: Mapping[str, str]) -> Place:
    """Read this process's place from the launcher's environment variables.

    Raises:
        ConformanceError: no launcher has set its variables, or one of these, MASTER_ADDR or MASTER_PORT is none.

    """
    for launcher, names in _LAUNCHERS.items():
        if all(name in variables for name in names):
            if wrong := [name for name in names if not re.fullmatch("[0-9]{1,9}", variables[name])]:
                raise ConformanceError(
                    f"{wrong[0]} must be a number, as {launcher} sets it, got {variables[wrong[0]]!r}"
                )
            index, num_processes, local_index = (int(variables[name]) for name in names)
            one_host = variables.get(_LOCAL_SIZES[launcher]) == str(num_processes)
            break
    else:
        absent = {launcher: [name for name in names if name not in variables] for launcher, names in _LAUNCHERS.items()}
        nearest = min(absent, key=lambda launcher: len(absent[launcher]))
        some = f"; {nearest} sets {', '.join(_LAUNCHERS[nearest])}, and here is no {' and no '.join(absent[nearest])}"
        none = f"; none of them has set {', '.join(names[0] for names in _LAUNCHERS.values())} here"
        raise ConformanceError(
            "--attach is for processes that torchrun, srun or mpirun has started"
            + (some if len(absent[nearest]) < len(_LAUNCHERS[nearest]) else none)
        )
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not variables.get(name)]:
        raise ConformanceError(f"set {' and '.join(missing)}, so that the {num_processes} processes can meet")
    address, port = variables["MASTER_ADDR"], variables["MASTER_PORT"]
    if ":" in address:
        raise ConformanceError(f"MASTER_ADDR must be an IPv4 address or the name of a host, got {address!r}")
    if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 1 << 16:
        raise ConformanceError(f"MASTER_PORT must be a number from 1 to 65535, got {port!r}")
    return Place(index, num_processes, local_index, socket.gethostname(), address, one_host)


def meet(place: Place) -> Store:
    """Return the c10d store that all processes share; every process must call it."""
    os.environ.update(RANK=str(place.index), WORLD_SIZE=str(place.num_processes))  # as torchrun sets them
    store: Store
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=START_TIMEOUT_S)))
    return store


@dataclass(frozen=True, slots=True)
class Secret:
    """The secret that all processes of a run share; `file` is where the processes of one host found it."""

    text: bytes
    file: str = ""

    def forget(self) -> None:
        """Remove the file, once every process has read it."""
        if self.file:
            os.unlink(self.file)


def agree_on_secret(place: Place, store: Store, variables: Mapping[str, str]) -> Secret:
    """Return the secret of this run; every process must call it.

    It is that of the environment: `DDP_CONFORMANCE_SECRET`, or the content of `DDP_CONFORMANCE_SECRET_FILE`. Without
    one, processes of a single host share a file that only their user can read. Processes of several hosts then have
    only the store, which anyone who reaches the launcher's port can read, and the first process says so.

    Raises:
        ConformanceError: the secret is too short, or the file cannot be read or is readable for others.

    """
    if given := variables.get(SECRET):
        return Secret(_long_enough(given.encode(), f"${SECRET}"))
    if path := variables.get(f"{SECRET}_FILE"):
        return Secret(_read_secret(path))
    if place.index == 0:
        drawn = secrets.token_hex(32)
        if place.one_host:
            handle, path = tempfile.mkstemp(prefix="ddp-conformance-secret-")  # mode 0600
            os.write(handle, drawn.encode())
            os.close(handle)
            store.set(_SECRET_KEY, path)
            return Secret(drawn.encode(), path)
        store.set(_SECRET_KEY, drawn)
        logging.getLogger(__name__).warning(
            "Whoever reaches %s can take part in this run: set %s to the same text for all processes.",
            place.master, SECRET,
        )  # fmt: skip
        return Secret(drawn.encode())
    known = store.get(_SECRET_KEY)
    return Secret(_read_secret(known.decode()) if place.one_host else known)


def _read_secret(path: str) -> bytes:
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOFOLLOW)) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.getuid() or status.st_mode & 0o077 or not stat.S_ISREG(status.st_mode):
                raise ConformanceError(
                    f"{path} must be a file that belongs to you and that only you can read: chmod 600"
                )
            return _long_enough(file.read(_MOST_BYTES_UNPROVED).strip(), path)
    except OSError as error:
        raise ConformanceError(f"cannot read the secret in {path}: {error.strerror}") from error


def _long_enough(secret: bytes, where: str) -> bytes:
    if len(secret) < _LEAST_SECRET_BYTES:
        raise ConformanceError(f"{where} must have at least {_LEAST_SECRET_BYTES} characters, got {len(secret)}")
    return secret


class Door:
    """The controller's listening socket: admits only agents that prove that they have the secret."""

    def __init__(self, place: Place, store: Store, secret: bytes) -> None:
        """Listen on the first host's address, and publish the address in `store`."""
        self._secret = secret
        try:
            self._socket = socket.create_server((place.master, 0))
        except OSError as error:
            raise ConformanceError(f"cannot listen at MASTER_ADDR {place.master!r} on this host: {error}") from error
        address, port = self._socket.getsockname()[:2]
        self.address = str(address)
        store.set(_KEY, json.dumps([self.address, port]))

    def admit(self, number: int) -> list[Channel]:
        """Return the channels of `number` agents that have proved the secret; close every other connection.

        A connection has `LOST_S` seconds and `_MOST_BYTES_UNPROVED` bytes for its proof, and delays no other agent.

        Raises:
            ConformanceError: an agent did not connect within `START_TIMEOUT_S` seconds.

        """
        admitted: list[Channel] = []
        challenged: dict[Channel, tuple[bytes, float]] = {}
        end = machine_time.now() + START_TIMEOUT_S
        while len(admitted) < number:
            now = machine_time.now()
            if now >= end:
                raise ConformanceError(
                    f"{number - len(admitted)} of {number} processes did not join within {START_TIMEOUT_S:g} s, or"
                    f" have another {SECRET}"
                )
            for channel in [channel for channel, (_, deadline) in challenged.items() if now >= deadline]:
                del challenged[channel]
                channel.close()
            ready = wait([self._socket, *challenged], TURN_S)
            if self._socket in ready:
                accepted, _ = self._socket.accept()
                channel, nonce = Channel(accepted, FromAgent, _MOST_BYTES_UNPROVED), secrets.token_bytes(32)
                with contextlib.suppress(OSError):
                    channel.send(Challenge(nonce), 0.0)
                challenged[channel] = nonce, now + LOST_S
            for channel in [channel for channel in challenged if channel in ready]:
                try:
                    if (proof := channel.arrived()) is None:
                        continue
                    self._check(channel, proof, challenged.pop(channel)[0])
                except (EOFError, OSError, MessageError):
                    challenged.pop(channel, None)
                    channel.close()
                else:
                    admitted.append(channel)
        for channel in challenged:
            channel.close()
        return admitted

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()

    def _check(self, channel: Channel, proof: Proof, nonce: bytes) -> None:
        """Prove the secret in turn to who has proved it; raises `MessageError` to who has not."""
        if not isinstance(proof, Proof) or not hmac.compare_digest(
            proof.mac, _mac(self._secret, b"agent", nonce, proof.nonce)
        ):
            raise MessageError("no proof of the secret")
        channel.send(Proof(_mac(self._secret, b"controller", proof.nonce, nonce)), LOST_S)
        channel.limit_bytes = LIMIT_BYTES


def knock(store: Store, secret: bytes) -> tuple[Channel, str]:
    """Connect to the controller; returns the channel and this host's own address in it.

    Raises:
        ConformanceError: who listens there does not know the secret, or cannot be reached.

    """
    address, port = json.loads(store.get(_KEY))
    try:
        joined = socket.create_connection((address, port), timeout=START_TIMEOUT_S)
        own_address = str(joined.getsockname()[0])
        channel = Channel(joined, ToAgent)
        challenge, nonce = channel.receive(START_TIMEOUT_S), secrets.token_bytes(32)
        if not isinstance(challenge, Challenge):
            raise MessageError("no challenge")
        channel.send(Proof(_mac(secret, b"agent", challenge.nonce, nonce), nonce))
        proof = channel.receive(LOST_S)
        if not isinstance(proof, Proof) or not hmac.compare_digest(
            proof.mac, _mac(secret, b"controller", nonce, challenge.nonce)
        ):
            raise MessageError("no proof of the secret")
    except (EOFError, OSError, MessageError) as error:
        raise ConformanceError(
            f"cannot join the controller at {address}:{port}: {str(error) or 'it closed the connection'};"
            f" has every process the same {SECRET}?"
        ) from error
    return channel, own_address


def _mac(secret: bytes, role: bytes, challenged: bytes, own: bytes) -> bytes:
    """Return what proves the secret; the role keeps one side's proof from being sent back to it as the other's."""
    return hmac.digest(secret, b"|".join((role, challenged, own)), "sha256")


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
