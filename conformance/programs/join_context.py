"""How a program enters a join context."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from conformance.programs.rank_context import RankContext


@contextlib.contextmanager
def joining(ctx: RankContext, context: Any) -> Iterator[None]:
    """Enter a join context as phase `join`: collectives outside forward and backward are then the context's own.

    Restores the process's warning filters, which torch's `Join` changes on exit: no scenario is about that.
    """
    with warnings.catch_warnings(), ctx.phase("join"), context:
        yield
