"""The random numbers that a training draws from the global generators: torch's, Python's and numpy's."""

import pickle
import random
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import TorchDispatchMode


def seed_all(seed: int) -> None:
    """Seed the generators of this process."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def random_state() -> bytes:
    """Return the generators' states; equal to one returned before if nothing has been drawn since."""
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    states = [state.numpy() for state in (torch.get_rng_state(), *on_gpus)]
    return pickle.dumps((states, random.getstate(), numpy.random.get_state()))


class Draws(TorchDispatchMode):
    """Notes in `places` which operators draw from a generator of torch's, and the line outside of torch that asks."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = random_state() if torch.Tag.nondeterministic_seeded in func.tags else b""
        result = func(*args, **kwargs or {})
        if before and before != random_state():
            where = next(frame for frame in reversed(traceback.extract_stack()[:-1]) if "/torch/" not in frame.filename)
            self.places[f"{where.name}, {Path(where.filename).name} line {where.lineno}"] = None
        return result
