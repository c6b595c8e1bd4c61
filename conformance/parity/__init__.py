"""Is my training right on N GPUs? The same step in one process and on N ranks, compared by name.

`from conformance import parity; parity(make_model, make_batch, train_step)`: the module itself can be called, in a
notebook or anywhere else. `docs/howto/parity.md` shows it; `conformance.parity.parity` says all of it.
"""

import sys
import types
from typing import Any

from conformance.parity.parity import DifferenceError, Report, VacuityError, examine, parity
from conformance.parity.training import ParityError

__all__ = ["DifferenceError", "ParityError", "Report", "VacuityError", "examine", "parity"]


class _Callable(types.ModuleType):
    def __call__(self, *functions: Any, **options: Any) -> Report:
        return parity(*functions, **options)


sys.modules[__name__].__class__ = _Callable
