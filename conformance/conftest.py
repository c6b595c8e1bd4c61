"""Fixtures of the tests of chapters and harness."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # a session that only collects imports no torch
    from conformance.workers.zygote_process import ZygoteProcess


@pytest.fixture(scope="session")
def zygote() -> Iterator[ZygoteProcess]:
    """Start one zygote for the tests of this process, because each zygote imports torch."""
    from conformance.workers.zygote_process import ZygoteProcess

    process = ZygoteProcess(None, ())
    yield process
    process.close()
