"""Finds the holder of an object: follows references in Python up to an attribute of a class or a module."""

import gc
from collections.abc import Iterable
from types import FrameType, ModuleType
from typing import Any

#: The search stops after so many objects.
_MOST_SEEN = 2_000


def holder_of(thing: object, besides: Iterable[object] = ()) -> str:
    """Return the holder of `thing`, e.g. `attribute _all of class Wrapper`, ignoring the holders `besides`.

    It is the nearest attribute of a class or a module, else the kind of the object farthest up that was reached.
    """
    gc.unfreeze()  # referrers are not looked for among what was frozen, such as classes that were imported before
    ours = {id(one) for one in besides}
    level: list[Any] = [thing]
    seen = {id(thing), id(level), *ours}
    last = ""
    while level and len(seen) < _MOST_SEEN:
        above: list[Any] = []
        seen.add(id(above))
        for one in level:
            for holder in gc.get_referrers(one):
                if id(holder) in seen or isinstance(holder, FrameType):
                    continue
                seen.add(id(holder))
                if isinstance(holder, dict) and (root := _named(holder, one)):
                    return root
                above.append(holder)
        named = (one for one in above if type(one).__module__ != "builtins")
        last = next((f"an object of {type(one).__qualname__}" for one in named), last)
        level = above
    if not last:
        return "nothing that Python sees"
    return f"{last} to which no name leads: a cycle of references, or code in C++ holds it"


def _named(namespace: dict[Any, Any], thing: object) -> str:
    """Return which attribute of a class or a module `thing` is, if `namespace` holds the attributes of one."""
    name = next((key for key, value in namespace.items() if value is thing), "")
    for owner in gc.get_referrers(namespace):
        if isinstance(owner, type) and owner.__dict__.get(name) is thing:
            return f"attribute {name} of class {owner.__qualname__}"
        if isinstance(owner, ModuleType) and vars(owner) is namespace:
            return f"{name} of module {owner.__name__}"
    return ""
