"""The smoke ladder: it holds on gloo, and stops at the right rung with the right sentence on what is broken."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner, Result

from conformance.backends.backend import CAPABILITIES as BACKEND_CAPABILITIES
from conformance.backends.gloo import GLOO
from conformance.cli import main
from conformance.cli.smoke import _declaration, _next
from conformance.observation import Collective, Ending, Observation, Raised
from conformance.programs.operations.cell import REDUCTIONS, Cell
from conformance.programs.operations.data import COMPLEX, FLOAT8, FLOATS, INTEGERS
from conformance.programs.operations.description import OPERATIONS
from conformance.smoke import ladder
from conformance.smoke.breakage import Breakage, find_breakage
from conformance.smoke.ladder import Status, climb
from conformance.smoke.rungs import COLLECTIVES, Rung
from conformance.subjects.subject import CAPABILITIES
from conformance.tests.busy_machine import at_this_load
from conformance.truth.expected import Right
from conformance.workers.zygote_process import ZygoteProcess

BROKEN = "broken_backends"
OF_DTYPES = "conformance.chapters.backend.dtypes.mutants"
SUBJECTS = "conformance.tests.subjects"


def smoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["smoke", *arguments])


#: What is asked before any collective.
FIRST_RUNGS = ("import", "import DDP", "declaration", "factory", "rendezvous", "name")


def footings(output: str) -> list[tuple[str, ...]]:
    """Return status and rung of every line of the ladder."""
    lines = output.split("\n\n")[0].splitlines()
    return [(line[:12].strip(), line[12:42].strip()) for line in lines if line[:12].strip() and line[12:13].strip()]


def test_gloo_keeps_every_rung_and_so_do_both_ddps(monkeypatch: pytest.MonkeyPatch, zygote: ZygoteProcess) -> None:
    monkeypatch.setattr(ladder, "climb", partial(climb, zygote=zygote))
    result = smoke()
    assert result.exit_code == 0, result.output
    found = footings(result.stdout.partition("Every rung")[0])
    collectives = [rung for rung in COLLECTIVES if rung.is_tried(3, GLOO.capabilities)]
    refused = {rung.name for rung in collectives if rung.capability and rung.capability not in GLOO.capabilities}
    names = (*FIRST_RUNGS, *(rung.name for rung in collectives), "step of torch", "step of ddp_impl")
    assert found == [("absent" if name in refused else "ok", name) for name in names]
    assert refused == {"float8", "int16", "premul_sum"}
    assert "Every rung holds. Next, few scenarios, which find most mistakes:\n" in result.stdout
    commands = [line.strip() for line in result.stdout.splitlines() if line.startswith("    ddp-conformance")]
    assert commands == [f"ddp-conformance run --profile {name}" for name in ("quick", "core")]


@pytest.mark.nightly
def test_the_first_broken_rung_ends_the_climb_with_what_to_do() -> None:
    result = smoke("--backend", f"{BROKEN}:wrong_sum")
    assert result.exit_code == 1, result.output
    assert footings(result.output)[-1] == ("BROKEN", "all_reduce")
    for line in (
        "all_reduce SUM of float32, 7 elements: wrong on rank 1, right on ranks 0 and 2: the result: 7 of 7 elements",
        "asked       every rank gets the sum of what all ranks pass, in place",
        "came        rank 1: the result: 7 of 7 elements are wrong, the first at [0]: expected -1111763.0",
        "do          In allreduce, every rank's tensor must end up with the same sum",
    ):
        assert line in result.output


@pytest.mark.parametrize(
    ("backend", "rung", "summary", "came"),
    [
        pytest.param(
            "stuck_broadcast",
            "broadcast",
            "no rank came back from broadcast of float32, 7 elements, root 0 within {deadline_s} s",
            "rank 1 is in broadcast of float32, 7 elements, root 0",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "no_future",
            "futures",
            "no rank came back from all_reduce SUM of float32, 7 elements, lifetime value within {deadline_s} s",
            "rank 0 is in all_reduce SUM of float32, 7 elements, lifetime value",
            marks=pytest.mark.nightly,
        ),
        (
            "misrouted_all_to_all",
            "all_to_all",
            "all_to_all_single of float32, 7 elements for each rank: wrong on ranks 0, 1 and 2: the result: 21 of 21",
            "the part in which it is holds what rank 0 has for rank 1",
        ),
        (
            "empty_barrier",
            "barrier",
            "barrier: wrong on ranks 0, 1 and 2: left the barrier before rank 2 had come",
            "rank 2: rank 0 left the barrier before rank 2 had come",
        ),
        (
            "no_group_on_rank_1",
            "rendezvous",
            "rank 1 raised in rendezvous: BackendError: backend 'no_group_on_rank_1': create(store, 1, 3, timeout) must"
            " return a c10d Backend or ProcessGroup; on rank 1 it returned None",
            "",
        ),
        pytest.param(
            "stuck_factory",
            "factory",
            "rank 0 did not come back from rendezvous within {deadline_s} s",
            "rank 0 is in rendezvous",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_broken_backend_stops_the_climb_at_its_rung(
    zygote: ZygoteProcess, backend: str, rung: str, summary: str, came: str
) -> None:
    deadline_s = round(at_this_load(2))
    *held, last = climb(f"{BROKEN}:{backend}", "torch", deadline_s=deadline_s, zygote=zygote)
    assert (last.rung, last.status) == (rung, Status.BROKEN)
    assert {footing.status for footing in held} == {Status.HOLDS}
    assert last.breakage is not None
    assert last.breakage.summary.startswith(summary.format(deadline_s=deadline_s))
    assert came in last.breakage.came
    assert last.breakage.advice
    if backend == "stuck_broadcast":  # the others wait for the one that never takes part
        first_stack = last.breakage.evidence.partition("Stack of ranks")[0]
        assert first_stack.startswith("Stack of rank 1, the latest call first:")
        assert "broken_backends.py" in first_stack


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("backend", "rung"),
    [
        ("reductions.mutants:divides_by_the_world", "avg"),
        ("works.mutants:is_never_asynchronous", "async calls"),
        ("works.mutants:waits_only_without_a_timeout", "async work"),
        ("layouts.mutants:divides_by_no_elements", "no elements"),
        ("layouts.mutants:writes_memory_in_order", "strided outputs"),
    ],
)
def test_a_mutant_backend_stops_the_climb_at_its_rung(zygote: ZygoteProcess, backend: str, rung: str) -> None:
    *held, last = climb(f"conformance.chapters.backend.{backend}", "torch", deadline_s=at_this_load(4), zygote=zygote)
    assert (last.rung, last.status) == (rung, Status.BROKEN)
    assert not any(footing.status is Status.BROKEN for footing in held)


#: One that holds and four that do not; after each of these the ranks are made anew, in all of them for a minute.
FEW = ("broadcast", "all_reduce", "all_reduce max/min", "async work", "new_group")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "rungs",
    [
        pytest.param(tuple(rung for rung in COLLECTIVES if rung.name in FEW), id="few"),
        pytest.param(COLLECTIVES, id="all"),
    ],
)
def test_all_broken_rungs_are_explained_in_one_go(monkeypatch: pytest.MonkeyPatch, rungs: tuple[Rung, ...]) -> None:
    monkeypatch.setattr(ladder, "COLLECTIVES", rungs)
    result = smoke("--backend", f"{BROKEN}:wrong_sum", "--keep-going")
    assert result.exit_code == 1, result.output
    broken = [name for status, name in footings(result.stdout) if status == "BROKEN"]
    assert broken[0] == "all_reduce"
    assert {"all_reduce max/min", "async work", "new_group"} <= set(broken)
    assert ("ok", "broadcast") in footings(result.stdout)
    explained = [line.split(maxsplit=1)[1] for line in result.stdout.splitlines() if line.startswith("rung ")]
    assert explained == broken
    assert "step of" not in result.stdout


@pytest.mark.nightly
def test_what_is_not_declared_is_tried_and_said(zygote: ZygoteProcess) -> None:
    found = {one.rung: one for one in climb(f"{BROKEN}:modest", "torch", world_size=2, zygote=zygote)}
    assert not any(one.status is Status.BROKEN for one in found.values())
    assert found["avg"].status is Status.UNDECLARED
    assert found["avg"].detail == "works: add 'avg' to the capabilities to be judged by it"
    assert found["send/recv"].status is Status.ABSENT
    assert found["all_to_all"].status is Status.UNCLEAN
    assert "'all_to_all' is not declared; a clean error would be better: all_to_all_s" in found["all_to_all"].detail


def test_a_group_that_does_not_work_after_a_refusal_is_broken(
    monkeypatch: pytest.MonkeyPatch, zygote: ZygoteProcess
) -> None:
    rungs = [rung for rung in COLLECTIVES if rung.name in ("all_reduce", "int16", "avg")]
    monkeypatch.setattr(ladder, "COLLECTIVES", rungs)
    climbed = climb(f"{BROKEN}:left_open", "torch", world_size=2, zygote=zygote, keep_going=True)
    found = {one.rung: one for one in climbed}
    assert found["int16"].status is Status.BROKEN
    assert found["int16"].detail.startswith("after the ranks refused it, all_reduce SUM of float32, 7 elements: wrong")
    assert found["avg"].status is Status.HOLDS  # on other ranks


@pytest.mark.nightly
def test_what_a_ddp_can_do_and_does_not_declare_is_said(zygote: ZygoteProcess) -> None:
    found = {one.rung: one for one in climb("gloo", f"{SUBJECTS}:MODEST_DDP", world_size=2, zygote=zygote)}
    assert found["no_sync"].status is Status.UNDECLARED
    assert found["no_sync"].detail == "its first scenario passes: declare 'no_sync' for the DDP to be judged by it"
    assert found["replicated_parameters"].status is Status.ABSENT
    assert "join" not in found, "it is declared"


@pytest.mark.nightly
def test_what_a_class_lacks_is_found_by_trying(zygote: ZygoteProcess) -> None:
    found = {one.rung: one for one in climb("gloo", f"{SUBJECTS}:Plain", world_size=2, zygote=zygote)}
    assert not any(one.status is Status.BROKEN for one in found.values())
    lacking = {name for name, one in found.items() if one.status is Status.LACKING}
    assert lacking > {"ignored_parameters", "replicated_parameters"}, "which it lacks without an error of its own"
    assert lacking > {"comm_hook", "join", "no_sync", "static_graph", "gradient_as_bucket_view"}
    assert found["join"].detail == "it has no method join"
    assert found["static_graph"].detail.endswith(":Plain takes no argument static_graph")


@pytest.mark.nightly
def test_an_option_that_nobody_reads_is_found_by_trying(zygote: ZygoteProcess) -> None:
    found = {one.rung: one for one in climb("gloo", f"{SUBJECTS}:Swallows", world_size=2, zygote=zygote)}
    lacking = {name: one.detail for name, one in found.items() if one.status is Status.LACKING}
    for option in ("find_unused_parameters", "gradient_as_bucket_view", "init_sync", "mixed_precision"):
        assert lacking[option] == f"it takes {option} as it takes any argument, and does the same without it"
    assert "static_graph" not in lacking, "it is right without reading it"


@pytest.mark.nightly
def test_a_class_that_lacks_nothing_ends_without_a_declaration(zygote: ZygoteProcess) -> None:
    found = climb("gloo", "conformance.tests.peculiar_ddps:OwnErrors", world_size=2, zygote=zygote)
    assert Status.LACKING not in {one.status for one in found if one.rung in ("comm_hook", "join", "no_sync")}


def test_what_to_type_next_names_the_declaration_where_there_is_one() -> None:
    assert _next("gloo", " --ddp declared_ddp:SUBJECT").endswith("--profile core --ddp declared_ddp:SUBJECT")
    assert _next("acme", " --backend acme").splitlines()[1].strip() == (
        "ddp-conformance run --profile backend --fail-fast --backend acme"
    )


def test_the_declaration_of_what_is_lacking_can_be_pasted() -> None:
    text = _declaration("my_pkg.ddp:MyDDP", ["join", "no_sync"])
    pasted: dict[str, Any] = {}
    exec(text, pasted)
    subject = pasted["SUBJECT"]
    assert (subject.name, subject.target) == ("MyDDP", "my_pkg.ddp:MyDDP")
    assert CAPABILITIES - subject.capabilities == {"join", "no_sync"}


@pytest.mark.parametrize(
    ("arguments", "rung", "sentence"),
    [
        (["--backend", "glue"], "import", "unknown backend 'glue'; expected gloo, nccl"),
        (["--backend", "nowhere:BACKEND"], "import", "cannot import nowhere: ModuleNotFoundError"),
        (["--ddp", "ddp_imp"], "import DDP", "did you mean ddp_impl?"),
        (
            ["--backend", "conformance.tests.subjects:NO_DRIVER"],
            "declaration",
            "cannot be used here: its driver is not loaded",
        ),
        (
            ["--backend", "conformance.tests.subjects:MISSPELT"],
            "declaration",
            "capability 'all-to-all' means nothing to any scenario; did you mean all_to_all",
        ),
    ],
)
def test_what_breaks_before_there_is_a_rank(arguments: list[str], rung: str, sentence: str) -> None:
    result = smoke(*arguments)
    assert result.exit_code == 1
    assert footings(result.output)[-1] == ("BROKEN", rung)
    assert sentence in result.output


def test_more_ranks_than_the_backend_serves_are_a_mistake_in_the_question() -> None:
    result = smoke("--backend", "conformance.tests.subjects:TWO_RANKS", "--world-size", "3")
    assert result.exit_code == 2
    assert "serves at most 2 rank(s) here, got world size 3" in result.stderr


ISSUED = Collective(0, "all_reduce", "default", ((4,),), ("float32",), "sum", phase="start", finished=False)


def broken_by(*observations: Observation) -> Breakage:
    expected = {one.rank: {"sum": torch.ones(2)} for one in observations}
    seen = {one.rank: one for one in observations}
    found = find_breakage(seen, expected, deadline_s=5, advice="look there")
    assert found is not None
    return found


def test_nothing_is_broken_when_every_fact_is_as_expected() -> None:
    fine = Observation(0, Ending("returned"), facts={"sum": torch.ones(2)})
    assert find_breakage({0: fine}, {0: {"sum": torch.ones(2)}}, deadline_s=5, advice="") is None


def test_a_death_is_said_before_the_hang_that_it_causes() -> None:
    found = broken_by(
        Observation(0, Ending("hung"), phase="start", history=(ISSUED,)),
        Observation(1, Ending("killed", 11, "killed by SIGSEGV"), phase="start", history=(ISSUED,)),
    )
    assert found.summary == "rank 1 died in all_reduce #0 (4 x float32, sum): killed by SIGSEGV"


def test_an_error_on_one_rank_names_it_and_the_place() -> None:
    raised = Raised(
        "RuntimeError", ("RuntimeError", "Exception"), "no route", "Traceback\n  File x\nRuntimeError: no route"
    )
    found = broken_by(
        Observation(0, Ending("abandoned"), phase="start", history=(ISSUED,)),
        Observation(1, Ending("raised"), raised=raised, phase="work.wait()", history=(ISSUED,)),
    )
    assert (
        found.summary == "rank 1 raised in work.wait() after all_reduce #0 (4 x float32, sum): RuntimeError: no route"
    )
    assert found.advice == "look there"
    assert "RuntimeError: no route" in found.evidence


def test_a_rank_that_hangs_alone_is_told_from_those_that_came_back() -> None:
    found = broken_by(
        Observation(0, Ending("returned"), facts={"sum": torch.ones(2)}, history=(ISSUED,)),
        Observation(1, Ending("hung"), phase="start", history=(ISSUED,)),
    )
    assert found.summary == "rank 1 did not come back from all_reduce #0 (4 x float32, sum) within 5 s, rank 0 did"


def test_the_rank_that_is_elsewhere_is_named() -> None:
    def at(place: str) -> str:
        return f'Thread 0x1 (most recent call first):\n  File "{place}.py", line 3 in issue\n'

    stuck = [
        Observation(rank, Ending("hung"), phase="start", history=(ISSUED,), stack=at("other" if rank == 2 else "wait"))
        for rank in range(4)
    ]
    found = broken_by(*stuck)
    assert "; rank 2 is not where the others are (see its stack)" in found.summary
    assert found.evidence.startswith('Stack of rank 2, the latest call first:\n  File "other.py"')


CELL = Cell("all_gather_single").describe()


@pytest.mark.parametrize(
    ("said", "summary", "refused"),
    [
        (("", "", ""), "", False),
        (("it holds 3", "", "it holds 4"), f"{CELL}: wrong on ranks 0 and 2, right on rank 1: it holds 3", False),
        (("raised ValueError: no",) * 3, f"every rank raised in {CELL}: ValueError: no", True),
        (
            ("raised RuntimeError: No backend type associated with device type cpu",) * 3,
            "the process group of every rank has no method all_gather_single, which this torch calls",
            True,
        ),
    ],
)
def test_what_ranks_say_of_a_cell_is_the_sentence(said: tuple[str, ...], summary: str, *, refused: bool) -> None:
    seen = {rank: Observation(rank, Ending("returned"), {CELL: clause}) for rank, clause in enumerate(said)}
    rung = Rung("name", "asks", "advice", (Cell("all_gather_single"),))
    expected = {rank: {CELL: Right()} for rank in seen}
    found = find_breakage(seen, expected, deadline_s=30, advice="", method=rung.method)
    assert (found.summary, found.refused) == (summary, refused) if found is not None else summary == ""


@pytest.mark.parametrize("rung", COLLECTIVES, ids=lambda rung: rung.name)
def test_a_rung_needs_no_more_than_its_capability_and_what_else_is_declared(rung: Rung) -> None:
    assert all(cell.is_possible for cell in rung.cells)
    assert all(rung.capability in cell.needs for cell in rung.cells if rung.capability)
    alone = rung.scenario(3, 30, frozenset()).arguments.get("cells", [])
    assert bool(alone) == bool(rung.cells)
    assert all(Cell.from_json(data).needs <= {rung.capability} for data in alone)


def test_every_dtype_and_reduction_is_tried_in_every_operation_and_every_capability_by_a_rung() -> None:
    cells = {cell for rung in COLLECTIVES for cell in rung.cells}
    for operation, what in OPERATIONS.items():
        dtypes = {cell.dtype for cell in cells if cell.operation == operation}
        left_out = set(FLOAT8) if what.reduces else set(COMPLEX) if operation == "gather" else set()
        assert dtypes >= {*FLOATS, *INTEGERS, *COMPLEX, *FLOAT8, "bool"} - left_out, operation
        reductions = {cell.reduction for cell in cells if cell.operation == operation}
        assert reductions == ({*REDUCTIONS} if what.reduces else {""}), operation
    tried = {rung.capability for rung in COLLECTIVES} - {""}
    # No backend on a CPU has streams; for `notices_death` a rank has to die, which profile backend has time for.
    assert tried == BACKEND_CAPABILITIES - {"streams", "notices_death"}


def test_a_dtype_that_is_broken_in_one_operation_breaks_its_rung(zygote: ZygoteProcess) -> None:
    *held, last = climb(f"{OF_DTYPES}:takes_bfloat16_for_nothing", "torch", zygote=zygote)
    assert (last.rung, last.status) == ("bfloat16", Status.BROKEN)
    assert last.breakage is not None
    assert last.breakage.summary.startswith(
        "all_to_all_uneven of bfloat16, 0, 1 or 2 times 7 elements for each rank: wrong on ranks 0, 1 and 2: "
    )
    assert {footing.status for footing in held} == {Status.HOLDS}


def test_a_method_that_a_group_in_python_lacks_is_named_as_torch_calls_it() -> None:
    message = "No backend type associated with device type cpu"
    raised = Observation(0, Ending("raised"), raised=Raised("RuntimeError", ("RuntimeError",), message, "a traceback"))
    rung = next(rung for rung in COLLECTIVES if rung.name == "all_gather_into_tensor")
    assert hasattr(dist.ProcessGroup, rung.method())
    assert rung.method() in rung.hint
    found = find_breakage({0: raised}, None, deadline_s=30, advice=rung.hint, method=rung.method)
    assert found is not None
    assert found.summary == f"the process group of rank 0 has no method {rung.method()}, which this torch calls"
    assert found.evidence == ""


def test_on_a_hang_the_other_python_threads_of_the_guilty_rank_are_shown() -> None:
    stack = 'Thread 1 (most recent call first):\n  File "transport.py", line 7 in receive\n'
    main_thread = 'Thread 2 (most recent call first):\n  File "group.py", line 3 in wait\n'
    hung = {rank: Observation(rank, Ending("hung"), stack=stack + main_thread) for rank in (0, 1)}
    found = find_breakage(hung, None, deadline_s=30, advice="")
    assert found is not None
    assert 'Another thread of rank 0:\n  File "transport.py", line 7 in receive' in found.evidence
