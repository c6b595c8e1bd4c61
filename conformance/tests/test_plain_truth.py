"""`PlainDDP`, the executable definition: what it says of small programs, and that it says what expectations say."""

import ast
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.two_tensor import TwoTensor

import conformance.truth
from conformance.errors import present
from conformance.observation import Facts
from conformance.programs.registry import get_program
from conformance.programs.truth import truth_of
from conformance.scenario import Scenario
from conformance.suite import load_scenarios
from conformance.truth.baton import DesertedError
from conformance.truth.device import single_threaded
from conformance.truth.expected import mismatch
from conformance.truth.plain_group import PlainGroup
from conformance.truth.plain_ranks import on_plain_ranks
from conformance.truth.tensors import a_copy
from conformance.waiting.kept_waiting import Stopwatch

#: Programs that have numbers of their own, which the plain DDP must give, too.
AGREEING = (
    "due_buffers", "uneven_buffers", "gradient_values", "silent_forward",
)  # fmt: skip


def test_every_collective_gives_what_its_name_says() -> None:
    def main(rank: int, group: PlainGroup) -> Any:
        mine = torch.tensor([rank + 1.0, 10.0 * (rank + 1)])
        found: dict[str, Any] = {}
        for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG):
            dist.all_reduce(reduced := mine.clone(), operation)
            found[f"all_reduce {operation}"] = reduced.tolist()
        dist.broadcast(copied := mine.clone(), 1)
        dist.all_gather(gathered := [torch.empty(2) for _ in range(2)], mine)
        dist.all_gather_into_tensor(joined := torch.empty(4), mine)
        dist.reduce_scatter_tensor(part := torch.empty(1), mine)
        dist.all_to_all_single(swapped := torch.empty(2), mine)
        dist.scatter(given := torch.empty(2), [mine, 2 * mine] if rank == 0 else None)
        dist.reduce(at_root := mine.clone(), 1)
        received = torch.zeros(2)
        work = dist.isend(mine, 1) if rank == 0 else dist.irecv(received, 0)
        present(work).wait()
        dist.barrier()
        found |= {
            "broadcast": copied.tolist(), "all_gather": torch.stack(gathered).tolist(), "joined": joined.tolist(),
            "part": part.tolist(), "swapped": swapped.tolist(), "scatter": given.tolist(), "reduce": at_root.tolist(),
            "received": received.tolist(), "place": (dist.get_rank(), dist.get_world_size()),
        }  # fmt: skip
        return found

    both = {
        "all_reduce RedOpType.SUM": [3.0, 30.0], "all_reduce RedOpType.MAX": [2.0, 20.0],
        "all_reduce RedOpType.AVG": [1.5, 15.0], "broadcast": [2.0, 20.0], "all_gather": [[1.0, 10.0], [2.0, 20.0]],
        "joined": [1.0, 10.0, 2.0, 20.0],
    }  # fmt: skip
    assert on_plain_ranks(2, main) == {
        0: {**both, "part": [3.0], "swapped": [1.0, 2.0], "scatter": [1.0, 10.0], "reduce": [1.0, 10.0],
            "received": [0.0, 0.0], "place": (0, 2)},
        1: {**both, "part": [30.0], "swapped": [10.0, 20.0], "scatter": [2.0, 20.0], "reduce": [3.0, 30.0],
            "received": [1.0, 10.0], "place": (1, 2)},
    }  # fmt: skip


def test_a_tensor_made_of_two_is_copied_in_inference_mode() -> None:
    two = TwoTensor(torch.ones(2), torch.zeros(2))
    with torch.inference_mode():
        copied: Any = a_copy(two)
    assert (copied.a.tolist(), copied.b.tolist()) == ([1.0, 1.0], [0.0, 0.0])


def test_groups_of_some_ranks_do_not_wait_for_the_others() -> None:
    def main(rank: int, group: PlainGroup) -> Any:
        first, second = dist.new_group([0, 1]), dist.new_group([1, 2])
        value = torch.ones(1)
        for each in (first, second):
            if isinstance(each, PlainGroup):
                dist.all_reduce(value, group=each)
        return value.item()

    assert on_plain_ranks(3, main) == {0: 2.0, 1: 3.0, 2: 3.0}


