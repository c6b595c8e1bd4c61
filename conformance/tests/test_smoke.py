"""The smoke ladder: it holds on gloo, and stops at the right rung with the right sentence on what is broken."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner, Result

from conformance.backends.backend import CAPABILITIES as BACKEND_CAPABILITIES
from conformance.backends.backend import UNKNOWN_TO_TORCH
from conformance.backends.gloo import GLOO
from conformance.cli import main
from conformance.cli.smoke import _declaration, _next
from conformance.observation import Ending, Observation, Raised
from conformance.programs import judged
from conformance.programs.operations.cell import REDUCTIONS, Cell
from conformance.programs.operations.data import COMPLEX, FLOAT8, FLOATS, INTEGERS
from conformance.programs.operations.description import OPERATIONS
from conformance.smoke import ladder
from conformance.smoke.breakage import find_breakage
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
    lines = output.split("\n\n")[0].splitlines()
    return [(line[:12].strip(), line[12:42].strip()) for line in lines if line[:12].strip() and line[12:13].strip()]


def test_gloo_keeps_every_rung_and_so_do_both_ddps(monkeypatch: pytest.MonkeyPatch, zygote: ZygoteProcess) -> None:
    monkeypatch.setattr(ladder, "climb", partial(climb, zygote=zygote))
    result = smoke()
    assert result.exit_code == 0, result.output
    found = footings(result.stdout.partition("Every rung")[0])
    declared = GLOO.capabilities - UNKNOWN_TO_TORCH
    collectives = [rung for rung in COLLECTIVES if rung.is_tried(3, declared)]
    refused = {rung.name for rung in collectives if rung.capability and rung.capability not in declared}
    names = (*FIRST_RUNGS, *(rung.name for rung in collectives), "step of torch", "step of ddp_impl")
    assert found == [("absent" if name in refused else "ok", name) for name in names]
    assert refused == {"float8", "gather single", "int16", "premul_sum", *UNKNOWN_TO_TORCH & {"hooks"}}
    assert "Every rung holds. Next, few scenarios, which find most mistakes:\n" in result.stdout
    commands = [line.strip() for line in result.stdout.splitlines() if line.startswith("    ddp-conformance")]
    assert commands == [f"ddp-conformance run --profile {name}" for name in ("quick", "core")]


@pytest.mark.nightly
def test_the_first_broken_rung_ends_the_climb_with_what_to_do() -> None:
    result = smoke("--backend", f"{BROKEN}:wrong_sum")
    assert result.exit_code == 1, result.output
    assert footings(result.output)[-1] == ("BROKEN", "all_reduce")
    for line in (
        "all_reduce SUM of float32, 7 elements on rank 1 the result: 7 of 7 elements are wrong, the first at [0]: ",
        "asked       every rank gets the sum of what all ranks pass, in place",
        "do          In allreduce, every rank's tensor must end up with the same sum",
        "Also wrong: all_reduce SUM of float64, 7 elements",
    ):
        assert line in result.output


@pytest.mark.parametrize(
    ("backend", "rung", "summary", "evidence"),
    [
        pytest.param(
            "stuck_broadcast",
            "broadcast",
            "ranks 0, 1 and 2 did not end: rank 0 is in phase broadcast of float32, 7 elements, root 0; ",
            "B did not end within {deadline_s} s; it is in phase broadcast of float32, 7 elements, root 0.",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "no_future",
            "futures",
            "ranks 0, 1 and 2 did not end: rank 0 is in phase all_reduce SUM of float32, 7 elements, lifetime value; ",
            "torch/futures/__init__.py",
            marks=pytest.mark.nightly,
        ),
        (
            "misrouted_all_to_all",
            "all_to_all",
            "all_to_all_single of float32, 7 elements for each rank on ranks 0, 1 and 2 the result: 21 of 21 elements",
            "the part in which it is holds what rank 0 has for rank 1",
        ),
        (
            "empty_barrier",
            "barrier",
            "barrier on ranks 0, 1 and 2 left the barrier before rank 2 had come",
            "C rank 0 left the barrier before rank 2 had come",
        ),
        (
            "no_group_on_rank_1",
            "rendezvous",
            "rank 1 raised BackendError in phase rendezvous: backend 'no_group_on_rank_1': create(store, 1, 3, timeout)"
            " must return a c10d Backend or ProcessGroup; on rank 1 it returned None",
            "Rank 0 was then ended by the harness.",
        ),
        pytest.param(
            "stuck_factory",
            "factory",
            "rank 0 did not end: rank 0 is in phase rendezvous",
            "A did not end within {deadline_s} s; it is in phase rendezvous.",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_broken_backend_stops_the_climb_at_its_rung(
    zygote: ZygoteProcess, backend: str, rung: str, summary: str, evidence: str
) -> None:
    deadline_s = round(at_this_load(2))
    *held, last = climb(f"{BROKEN}:{backend}", "torch", deadline_s=deadline_s, zygote=zygote)
    assert (last.rung, last.status) == (rung, Status.BROKEN)
    assert Status.BROKEN not in {footing.status for footing in held}
    assert last.breakage is not None
    assert last.breakage.summary.startswith(summary)
    assert evidence.format(deadline_s=deadline_s) in last.breakage.evidence
    assert last.breakage.advice
    if backend == "stuck_broadcast":  # the others wait for the one that never takes part
        assert last.breakage.summary.endswith("; rank 1 is not where the others are (see its stack)")
        stack = last.breakage.evidence.partition("Rank 1's stack:")[2].partition("Rank 2's stack:")[0]
        assert "broken_backends.py" in stack


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


def test_a_mistake_of_gloos_is_no_mistake_of_the_ddp(monkeypatch: pytest.MonkeyPatch, zygote: ZygoteProcess) -> None:
    rungs = [rung for rung in COLLECTIVES if rung.name in ("broadcast", "all_to_all", "work status", "new_group")]
    monkeypatch.setattr(ladder, "COLLECTIVES", rungs)
    monkeypatch.setattr(ladder, "climb", partial(climb, zygote=zygote))
    result = smoke("--backend", f"{BROKEN}:gloo_of_other_versions")
    assert result.exit_code == 0, result.output
    said = {line[12:42].strip(): line for line in result.stdout.splitlines() if line.startswith("gloo's")}
    assert list(said) == ["all_to_all", "work status"]
    for line in said.values():
        assert f"not the DDP's, but gloo's of torch {torch.__version__}: " in line
    assert footings(result.stdout.partition("Every rung")[0])[-1] == ("ok", "step of ddp_impl")
    assert "Every rung holds but 2, which torch's gloo breaks. " in result.stdout


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
    assert found["int16"].detail.startswith("after the ranks refused it, all_reduce SUM of float32, 7 elements on ")
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


CELL = Cell("all_gather_single").describe()


@pytest.mark.parametrize(
    ("said", "summary", "refused"),
    [
        (("", "", ""), "", False),
        (("it holds 3", "", "it holds 4"), f"{CELL} on ranks 0 and 2 it holds 3", False),
        (("raised ValueError: no",) * 3, f"{CELL} on ranks 0, 1 and 2 raised ValueError: no", True),
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
    found = find_breakage(rung.scenario(3, 30), seen, expected, advice="", method=rung.method)
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


@pytest.mark.nightly
def test_a_dtype_that_is_broken_in_one_operation_breaks_its_rung(zygote: ZygoteProcess) -> None:
    *held, last = climb(f"{OF_DTYPES}:takes_bfloat16_for_nothing", "torch", zygote=zygote)
    assert (last.rung, last.status) == ("bfloat16", Status.BROKEN)
    assert last.breakage is not None
    assert last.breakage.summary.startswith(
        "all_to_all_uneven of bfloat16, 0, 1 or 2 times 7 elements for each rank on ranks 0, 1 and 2 "
    )
    assert {footing.status for footing in held} == {Status.HOLDS}


def test_a_method_that_a_group_in_python_lacks_is_named_as_torch_calls_it() -> None:
    message = "No backend type associated with device type cpu"
    raised = Observation(0, Ending("raised"), raised=Raised("RuntimeError", ("RuntimeError",), message, "a traceback"))
    rung = next(rung for rung in COLLECTIVES if rung.name == "all_gather_into_tensor")
    assert hasattr(dist.ProcessGroup, rung.method())
    assert rung.method() in rung.hint
    found = find_breakage(rung.scenario(1, 30), {0: raised}, None, advice=rung.hint, method=rung.method)
    assert found is not None
    assert found.summary == f"the process group of rank 0 has no method {rung.method()}, which this torch calls"
    assert found.evidence == ""


def test_an_error_of_all_ranks_is_shown_with_its_line_in_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judged, "all_publish", lambda *given: True)
    written: dict[str, Any] = {}
    exec(compile("def allreduce():\n    raise ValueError('no stream')", "/acme/group.py", "exec"), written)
    ctx: Any = SimpleNamespace(rank=0, current_phase="all_reduce")
    said = judged.tried(ctx, "all_reduce", [0], written["allreduce"])
    assert said == "raised ValueError: no stream (/acme/group.py:2, in allreduce)"
    assert judged.tried(ctx, "all_reduce", [0], lambda: str(int("x"))).endswith("base 10: 'x'")  # ours says nothing
