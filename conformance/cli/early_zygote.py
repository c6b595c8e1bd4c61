"""The zygote that a command starts before it needs ranks: it imports torch while the command itself does."""

from __future__ import annotations

from contextlib import AbstractContextManager, closing
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conformance.workers.zygote_process import ZygoteProcess


def early_zygote() -> AbstractContextManager[ZygoteProcess]:
    """Start a zygote and return at once; the end of the block ends it and its ranks."""
    from conformance.workers.zygote_process import ZygoteProcess

    return closing(ZygoteProcess(None, ()))
