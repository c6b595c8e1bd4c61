"""A backend that is not torch's, over MPI: the whole ladder, and scenarios of the core on both DDPs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mpi_backend.adapter import BACKEND

from conformance.backends.backend import get_backend
from conformance.run.runner import run
from conformance.smoke.ladder import Status, climb
from conformance.spec.catalogue import load_catalogue
from conformance.subjects.subject import get_subject
from conformance.suite import Selection, load_scenarios
from conformance.verdict import Verdict
from conformance.workers.controller import Controller
from conformance.workers.zygote_process import ZygoteProcess

NAME = "mpi_backend.adapter:BACKEND"
pytestmark = pytest.mark.skipif(bool(BACKEND.unavailable()), reason=BACKEND.unavailable() or "usable")


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZygoteProcess]:
    process = ZygoteProcess(tmp_path_factory.mktemp("zygote"), ())
    yield process
    process.close()


def test_the_whole_ladder_holds_and_the_limits_are_as_declared(zygote: ZygoteProcess) -> None:
    found = list(climb(NAME, "ddp_impl", zygote=zygote))
    assert found[-1].rung == "step of ddp_impl"
    assert [one.breakage for one in found if one.status is Status.BROKEN] == []
    others = {one.rung: one.status for one in found if one.status is not Status.HOLDS}
    assert others == dict.fromkeys(("all_reduce sparse", "all_reduce float16", "all_reduce bfloat16"), Status.ABSENT)


def test_scenarios_of_the_core_pass(zygote: ZygoteProcess) -> None:
    selection = Selection(requirements=("GRAD-01", "BUCKET-01"), world_sizes=(2,))
    scenarios = selection.apply(load_scenarios(), load_catalogue())
    with Controller(get_backend(NAME), zygote=zygote) as controller:
        report = run(scenarios, get_subject("ddp_impl"), get_backend(NAME), controller=controller)
    assert report.backend == NAME
    verdicts = {one.id: (one.subject.verdict, one.native and one.native.verdict) for one in report.scenarios}
    assert verdicts.pop("gradients/GRAD-01/sparse-embedding-world2") == (Verdict.UNSUPPORTED, Verdict.UNSUPPORTED)
    assert len(verdicts) >= 10
    assert set(verdicts.values()) == {(Verdict.PASS, Verdict.PASS)}, verdicts
