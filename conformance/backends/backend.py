"""`Backend`: everything that the harness knows of a c10d backend, in one value.

Everything that differs between gloo, NCCL and a vendor's backend is in this value, so programs, pools and checkers name
no backend. A vendor defines a `Backend` in a module of their own and passes `--backend module:attr`.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import Backend as GroupBackend
from torch._C._distributed_c10d import ProcessGroup, Store

from conformance import plugins
from conformance.errors import BackendError, hint

#: What DDPs may need beyond what every DDP does: broadcast, all_reduce (SUM, MAX and MIN), all_gather, barrier, and new
#: groups.
FOR_DDPS = frozenset(
    {
        "all_gather_into_tensor",
        "all_to_all",
        "avg",
        "bfloat16",
        "coalesced",
        "complex64",
        "float16",
        "gather_scatter",
        "reduce_scatter",
        "send_recv",
        "sparse",
        "streams",
    }
)
#: What a backend may declare, and scenarios may list under `needs`; profile `backend` judges what is declared.
CAPABILITIES = FOR_DDPS | {
    "abort",
    "any_source",
    "bitwise",
    "bool",
    "complex128",
    "float8",
    "in_place",
    "int16",
    "int8",
    "local_synchronization",
    "monitored_barrier",
    "notices_death",
    "premul_sum",
    "product",
    "reduce",
    "single_coalesced",
    "tags",
    "timeouts",
    "uint8",
    "unordered_groups",
}

BUILT_IN = {
    "gloo": "conformance.backends.gloo:GLOO",
    "nccl": "conformance.backends.nccl:NCCL",
    "sim": "conformance.backends.sim:SIM",
    "sim-alone": "conformance.backends.sim:SIM_ALONE",
    "sim-late": "conformance.backends.sim:SIM_LATE",
}


@dataclass(frozen=True)
class Backend:
    """A c10d backend together with the devices that it serves.

    `capabilities`, of `CAPABILITIES`, are what scenarios may list under `needs`: operations beyond those that every DDP
    needs, and dtypes beyond float32, float64 and integers. `max_world_size()` returns None for no limit.
    `unavailable()` returns an empty string if the backend can be used here, else the reason. The controller calls both;
    they may touch the device. Ranks call `device(rank)` and `create(store, rank, world_size, timeout)`; every rank must
    call `create`, which returns the connected group. A rank calls `noticed()` after every
    scenario: what its device found wrong in it, such as a race; a phrase fails the scenario, whatever it is about.
    The controller calls `device_bytes()`: how much memory each device has, for as many lanes (`--jobs`) as have room;
    None where ranks of several lanes must not share a device. The CPU's memory is known. A device that is `simulated`
    has none but the CPU's.
    `source` is the text by which ranks find this value again in their own process, because functions of a vendor's
    module need not pickle.
    """

    name: str
    device_type: str
    capabilities: frozenset[str]
    max_world_size: Callable[[], int | None]
    unavailable: Callable[[], str]
    device: Callable[[int], str]
    create: Callable[[Store, int, int, timedelta], GroupBackend | ProcessGroup]
    device_bytes: Callable[[], int | None] = lambda: None
    noticed: Callable[[], tuple[str, ...]] = tuple
    simulated: bool = False
    source: str = ""

    @property
    def runs_side_by_side(self) -> bool:
        """Whether ranks of several scenarios may run at once: a device may lack the memory, and may hang for all."""
        return self.device_type == "cpu" or self.simulated

    def misdeclared(self) -> str:
        """Return what is wrong with the capabilities: an unknown one would hide a capability that a scenario needs."""
        unknown = min(self.capabilities - CAPABILITIES, default="")
        return unknown and f"capability {unknown!r} means nothing to any scenario{hint(unknown, CAPABILITIES)}"

    def require(self) -> None:
        """Raise `BackendError` if the backend cannot be used here.

        Whoever starts ranks calls it first: what a backend prepares when it is asked, such as a device that must be
        compiled, must not come out of the ranks' deadlines.
        """
        if reason := self.unavailable():
            raise BackendError(f"backend {self.name!r} cannot be used here: {reason}")


def get_backend(name: str) -> Backend:
    """Return the backend called `name`: `gloo`, `nccl`, an installed package's name, or `module:attr` for any other.

    Packages declare backends as entry points of the group `ddp_conformance.backends`, or register one with torch by an
    entry point of `torch.distributed.backends`; only the named one is imported.
    This function does not check whether the machine can use it: see `Backend.unavailable`.

    Raises:
        BackendError: no backend has that name, its module cannot be imported, or the attribute is no `Backend`.

    """
    target = BUILT_IN.get(name) or _installed_target(plugins.BACKENDS, name)
    if not target and (registers := _installed_target(plugins.REGISTERED_BACKENDS, name)):
        registered = importlib.import_module("conformance.backends.registered")  # which makes a `Backend`
        described: Backend = registered.registered_backend(name, registers)
        return dataclasses.replace(described, source=name)
    target = target or name
    module_name, separator, attribute = target.partition(":")
    if not (separator and module_name and attribute):
        names = (plugin.name for group in plugins.GROUPS_OF_BACKENDS for plugin in plugins.installed(group))
        known = dict.fromkeys((*sorted(BUILT_IN), *names))
        raise BackendError(f"unknown backend {name!r}; expected {', '.join(known)}, or module:attr naming a Backend")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise BackendError(f"backend {name!r}: cannot import {module_name}: {type(error).__name__}: {error}") from error
    found = getattr(module, attribute, None)
    if not isinstance(found, Backend):
        came = "no such attribute" if found is None else f"got {type(found).__name__}"
        raise BackendError(
            f"backend {name!r}: {module_name}.{attribute} must be a conformance.backends.backend.Backend, {came}"
        )
    return dataclasses.replace(found, source=name)


def _installed_target(group: str, name: str) -> str:
    """Return `module:attr` of the installed backend of that name; empty if there is none."""
    found = plugins.named(group, name)
    if len(found) > 1:
        raise BackendError(plugins.disagreement(found))
    return found[0].target if found else ""
