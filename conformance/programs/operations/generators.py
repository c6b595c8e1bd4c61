"""Detects draws from the random generators of the process, which no operation may make."""

import random
import sys

import torch


class Generators:
    """The states of the random generators of torch, Python and, if imported, NumPy at the last call of `drawn`."""

    def __init__(self) -> None:
        self._before = _states()

    def drawn(self) -> str:
        """Return which of them have moved since the last call, as a clause; empty if none."""
        before, self._before = self._before, _states()
        moved = [name for name, state in self._before.items() if before.get(name, state) != state]
        return f"the random generator of {' and of '.join(moved)} stands elsewhere" if moved else ""


def _states() -> dict[str, object]:
    states: dict[str, object] = {
        "torch": torch.default_generator.get_state().numpy().tobytes(),
        "Python": random.getstate(),
    }
    if numpy := sys.modules.get("numpy"):
        kind, key, *rest = numpy.random.get_state()
        states["NumPy"] = (kind, key.tobytes(), *rest)
    return states
