"""Runs scenarios in processes that torchrun, srun or mpirun has started, on one host or several."""

import contextlib
import os
import threading
from collections.abc import Callable

from torch._C._distributed_c10d import Store

from conformance.backends.backend import Backend
from conformance.workers.attached_agent import Agent
from conformance.workers.attached_controller import AttachedController
from conformance.workers.attached_place import Door, Place, agree_on_secret, interface_of, knock, meet

Lead = Callable[[AttachedController], int]


def attach(place: Place, backend: Backend, preload: tuple[str, ...], lead: Lead) -> int:
    """Run this process's agent until the run is over; the first process also calls `lead` with the controller.

    Every process that the launcher has started must call it. Returns `lead`'s result, and 0 in the other processes.

    Raises:
        ConformanceError: the processes did not find each other, or an agent lost its controller.

    """
    store = meet(place)
    secret = agree_on_secret(place, store, os.environ)
    if place.index != 0:
        _serve(place, store, secret.text, preload)
        return 0
    door = Door(place, store, secret.text)
    own = threading.Thread(target=_serve, args=(place, store, secret.text, preload), daemon=True)
    own.start()
    with contextlib.closing(door):
        try:
            channels = door.admit(place.num_processes)
        finally:
            secret.forget()
    try:
        with AttachedController(backend, channels, door.address) as controller:
            return lead(controller)
    finally:
        own.join()


def _serve(place: Place, store: Store, secret: bytes, preload: tuple[str, ...]) -> None:
    channel, address = knock(store, secret)
    with contextlib.closing(channel):  # also where the agent fails: the controller must not wait for it
        Agent(channel, place, preload, {"GLOO_SOCKET_IFNAME": interface_of(address)}).serve()
