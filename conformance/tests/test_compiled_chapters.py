"""The chapters about compiled modules refuse orders that mean nothing, and see what is wrong."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from conformance.backends.backend import get_backend
from conformance.chapters.compiled.compiling import PRELOAD, CompileOrder
from conformance.errors import ScenarioError
from conformance.run.scenario_runner import ScenarioRunner
from conformance.scenario import Scenario
from conformance.subjects.subject import get_subject
from conformance.suite import load_scenarios
from conformance.verdict import Verdict
from conformance.workers.controller import Controller
from conformance.workers.zygote_process import ZygoteProcess


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ({"backend": "indutcor"}, "compile backend must be one of eager, aot_eager"),
        ({"reduction": "graph"}, "compile reduction must be one of split, whole, in_graph"),
        ({"fulgraph": True}, r"unknown compile argument\(s\): fulgraph"),
    ],
)
def test_an_order_that_no_compilation_could_mean_is_refused(order: dict[str, object], message: str) -> None:
    scenario = Scenario("x/X-01/x", ("X-01",), "compiled", arguments={"compile": order})
    with pytest.raises(ScenarioError, match=message):
        CompileOrder.of(scenario)


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZygoteProcess]:
    with closing(ZygoteProcess(tmp_path_factory.mktemp("ranks"), PRELOAD)) as zygote:
        yield zygote


@pytest.mark.nightly
def test_nothing_that_the_reducer_looks_at_has_a_captured_backward_compiled_twice(zygote: ZygoteProcess) -> None:
    """What a hook of the reducer asks for becomes a guard of what Dynamo captures with it."""
    gloo, scenarios = get_backend("gloo"), [one for one in load_scenarios() if "FUSE-11/captured" in one.id]
    with Controller(gloo, preload=PRELOAD, zygote=zygote) as ranks:
        runner = ScenarioRunner(get_subject("ddp_impl"), gloo, ranks, native=False)
        verdicts = {one.id: runner.run(one).subject.verdict for one in scenarios}
    assert set(verdicts.values()) == {Verdict.PASS}, verdicts
