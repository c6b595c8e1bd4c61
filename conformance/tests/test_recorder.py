"""The recorder on two real ranks: it sees everything, says when and for whom, and changes nothing.

Both ranks run every experiment below twice in one process, recorded and unrecorded; the tests look at what came of it.
"""

import copy
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, HashStore
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.join import Join
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from conformance.backends.gloo import GLOO
from conformance.observation import Collective
from conformance.recorder.group import init_process_group
from conformance.recorder.recorder import Recorder
from conformance.truth.difference import difference

WORLD_SIZE = 2
Experiment = Callable[[int, Recorder], Any]
EXPERIMENTS: dict[str, Experiment] = {}


def experiment(function: Experiment) -> Experiment:
    EXPERIMENTS[function.__name__] = function
    return function


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def _train(rank: int, recorder: Recorder, **options: Any) -> list[Tensor]:
    recorder.entered("construct", -1, True)
    model = DistributedDataParallel(_model(), **options)
    gradients = []
    for step in range(3):
        recorder.entered("forward", step, True)
        loss = model(torch.arange(6.0).reshape(2, 3) * (rank + 1)).pow(2).sum()
        recorder.entered("backward", step, True)
        loss.backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return gradients


@experiment
def copies_of_the_group(rank: int, recorder: Recorder) -> Any:
    try:
        return copy.deepcopy(_world())
    except TypeError as error:
        return str(error)


@experiment
def ddp(rank: int, recorder: Recorder) -> Any:
    return _train(rank, recorder)


@experiment
def ddp_with_views(rank: int, recorder: Recorder) -> Any:
    return _train(rank, recorder, gradient_as_bucket_view=True)


@experiment
def ddp_unused(rank: int, recorder: Recorder) -> Any:
    return _train(rank, recorder, find_unused_parameters=True)


@experiment
def ddp_join(rank: int, recorder: Recorder) -> Any:
    model = DistributedDataParallel(nn.Linear(3, 1, bias=False))
    with Join([model]):
        for _ in range(1 + rank):
            model(torch.full((1, 3), rank + 1.0)).sum().backward()
    return model.module.weight.grad


@experiment
def ddp_logging_data(rank: int, recorder: Recorder) -> Any:
    data = DistributedDataParallel(nn.Linear(3, 1))._get_ddp_logging_data()
    return data["backend_name"], data["world_size"], data["rank"]


@experiment
def names(rank: int, recorder: Recorder) -> Any:
    world = _world()
    return dist.get_backend(), world.group_name, world.name(), world.rank(), world.size(), len(world._device_types)


@experiment
def operations(rank: int, recorder: Recorder) -> Any:
    """Every collective of torch.distributed that gloo has, with data that tells the ranks apart."""
    mine = torch.tensor([rank + 1.0, 10.0 * (rank + 1)])
    summed, averaged, broadcast, reduced = mine.clone(), mine.clone(), mine.clone(), mine.clone()
    dist.all_reduce(summed)
    dist.all_reduce(averaged, op=dist.ReduceOp.AVG)
    dist.broadcast(broadcast, 1)
    dist.reduce(reduced, 1, op=dist.ReduceOp.MAX)
    gathered = [torch.empty(2) for _ in range(WORLD_SIZE)]
    dist.all_gather(gathered, mine)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names that newer versions of torch deprecate are what must be covered too
        flat = torch.empty(4)
        dist.all_gather_into_tensor(flat, mine)
        part = torch.empty(1)
        dist.reduce_scatter_tensor(part, mine)
    collected = [torch.empty(2) for _ in range(WORLD_SIZE)] if rank == 0 else None
    dist.gather(mine, collected)
    scattered = torch.empty(1)
    dist.scatter(scattered, [torch.tensor([5.0]), torch.tensor([6.0])] if rank == 1 else None, src=1)
    exchanged = torch.empty(2)
    dist.all_to_all_single(exchanged, mine)
    pieces = [torch.empty(1) for _ in range(WORLD_SIZE)]
    dist.all_to_all(pieces, list(mine.chunk(2)))
    scattered_sums = torch.empty(1)
    dist.reduce_scatter(scattered_sums, list(mine.chunk(2)))
    dist.barrier()
    dist.monitored_barrier()
    received = [*gathered, flat, part, *(collected or []), scattered, exchanged, *pieces, scattered_sums]
    return [summed, averaged, broadcast, reduced, *received]


