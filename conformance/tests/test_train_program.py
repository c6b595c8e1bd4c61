"""The programs that train, on real ranks under torch's own DDP: what they observe is what the truth expects."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance.backends.backend import get_backend
from conformance.chapters.training.scenarios import scenarios
from conformance.programs.registry import get_program
from conformance.run.judge import judge
from conformance.scenario import Scenario, Step
from conformance.subjects.subject import get_subject
from conformance.verdict import Verdict
from conformance.workers.controller import Controller
from conformance.workers.zygote_process import ZygoteProcess

#: Of the chapter: accumulation with buffers, both restarts, clipping, and unused parameters.
CHOSEN = (
    "TRAIN-10/digits-cnn-accumulate3", "TRAIN-10/small-gpt-accumulate2", "TRAIN-11/digits-adam",
    "TRAIN-12/digits-adam", "TRAIN-07/digits-clipped-views", "TRAIN-16/moe", "TRAIN-16/rank-branch",
)  # fmt: skip
OTHERS = (
    Scenario("t/T/ignored", ("T",), "train", arguments={"ignored": ["0.weight", "4.bias"]}),
    Scenario(
        "t/T/local", ("T",), "train", schedule=(Step(local_backwards=2, synchronised=False), Step(zero_grad="keep"))
    ),
    Scenario("t/T/buffers", ("T",), "train", model="batchnorm_mlp", schedule=(Step(local_backwards=2),) * 3),
    Scenario("t/T/sparse", ("T",), "train", model="sparse_embedding", schedule=(Step(), Step(local_backwards=1))),
)


@pytest.fixture(scope="module")
def controller(zygote: ZygoteProcess) -> Iterator[Controller]:
    with Controller(get_backend("gloo"), zygote=zygote) as opened:
        yield opened


def chosen() -> list[Scenario]:
    by_id = {scenario.id: scenario for scenario in scenarios()}
    return [*(by_id[f"training/{name}-world2"] for name in CHOSEN), *OTHERS]


@pytest.mark.parametrize("scenario", chosen(), ids=lambda scenario: scenario.id)
def test_torchs_ddp_observes_the_truth(controller: Controller, scenario: Scenario) -> None:
    program = get_program(scenario.program)
    observations = controller.run(scenario, get_subject("torch"))
    expected = program.expectation(scenario) if program.expectation else None
    verdict, findings = judge(scenario, program, observations, expected, None)
    assert verdict is Verdict.PASS, findings[0].explanation or findings[0].summary
    assert expected is not None
    for rank, observation in observations.items():
        unjudged = set(observation.facts) - set(expected[rank])
        assert unjudged <= {"accuracy", "test_loss", "loss_ratio"}
