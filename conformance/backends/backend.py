"""`Backend`: one value with everything that differs between gloo, NCCL and a vendor's backend.

So programs, pools and checkers name no backend. A vendor defines a `Backend` in a module and passes
`--backend module:attr`.
"""

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import Backend as GroupBackend
from torch._C._distributed_c10d import ProcessGroup, Store

from conformance import plugins
from conformance.errors import BackendError, hint

#: Capabilities that DDPs may need beyond those that every DDP needs: broadcast, all_reduce (SUM, MAX and MIN),
#: all_gather, barrier, and new groups.
FOR_DDPS = frozenset({
    "all_gather_into_tensor", "all_to_all", "avg", "bfloat16", "coalesced", "complex64", "float16", "gather_scatter",
    "reduce_scatter", "send_recv", "sparse", "streams",
})  # fmt: skip
#: What a backend may declare, and scenarios may list under `needs`; profile `backend` judges what is declared.
CAPABILITIES = FOR_DDPS | {
    "abort", "any_source", "bitwise", "bool", "complex128", "float8", "gather_single", "hooks", "in_place", "int16",
    "int8", "local_synchronization", "monitored_barrier", "notices_death", "premul_sum", "product", "reconfigure",
    "reduce", "set_timeout", "single_coalesced", "tags", "timeouts", "uint8", "unordered_groups",
}  # fmt: skip
#: Those that not every supported torch has, by the method of a group that shows that it does.
OF_NEWER_TORCH = {"gather_single": "gather_single", "hooks": "register_pre_hook", "reconfigure": "reconfigure"}
#: Those that the installed torch gives no backend, whatever it declares.
UNKNOWN_TO_TORCH = frozenset(name for name, method in OF_NEWER_TORCH.items() if not hasattr(ProcessGroup, method))

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
    call `create`, which returns the connected group. A rank calls `noticed()` after every scenario for mistakes, such
    as races, that its device found; each fails the scenario. The controller calls `device_bytes()` for the memory of
    each device, which limits the number of lanes (`--jobs`); None where lanes must not share a device. A device that is
    `simulated` uses the CPU's memory. `source` is the text by which ranks find this value in their own process, because
    functions of a vendor's module need not pickle. With capability `reconfigure` ranks call `create_unconnected` as
    `create`, for a group that connects in its `reconfigure`.
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
    create_unconnected: Callable[[Store, int, int, timedelta], GroupBackend | ProcessGroup] | None = None

    @property
    def runs_side_by_side(self) -> bool:
        """Whether several scenarios may run at once: a device may lack the memory, or hang for all of them."""
        return self.device_type == "cpu" or self.simulated

    def misdeclared(self) -> str:
        """Return what is wrong with the capabilities: an unknown one would hide a capability that a scenario needs."""
        unknown = min(self.capabilities - CAPABILITIES, default="")
        return unknown and f"capability {unknown!r} means nothing to any scenario{hint(unknown, CAPABILITIES)}"

    def require(self) -> None:
        """Raise `BackendError` if the backend cannot be used here.

        Call it before ranks start, so that preparations, such as compiling a device, are not in their deadlines.
        """
        if reason := self.unavailable():
            raise BackendError(f"backend {self.name!r} cannot be used here: {reason}")


def get_backend(name: str) -> Backend:
    """Return the backend called `name`: `gloo`, `nccl`, an installed package's name, or `module:attr` for any other.

    Packages declare backends as entry points of the group `ddp_conformance.backends`, or register one with torch by an
    entry point of `torch.distributed.backends`; only the named one is imported. Raises `BackendError` if there is no
    such `Backend`, or its module cannot be imported; `Backend.unavailable` tells whether the machine can use it.
    """
    target = BUILT_IN.get(name) or plugins.target_of(plugins.BACKENDS, name, BackendError)
    if not target and (registers := plugins.target_of(plugins.REGISTERED_BACKENDS, name, BackendError)):
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
        got = "no such attribute" if found is None else f"got {type(found).__name__}"
        raise BackendError(
            f"backend {name!r}: {module_name}.{attribute} must be a conformance.backends.backend.Backend, {got}"
        )
    return dataclasses.replace(found, source=name)