def test_who_does_not_come_is_named() -> None:
    def main(rank: int, group: PlainGroup) -> None:
        if rank != 1:
            dist.all_reduce(torch.ones(2))

    with pytest.raises(DesertedError, match=r"rank 0 waits at all_reduce of .2,. float32 for rank 1.*rank 1 has ended"):
        on_plain_ranks(3, main)


def test_ranks_that_come_for_different_things_are_told() -> None:
    def main(rank: int, group: PlainGroup) -> None:
        dist.all_reduce(torch.ones(1 + rank))

    with pytest.raises(DesertedError, match=r"rank 0 for all_reduce of .1,. float32, rank 1 for all_reduce of .2,."):
        on_plain_ranks(2, main)


@pytest.mark.parametrize(
    ("seconds", "ends"),
    [([0.0] * 3, nullcontext()), ([99.0, 101.0], pytest.raises(DesertedError, match="rank 0 has reached no meeting"))],
    ids=["starved", "computes"],
)
def test_a_rank_may_compute_for_as_long_as_the_machine_lets_it(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], ends: AbstractContextManager[Any]
) -> None:
    all_read = threading.Event()

    def read(_: Stopwatch) -> float:
        at = seconds.pop(0) if seconds else 0.0
        if not seconds:
            all_read.set()
        return at

    def main(rank: int, group: PlainGroup) -> None:
        if rank == 0:
            all_read.wait(60)
        dist.barrier()

    monkeypatch.setattr(Stopwatch, "seconds", property(read))
    with ends:
        on_plain_ranks(2, main)
    assert all_read.is_set()


def test_what_a_rank_raises_is_what_comes_out() -> None:
    def main(rank: int, group: PlainGroup) -> None:
        if rank == 1:
            raise LookupError("of the program")
        dist.barrier()

    with pytest.raises(LookupError, match="of the program"):
        on_plain_ranks(2, main)


def test_each_rank_has_its_random_state_and_the_process_gets_its_own_back() -> None:
    def main(rank: int, group: PlainGroup) -> Any:
        drawn = []
        for _ in range(3):
            torch.rand(rank + 1)
            dist.barrier()
            drawn.append(torch.rand(1).item())
        return drawn

    torch.manual_seed(7)
    before = torch.get_rng_state()
    results = on_plain_ranks(3, main)
    assert torch.equal(before, torch.get_rng_state())
    assert not dist.is_initialized()
    for rank in range(3):
        torch.manual_seed(7)
        assert results[rank] == [(torch.rand(rank + 1), torch.rand(1).item())[1] for _ in range(3)]


def test_the_definition_knows_no_other_ddp() -> None:
    for path in Path(present(conformance.truth.__file__)).parent.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert "DistributedDataParallel" not in names, path
        assert not [module for module in modules if (module or "").startswith(("torch.nn.parallel", "ddp_impl"))], path


def disagreement(scenario: Scenario, expected: Mapping[int, Facts]) -> str:
    """Return where the program on plain ranks observes what its expectation does not allow; empty if nowhere."""
    try:
        facts = truth_of(scenario)
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    for rank, wanted in expected.items():
        for name, value in wanted.items():
            if name not in facts[rank]:
                return f"rank {rank} has not observed {name}"
            if found := mismatch(value, facts[rank][name]):
                return f"rank {rank}, {name}: {found.reason}"
    return ""


def sampled(program: str, every: int) -> list[Scenario]:
    chosen = [one for one in load_scenarios() if one.program == program and one.world_size <= 4 and not one.faults]
    return chosen[::every]


def expected_of(scenario: Scenario) -> Mapping[int, Facts]:
    with single_threaded():
        return present(get_program(scenario.program).expectation)(scenario)


@pytest.mark.parametrize("program", AGREEING)
def test_the_program_itself_says_what_its_expectation_says(program: str) -> None:
    chosen = sampled(program, 1)
    for scenario in (chosen[0], chosen[len(chosen) // 2], chosen[-1]):
        assert disagreement(scenario, expected_of(scenario)) == "", scenario.id
