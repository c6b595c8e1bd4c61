"""What tests of the harness share."""

from contextlib import nullcontext

import pytest

from conformance.cli import explore, replay, run
from conformance.workers.zygote_process import ZygoteProcess


@pytest.fixture
def lent_zygote(monkeypatch: pytest.MonkeyPatch, zygote: ZygoteProcess) -> None:
    """Lend the zygote to every run of the test: its ranks are forked anew, and end with the run, as always."""
    for command in (explore, replay, run):
        monkeypatch.setattr(command, "early_zygote", lambda: nullcontext(zygote))
