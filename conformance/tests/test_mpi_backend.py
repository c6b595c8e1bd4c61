"""A vendor's backend, over MPI, installed as its package: the whole ladder, and scenarios of the core on both DDPs."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.backends.backend import get_backend
from conformance.plugins import BACKENDS, named
from conformance.run.runner import run
from conformance.smoke.ladder import Status, climb
from conformance.spec.catalogue import load_catalogue
from conformance.subjects.subject import get_subject
from conformance.suite import Selection, load_scenarios
from conformance.verdict import Verdict
from conformance.workers.controller import Controller
from conformance.workers.zygote_process import ZygoteProcess

DISTRIBUTION = Path(__file__).parents[2] / "fixtures" / "mpi_backend"
NAME = "mpi4py"  # of the entry point


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Build and install the distribution into a folder of its own, which this process and its ranks look into."""
    source, target = (tmp_path_factory.mktemp(name) for name in ("source", "site"))
    shutil.copytree(DISTRIBUTION, source, dirs_exist_ok=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, *offline, "--target", str(target), str(source)], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(target))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(target), os.environ.get("PYTHONPATH", "")))))
        yield target


@pytest.fixture(scope="module")
def zygote(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZygoteProcess]:
    if reason := get_backend(NAME).unavailable():
        pytest.skip(reason)
    process = ZygoteProcess(tmp_path_factory.mktemp("zygote"), ())
    yield process
    process.close()


@pytest.mark.usefixtures("installed")
def test_the_installed_package_is_found_by_its_entry_point() -> None:
    assert [plugin.package for plugin in named(BACKENDS, NAME)] == ["ddp-conformance-mpi-backend 0.1.0"]


@pytest.mark.nightly
def test_the_whole_ladder_holds_and_the_limits_are_as_declared(zygote: ZygoteProcess) -> None:
    found = list(climb(NAME, "ddp_impl", zygote=zygote))
    assert found[-1].rung == "step of ddp_impl"
    assert [one.breakage for one in found if one.status is Status.BROKEN] == []
    others = {one.rung: one.status for one in found if one.status is not Status.HOLDS}
    # A receive from anybody is refused where it is called; the rank that sends waits for it in vain.
    beyond = {"any source": Status.UNCLEAN, "tags": Status.UNDECLARED}
    absent = ("all_reduce sparse", "float16", "bfloat16", "bool", "premul_sum")
    assert others == {**dict.fromkeys(absent, Status.ABSENT), **beyond}


@pytest.mark.nightly
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
