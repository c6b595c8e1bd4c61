"""What must not pass: a wrapper that is wrong only where it is the first of its process, or the first of its kind."""

import pytest

from conformance.backends.backend import get_backend
from conformance.run import runner
from conformance.scenario import Scenario
from conformance.subjects.subject import Subject
from conformance.verdict import Verdict
from conformance.workers.zygote_process import ZygoteProcess

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
