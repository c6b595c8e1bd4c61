"""What must not pass: a rank that segfaults, as in torch's own multi-process test case, and a wrong first wrapper."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.backends.backend import get_backend
from conformance.run import runner
from conformance.scenario import Fault, Scenario
from conformance.subjects.subject import Subject, get_subject
from conformance.verdict import Verdict
from conformance.workers.controller import Controller
from conformance.workers.zygote_process import ZygoteProcess

TORCH_TEST = """
import ctypes
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_utils import run_tests


class SegfaultTest(MultiProcessTestCase):
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_rank_one_segfaults(self):
        if self.rank == 1:
            ctypes.string_at(0)


if __name__ == "__main__":
    run_tests()
"""


@pytest.mark.nightly
def test_torch_lets_the_segfault_of_rank_one_pass(tmp_path: Path) -> None:
    script = tmp_path / "segfault_test.py"
    script.write_text(TORCH_TEST)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("CI", None)  # with it torch's run_tests writes XML, by a package that nobody else needs
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Ran 1 test" in done.stderr, done.stderr
    assert "\nOK" in done.stderr, done.stderr  # what the interpreter says on its way out may follow


def test_ours_names_the_rank_and_the_signal(zygote: ZygoteProcess) -> None:
    scenario = Scenario(
        id="pool/POOL-01/segfault",
        requirements=("POOL-01",),
        program="workers/step",
        faults=(Fault("segfault", rank=1, at="forward"),),
    )
    with Controller(get_backend("gloo"), preload=("conformance.tests.worker_programs",), zygote=zygote) as controller:
        observations = controller.run(scenario, get_subject("torch"))
    assert str(observations[1].fate) == "killed by SIGSEGV"
    assert "Fatal Python error: Segmentation fault" in observations[1].stack


PLAIN = Scenario("gradients/GRAD-01/plain", ("GRAD-01",), "train")
VIEWS = Scenario("gradients/GRAD-03/views", ("GRAD-03",), "train", options={"gradient_as_bucket_view": True})


@pytest.mark.parametrize(
    ("name", "verdicts"),
    [
        ("DeafAtFirst", [Verdict.FAIL] * 2),
        pytest.param("NeedsAPlainOne", [Verdict.PASS, Verdict.FAIL], marks=pytest.mark.nightly),
    ],
)
def test_a_wrapper_that_works_only_after_another_one_fails(
    name: str, verdicts: list[Verdict], zygote: ZygoteProcess
) -> None:
    """Ranks that have had other wrappers, be it to try the constructor, would hide it."""
    subject = Subject(name, f"conformance.tests.subjects:{name}")
    report = runner.run((PLAIN, VIEWS), subject, get_backend("gloo"), native=False, zygote=zygote)
    assert [one.subject.verdict for one in report.scenarios] == verdicts