@experiment
def coalesced(rank: int, recorder: Recorder) -> Any:
    one, other = torch.full((2,), rank + 1.0), torch.full((3,), rank + 2.0)
    with distributed_c10d._coalescing_manager():
        dist.all_reduce(one)
        dist.all_reduce(other)
    return one, other


@experiment
def objects(rank: int, recorder: Recorder) -> Any:
    found: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(found, {"rank": rank})
    return found


@experiment
def sparse(rank: int, recorder: Recorder) -> Any:
    value = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.tensor([rank + 1.0]), (3,), check_invariants=True)
    dist.all_reduce(value)
    return value.to_dense()


@experiment
def point_to_point(rank: int, recorder: Recorder) -> Any:
    dist.all_reduce(torch.ones(1))
    got = torch.empty(2)
    if rank == 0:
        dist.send(torch.tensor([1.0, 2.0]), 1)
    else:
        dist.recv(got, 0)
    back = torch.empty(1)
    sides = [dist.P2POp(dist.isend, torch.tensor([rank + 1.0]), 1 - rank), dist.P2POp(dist.irecv, back, 1 - rank)]
    for work in dist.batch_isend_irecv(sides):
        work.wait()
    dist.all_reduce(torch.ones(1))
    return (got if rank == 1 else None), back


@experiment
def functional_collectives(rank: int, recorder: Recorder) -> Any:
    mine = torch.full((2,), rank + 1.0)
    return functional.all_reduce(mine, "sum", _world()) + 0, functional.broadcast(mine, 1, _world()) + 0


def _compiled(rank: int, backend: str) -> Any:
    torch._dynamo.reset()
    world = _world()

    def body(value: Tensor) -> Tensor:
        reduced: Tensor = functional.all_reduce(value * 2, "sum", world)
        return reduced + 1

    def in_place(value: Tensor) -> Tensor:
        value = value * 2
        dist.all_reduce(value)
        return value + 1

    mine = torch.full((2,), rank + 1.0)
    return [torch.compile(body_, backend=backend, fullgraph=True)(mine) for body_ in (body, in_place)]


@experiment
def compiled_eager(rank: int, recorder: Recorder) -> Any:
    return _compiled(rank, "eager")


@experiment
def compiled_aot_eager(rank: int, recorder: Recorder) -> Any:
    return _compiled(rank, "aot_eager")


@experiment
def new_group(rank: int, recorder: Recorder) -> Any:
    pair, lone = dist.new_group([0, 1]), dist.new_group([1])
    value = torch.full((2,), rank + 1.0)
    dist.all_reduce(value, group=pair)
    if rank == 1:
        dist.all_reduce(value, group=lone)
    answer = value, dist.get_backend(pair), dist.get_group_rank(pair, rank)
    dist.destroy_process_group(pair)
    return answer


@experiment
def named_group(rank: int, recorder: Recorder) -> Any:
    answers = []
    for name in ("gloo", "cpu:gloo"):
        group = dist.new_group(backend=name)
        value = torch.full((2,), rank + 1.0)
        dist.all_reduce(value, group=group)
        answers.append((value, dist.get_backend(group)))
        dist.destroy_process_group(group)
    return answers


@experiment
def nobody_waits(rank: int, recorder: Recorder) -> Any:
    dist.all_reduce(torch.ones(1), async_op=True)
    waited = dist.all_reduce(torch.ones(1), async_op=True)
    taken = dist.all_reduce(torch.ones(1), async_op=True)
    assert waited is not None
    assert taken is not None
    return waited.wait(), taken.get_future().wait()[0]


@experiment
def futures(rank: int, recorder: Recorder) -> Any:
    work = dist.all_reduce(torch.full((2,), rank + 1.0), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0] * 10).wait()


@experiment
def lets_go(rank: int, recorder: Recorder) -> Any:
    """Whether of the works that are over none but the last is kept; gloo's own threads may hold tensors for a while."""
    dist.broadcast(torch.ones(3), 0)
    dist.all_reduce(torch.ones(1))
    return sum(work.has_landed for work in getattr(_world(), "_recent", ())) <= 1


@experiment
def wrong_call(rank: int, recorder: Recorder) -> Any:
    try:
        dist.all_reduce(torch.ones(1, dtype=torch.int64), op=dist.ReduceOp.AVG)
    except Exception as error:
        return type(error).__name__
    return None


