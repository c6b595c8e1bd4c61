"""What tests of the chapters and of the harness share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # a session that only collects imports no torch
    from conformance.workers.zygote_process import ZygoteProcess


@pytest.fixture(scope="session")
def zygote() -> Iterator[ZygoteProcess]:
    """Start one zygote for all tests of this process whose ranks may have it: each would import torch once more."""
    from conformance.workers.zygote_process import ZygoteProcess

    process = ZygoteProcess(None, ())
    yield process
    process.close()
