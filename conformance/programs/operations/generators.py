"""Whether somebody draws from the random generators of the process, of which an operation knows nothing."""

from __future__ import annotations

import random
import sys

import torch


class Generators:
    """The random generators of torch, Python and NumPy, if that is imported, as they stood when this was last asked."""

    def __init__(self) -> None:
        self._before = _states()

    def drawn(self) -> str:
        """Return from which of them somebody has drawn, as a clause; empty if from none."""
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