class RefusedError(Exception):
    """Raised before a collective is issued."""


def _rank_main(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    announced: list[Collective] = []

    def announce(collective: Collective) -> None:
        announced.append(collective)
        if collective.phase == "refuse":
            raise RefusedError

    recorder = Recorder(announce)
    report: dict[str, Any] = {}
    for mode, its_recorder in (("recorded", recorder), ("unrecorded", None)):
        store = FileStore(f"{directory}/{mode}", WORLD_SIZE)
        init_process_group(GLOO, its_recorder, store=store, rank=rank, world_size=WORLD_SIZE)
        for name, function in EXPERIMENTS.items():
            recorder.start()
            value = function(rank, recorder)
            report[f"{mode}/{name}"] = (value, recorder.history())
        if its_recorder is not None:
            report["announced before refusal"] = len(announced)
            recorder.start()
            recorder.entered("refuse", 0, True)
            try:
                dist.all_reduce(torch.ones(1))
            except RefusedError:
                report["refused"] = recorder.history()
        dist.destroy_process_group()
    report["announced"] = announced
    torch.save(report, f"{directory}/rank{rank}.pt")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("recorder")
    spawn(_rank_main, (str(directory),), nprocs=WORLD_SIZE)
    return [_load(directory / f"rank{rank}.pt") for rank in range(WORLD_SIZE)]


def _load(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = torch.load(path, weights_only=False)
    return report


def _history(report: dict[str, Any], name: str) -> tuple[Collective, ...]:
    history: tuple[Collective, ...] = report[f"recorded/{name}"][1]
    return history


def _ops(report: dict[str, Any], name: str, phase: str = "") -> list[str]:
    return [one.op for one in _history(report, name) if one.phase == phase]


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_changes_no_result(reports: list[dict[str, Any]], name: str) -> None:
    for report in reports:
        recorded, _ = report[f"recorded/{name}"]
        unrecorded, nothing = report[f"unrecorded/{name}"]
        assert difference(recorded, unrecorded) is None
        assert nothing == ()


def test_keeps_no_tensor_of_what_is_over(reports: list[dict[str, Any]]) -> None:
    assert [report["recorded/lets_go"][0] for report in reports] == [True, True]


def test_sees_the_cpp_reducer_with_phase_and_step(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        for name in ("ddp", "ddp_with_views"):
            assert _ops(report, name, "construct")[:1] == ["all_gather"]
            reduced = [one for one in _history(report, name) if one.phase == "backward"]
            assert [(one.op, one.numel, one.reduce_op, one.step) for one in reduced] == [
                ("all_reduce", 34, "sum", step) for step in range(3)
            ]
            assert {(one.op, one.root) for one in _history(report, name) if one.phase == "forward"} == {
                ("broadcast", 0)
            }
            assert all(one.finished and one.group == "default" for one in _history(report, name))


def test_sees_the_bitmap_of_used_parameters(reports: list[dict[str, Any]]) -> None:
    dtypes = [one.dtypes for one in _history(reports[0], "ddp_unused") if one.op == "all_reduce"]
    assert ("int32",) in dtypes


def test_sees_what_join_shadows(reports: list[dict[str, Any]]) -> None:
    first, second = (_ops(report, "ddp_join") for report in reports)
    assert first == second
    assert first.count("all_reduce") > 4


def test_names_every_operation(reports: list[dict[str, Any]]) -> None:
    history = _history(reports[0], "operations")
    assert [one.op for one in history] == [
        "all_reduce", "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor",
        "reduce_scatter_tensor", "gather", "scatter", "all_to_all_single", "all_to_all", "reduce_scatter", "barrier",
        "monitored_barrier",
    ]  # fmt: skip
    assert [one.index for one in history] == list(range(len(history)))
    assert [one.reduce_op for one in history[:4]] == ["sum", "avg", "", "max"]
    assert [one.root for one in history[:4]] == [-1, -1, 1, 1]
    assert history[8].root == 1
    assert history[0].shapes == ((2,),)
    assert history[-1].root == -1
    assert [one.signature for one in history] == [one.signature for one in _history(reports[1], "operations")]


def test_results_are_the_arithmetic_ones(reports: list[dict[str, Any]]) -> None:
    values, _ = reports[1]["recorded/operations"]
    assert [value.tolist() for value in values[:4]] == [[3, 30], [1.5, 15], [2, 20], [2, 20]]
    assert reports[0]["recorded/compiled_aot_eager"][0][0].tolist() == [7, 7]
    assert reports[0]["recorded/futures"][0].tolist() == [30, 30]
    assert reports[0]["recorded/new_group"][0][0].tolist() == [3, 3]


def test_sees_coalesced_operations_as_one(reports: list[dict[str, Any]]) -> None:
    (collective,) = _history(reports[0], "coalesced")
    assert (collective.op, collective.shapes, collective.finished) == ("all_reduce_coalesced", ((2,), (3,)), True)


def test_sees_object_collectives(reports: list[dict[str, Any]]) -> None:
    assert [one.dtypes for one in _history(reports[0], "objects")] == [("int64",), ("uint8",)]


def test_sees_sparse_reductions(reports: list[dict[str, Any]]) -> None:
    (collective,) = _history(reports[0], "sparse")
    assert (collective.op, collective.numel) == ("all_reduce", 3)


def test_counts_point_to_point_apart(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        history = _history(report, "point_to_point")
        assert [one.index for one in history if one.op == "all_reduce"] == [0, 1]
        assert [one.index for one in history if one.op != "all_reduce"] == [0, 1, 2]
    assert [(one.op, one.root) for one in _history(reports[0], "point_to_point")][1] == ("send", 1)


@pytest.mark.parametrize("name", ["functional_collectives", "compiled_eager", "compiled_aot_eager"])
def test_sees_functional_collectives_inside_and_outside_graphs(reports: list[dict[str, Any]], name: str) -> None:
    for report in reports:
        history = _history(report, name)
        assert len(history) == 2
        assert history[0].op == "all_reduce"
        assert all(one.finished for one in history)


def test_records_groups_made_later_under_their_own_names(reports: list[dict[str, Any]]) -> None:
    first, second = (_history(report, "new_group") for report in reports)
    assert [one.group for one in first] == ["group 1"]
    assert [(one.group, one.index) for one in second] == [("group 1", 0), ("group 2", 0)]
    assert [one.members for one in (*first, *second)] == [(0, 1), (0, 1), (1,)]


def test_records_groups_made_by_the_real_name(reports: list[dict[str, Any]]) -> None:
    """As a DDP makes one that communicates in a group of its own alone."""
    for report in reports:
        assert [one.op for one in _history(report, "named_group")] == ["all_reduce"] * 2
        assert [(value.tolist(), name) for value, name in report["recorded/named_group"][0]] == [([3, 3], "gloo")] * 2


def test_answers_with_the_real_names(reports: list[dict[str, Any]]) -> None:
    assert reports[0]["recorded/names"][0][0] == "gloo"
    assert reports[0]["recorded/names"][0][2] == "gloo"
    assert reports[0]["recorded/ddp_logging_data"][0] == ("gloo", 2, 0)
    assert reports[1]["recorded/new_group"][0][1] == "gloo"


def test_knows_what_nobody_waited_for(reports: list[dict[str, Any]]) -> None:
    assert [one.finished for one in _history(reports[0], "nobody_waits")] == [False, True, True]
    assert all(one.duration_ns > 0 for one in _history(reports[0], "nobody_waits")[1:])


def test_hands_errors_on(reports: list[dict[str, Any]]) -> None:
    assert reports[0]["recorded/wrong_call"][0] is not None
    assert [one.finished for one in _history(reports[0], "wrong_call")] == [False]


def test_announces_before_issuing_and_forgets_what_was_refused(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        recorded = sum(len(report[f"recorded/{name}"][1]) for name in EXPERIMENTS)
        assert report["announced before refusal"] == recorded
        assert report["refused"] == ()
        assert len(report["announced"]) == recorded + 1
        assert not any(one.finished for one in report["announced"])


def test_wraps_a_bare_backend() -> None:
    recorder = Recorder()
    group = recorder.wrap(dist.ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=20)), "lone")
    value = torch.ones(2)
    group.allreduce([value]).wait()
    group.broadcast(value, root=0).wait()
    group.allreduce(value, dist.ReduceOp.MAX).wait()
    assert [(one.op, one.group, one.reduce_op, one.root) for one in recorder.history()] == [
        ("all_reduce", "lone", "sum", -1),
        ("broadcast", "lone", "", 0),
        ("all_reduce", "lone", "max", -1),
    ]


class Doubling(dist.ProcessGroup):
    """A group written in Python, as vendors' stand-ins are: every all-reduce doubles, and is over at once."""

    def allreduce(self, tensors: list[Tensor], options: object) -> None:  # type: ignore[override]
        tensors[0].mul_(2)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "doubling"


def test_wraps_a_group_written_in_python() -> None:
    recorder = Recorder()
    group = recorder.wrap(Doubling(0, 1), "python")  # type: ignore[call-arg]
    value = torch.ones(2)
    work = group.allreduce([value], dist.AllreduceOptions())
    assert work.wait()
    assert work.is_completed()
    assert work.get_future().wait() == []
    assert value.tolist() == [2, 2]
    assert group.name() == "doubling"
    assert [(one.describe(), one.finished) for one in recorder.history()] == [
        ("all_reduce #0 (2 x float32, sum)", True)
    ]


def test_starts_over() -> None:
    recorder = Recorder()
    group = recorder.wrap(Doubling(0, 1), "python")  # type: ignore[call-arg]
    recorder.entered("backward", 3, False)
    group.allreduce([torch.ones(1)], dist.AllreduceOptions())
    (before,) = recorder.history()
    assert (before.phase, before.step, before.sync) == ("backward", 3, False)
    recorder.start()
    assert recorder.history() == ()
    group.allreduce([torch.ones(1)], dist.AllreduceOptions())
    (after,) = recorder.history()
    assert (after.index, after.phase, after.step, after.sync) == (0, "", -1, True)


class Promising(Doubling):
    """Hands out one future that the test completes."""

    def allreduce(self, tensors: list[Tensor], options: object) -> dist.Work:  # type: ignore[override]
        self.future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        return Promise(self.future)


class Promise(dist.Work):
    """Work that is known by its future only."""

    def __init__(self, future: torch.futures.Future[list[Tensor]]) -> None:
        super().__init__()
        self._future = future

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future

    def is_completed(self) -> bool:
        return self._future.done()


def test_futures_are_watched_until_they_are_done_and_then_let_go() -> None:
    recorder = Recorder()
    inner = Promising(0, 1)  # type: ignore[call-arg]
    work = recorder.wrap(inner, "python").allreduce([torch.ones(1)], dist.AllreduceOptions())
    assert [one.finished for one in recorder.history()] == [False]
    future = work.get_future()
    assert [one.finished for one in recorder.history()] == [False]
    future.set_result([torch.ones(1)])
    value = weakref.ref(future.value()[0])
    del work, future, inner.future
    assert value() is not None
    recorder.entered("optimizer", 0, True)
    assert value() is None
    assert [one.finished for one in recorder.history()] == [True]


def test_what_is_in_flight_is_asked_of_the_backend_whoever_waits() -> None:
    recorder = Recorder()
    inner = Promising(0, 1)  # type: ignore[call-arg]
    group = recorder.wrap(inner, "python")
    group.allreduce([torch.ones(1)], dist.AllreduceOptions())  # nobody keeps the Work
    first = inner.future
    group.allreduce([torch.ones(1)], dist.AllreduceOptions())
    assert [recorder.in_flight(among) for among in (0, 1, 2, 9)] == [0, 1, 2, 2]
    first.set_result([torch.ones(1)])
    assert [recorder.in_flight(among) for among in (1, 2)] == [0, 1]
    assert [one.finished for one in recorder.history()] == [False, False]  # nobody has waited


class Finished(dist.Work):
    """Work that is over."""

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        return True


class Coalescing(Doubling):
    """Like NCCL: what is issued between start and end is launched, and waited for, as one."""

    def _start_coalescing(self, device_type: torch.device) -> None:
        pass

    def _end_coalescing(self, device_type: torch.device) -> dist.Work:
        return Finished()


def test_what_was_coalesced_is_finished_together() -> None:
    recorder = Recorder()
    group = recorder.wrap(Coalescing(0, 1), "python")  # type: ignore[call-arg]
    group._start_coalescing(torch.device("cpu"))
    for _ in range(2):
        group.allreduce([torch.ones(1)], dist.AllreduceOptions())
    work = group._end_coalescing(torch.device("cpu"))
    assert [one.finished for one in recorder.history()] == [False, False]
    work.wait()
    assert [one.finished for one in recorder.history()] == [True, True]
