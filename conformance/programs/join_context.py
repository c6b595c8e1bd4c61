"""How a program enters a join context."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from conformance.programs.rank_context import RankContext


@contextlib.contextmanager
def joining(ctx: RankContext, context: Any) -> Iterator[None]:
    """Enter a join context as phase `join`: forward and backward are announced inside, the rest is the context's own.

    torch's `Join` changes the process's warning filters when it is left. That is not what is judged: they are put back.
    """
    with warnings.catch_warnings(), ctx.phase("join"), context:
        yield
