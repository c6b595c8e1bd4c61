"""Finds the backends and DDPs that installed packages declare as entry points; imports only the one it needs."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import entry_points

BACKENDS = "ddp_conformance.backends"
SUBJECTS = "ddp_conformance.subjects"
#: torch's own: functions that register a backend with torch.
REGISTERED_BACKENDS = "torch.distributed.backends"
GROUPS_OF_BACKENDS = (BACKENDS, REGISTERED_BACKENDS)


@dataclass(frozen=True, slots=True)
class Plugin:
    """One entry point: `name` is what users type, `target` is `module:attr`, `package` its distribution."""

    group: str
    name: str
    target: str
    package: str


def installed(group: str) -> tuple[Plugin, ...]:
    """Return the entry points that installed packages declare in `group`, sorted by name; imports none of them."""
    found = set()
    for entry in entry_points(group=group):
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an unknown package"
        found.add(Plugin(group, entry.name, entry.value, package))
    return tuple(sorted(found, key=lambda plugin: (plugin.name, plugin.package, plugin.target)))


def named(group: str, name: str) -> tuple[Plugin, ...]:
    """Return the plugins called `name`: several, if several packages declare that name."""
    return tuple(plugin for plugin in installed(group) if plugin.name == name)


def target_of(group: str, name: str, error: type[Exception]) -> str:
    """Return `module:attr` of the plugin called `name`, empty if there is none; raises `error` for several."""
    found = named(group, name)
    if len(found) > 1:
        candidates = ", ".join(f"{plugin.target} (of {plugin.package})" for plugin in found)
        raise error(f"several installed packages call theirs {name!r}: {candidates}; name one as module:attr")
    return found[0].target if found else ""
