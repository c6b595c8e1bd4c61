"""Observes what a collective delivers: when its Work says that it is done and, if asked, once more a while later."""

from __future__ import annotations

import time
from typing import Any

from conformance.programs.rank_context import RankContext

#: The argument of a scenario that asks to observe everything once more so many seconds later.
LINGER = "linger_s"
LATER = ", a while later"


def observe_arrived(ctx: RankContext, name: str, value: Any) -> None:
    """Report `value` as fact `name`; with argument `linger_s` also what it is that much later.

    A backend whose `wait()` returns too early delivers the right value then. The ladder asks it of a rung that broke.
    """
    ctx.observe(name, value)
    if linger_s := ctx.arguments.get(LINGER):
        time.sleep(linger_s)
        ctx.observe(f"{name}{LATER}", value)
