"""What tests of the harness share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from conformance.cli import replay, run
from conformance.workers.zygote_process import ZygoteProcess


@pytest.fixture(scope="session")
def zygote() -> Iterator[ZygoteProcess]:
    """Start one zygote for all tests of this process whose ranks may have it: each would import torch once more."""
    process = ZygoteProcess(None, ())
    yield process
    process.close()


@pytest.fixture
def lent_zygote(monkeypatch: pytest.MonkeyPatch, zygote: ZygoteProcess) -> None:
    """Lend the zygote to every run of the test: its ranks are forked anew, and end with the run, as always."""
    for command in (run, replay):
        monkeypatch.setattr(command, "early_zygote", lambda: nullcontext(zygote))
