"""That nothing outlives a controller however it ends, and that controllers do not get into each other's way."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.backends.backend import get_backend
from conformance.errors import BackendError, ConformanceError
from conformance.scenario import Fault, Scenario
from conformance.subjects.subject import get_subject
from conformance.tests.busy_machine import at_this_load
from conformance.tests.processes import all_end, processes_under
from conformance.workers.controller import Controller
from conformance.workers.zygote_process import ZygoteProcess

TORCH = get_subject("torch")
PROGRAMS = ("conformance.tests.worker_programs",)
STEP = Scenario(id="controller/CTRL-01/step", requirements=("CTRL-01",), program="workers/step")

#: Runs a scenario whose second rank tells its process id and then waits for ever; after Ctrl-C, another one.
WAITING = """
    import signal
    import sys
    from pathlib import Path
    from conformance.backends.backend import get_backend
    from conformance.scenario import Scenario
    from conformance.subjects.subject import get_subject
    from conformance.tests.processes import processes_under
    from conformance.workers.controller import Controller

    signal.signal(signal.SIGINT, signal.default_int_handler)  # the jobs of a shell may ignore it
    directory, torch_ddp = Path(sys.argv[1]), get_subject("torch")
    wait = Scenario(
        id="controller/CTRL-01/wait", requirements=("CTRL-01",), program="workers/await_interference",
        arguments={"pipe": f"{directory}/pipe", "spawns": True}, deadline_s=100,
    )
    with Controller(get_backend("gloo"), work_dir=directory, preload=(sys.argv[2],)) as controller:
        controller.run(wait.replace(program="workers/idle"), torch_ddp)
        zygote = processes_under(directory)[0]
        try:
            controller.run(wait, torch_ddp)
        except KeyboardInterrupt:
            print("interrupted")
        print(*(seen.fate for seen in controller.run(wait.replace(program="workers/idle"), torch_ddp).values()))
        print(zygote in processes_under(directory))
"""


def run_step(controller: Controller) -> set[str]:
    return {str(seen.fate) for seen in controller.run(STEP, TORCH).values()}


def start_waiting(directory: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a controller in a process group of its own; return it, its zygote, its ranks and what these started."""
    os.mkfifo(directory / "pipe")
    controller = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WAITING), str(directory), *PROGRAMS],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    (directory / "pipe").read_text()
    # A process that has just begun another program shows no environment for a moment.
    deadline = time.monotonic() + at_this_load(10)
    while len(ours := processes_under(directory)) < 4 and time.monotonic() < deadline:
        pass
    assert len(ours) == 4, "a zygote, two ranks, and the child of one"
    return controller, ours


def test_nothing_survives_a_killed_controller(tmp_path: Path) -> None:
    controller, ours = start_waiting(tmp_path)
    controller.kill()
    controller.communicate()
    assert all_end(ours, within_s=5)
    assert [entry.name for entry in tmp_path.iterdir()] == ["pipe"]


@pytest.mark.parametrize("zygote_dies", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_process_in_a_session_of_its_own_ends_with_the_controller(tmp_path: Path, zygote_dies: bool) -> None:
    spawn = STEP.replace(program="workers/spawn", world_size=1, arguments={"alone": True})
    with Controller(get_backend("gloo"), work_dir=tmp_path, preload=PROGRAMS) as controller:
        (seen,) = controller.run(spawn, TORCH).values()
        os.kill(seen.facts["child"], 0)  # it is there
        if zygote_dies:
            os.kill(processes_under(tmp_path)[0], signal.SIGKILL)
    assert all_end([seen.facts["child"]], within_s=5)


@pytest.mark.nightly
def test_nothing_survives_ctrl_c(tmp_path: Path) -> None:
    controller, _ = start_waiting(tmp_path)
    os.killpg(controller.pid, signal.SIGINT)
    output, _ = controller.communicate(timeout=120)
    assert output == "interrupted\nreturned returned\nTrue\n", "and what was not at fault lives on"
    assert processes_under(tmp_path) == []


@pytest.mark.nightly
def test_ranks_die_with_a_killed_zygote_and_the_next_scenario_gets_another(tmp_path: Path) -> None:
    def kill_zygote() -> None:
        (tmp_path / "pipe").read_text()
        os.kill(zygote(), signal.SIGKILL)

    def zygote() -> int:
        return processes_under(tmp_path)[0]

    os.mkfifo(tmp_path / "pipe")
    wait = STEP.replace(program="workers/await_interference", arguments={"pipe": str(tmp_path / "pipe")})
    with Controller(get_backend("gloo"), work_dir=tmp_path, preload=PROGRAMS) as controller:
        assert run_step(controller) == {"returned"}
        before = processes_under(tmp_path)
        os.kill(zygote(), signal.SIGKILL)  # between two scenarios
        assert all_end(before, within_s=5)
        killer = threading.Thread(target=kill_zygote)
        killer.start()
        observations = controller.run(wait, TORCH)  # and in the middle of one, which is no exception
        killer.join()
        assert {seen.fate.kind for seen in observations.values()} <= {"abandoned", "raised"}
        assert "the process that forks ranks was killed by SIGKILL" in str(observations[1].fate)
        assert run_step(controller) == {"returned"}
    assert processes_under(tmp_path) == []


@pytest.mark.nightly
def test_two_controllers_at_once_and_close_leaves_nothing(tmp_path: Path) -> None:
    def work() -> None:
        with Controller(get_backend("gloo"), work_dir=tmp_path, preload=PROGRAMS) as controller:
            outcomes.extend(run_step(controller) for _ in range(5))
            both_at_work.wait()
            num_processes.append(len(processes_under(tmp_path)))
            both_at_work.wait()

    outcomes: list[set[str]] = []
    num_processes: list[int] = []
    both_at_work = threading.Barrier(2, timeout=100)
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [{"returned"}] * 10
    assert num_processes == [6, 6], "two zygotes with two ranks each, seen by both"
    assert processes_under(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "says"),
    [
        pytest.param(
            "import no_such_module_anywhere", "No module named 'no_such_module_anywhere'", marks=pytest.mark.nightly
        ),
        ("import os; print('goodbye', flush=True); os._exit(7)", "goodbye"),
        pytest.param(
            "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
            "importing preloaded started 1 thread(s)",
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["cannot_import", "dies", "starts_a_thread"],
)
def test_a_preloaded_module_that_cannot_be_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, says: str
) -> None:
    (tmp_path / "preloaded.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with Controller(get_backend("gloo"), preload=("preloaded",)) as controller:
        for _ in range(2):  # the second says no less
            with pytest.raises(ConformanceError) as caught:
                controller.run(STEP, TORCH)
            assert says in str(caught.value)


@pytest.mark.nightly
def test_a_zygote_that_runs_already_imports_more_before_it_forks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "further.py").write_text("import pathlib; pathlib.Path(__file__).with_suffix('.imported').touch()")
    (tmp_path / "broken.py").write_text("import no_such_module_anywhere")
    monkeypatch.syspath_prepend(str(tmp_path))
    with contextlib.closing(ZygoteProcess(tmp_path, PROGRAMS)) as zygote:
        with Controller(get_backend("gloo"), zygote=zygote) as controller:
            assert run_step(controller) == {"returned"}
            assert not (tmp_path / "further.imported").exists()
            with Controller(get_backend("gloo"), preload=("further",), zygote=zygote) as another:
                assert run_step(another) == {"returned"}
            assert (tmp_path / "further.imported").exists()
        missing = pytest.raises(ConformanceError, match="No module named 'no_such_module_anywhere'")
        with Controller(get_backend("gloo"), preload=("broken",), zygote=zygote) as controller, missing:
            controller.run(STEP, TORCH)
    assert processes_under(tmp_path) == []


def test_a_backend_that_fails_is_every_ranks_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_backend.py").write_text(
        textwrap.dedent(
            """
            from dataclasses import replace
            from conformance.backends.gloo import GLOO

            def fail(store, rank, world_size, timeout):
                raise RuntimeError(f"no link on rank {rank}")

            BACKEND = replace(GLOO, name="failing", create=fail)
            """
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with Controller(get_backend("failing_backend:BACKEND"), preload=PROGRAMS) as controller:
        observations = controller.run(STEP, TORCH)
    for rank, seen in observations.items():
        assert seen.raised is not None
        assert str(seen.raised) == f"RuntimeError: no link on rank {rank}"
        assert seen.phase == "rendezvous"


def test_a_backend_is_asked_before_ranks_have_a_deadline() -> None:
    answers = ["no link", ""]
    asked = replace(get_backend("gloo"), unavailable=answers.pop)
    with Controller(asked):
        assert answers == ["no link"]
    with pytest.raises(BackendError, match="backend 'gloo' cannot be used here: no link"):
        Controller(asked)


@pytest.mark.nightly
def test_a_preloaded_module_may_leave_a_process_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "starter.py").write_text("import subprocess; process = subprocess.Popen(['true'])")
    monkeypatch.syspath_prepend(str(tmp_path))
    dies = STEP.replace(faults=(Fault("kill", rank=1, at="backward"),))
    with Controller(get_backend("gloo"), preload=("starter", *PROGRAMS)) as controller:
        assert str(controller.run(dies, TORCH)[1].fate) == "killed by SIGKILL"
        assert run_step(controller) == {"returned"}


@pytest.mark.nightly
def test_a_process_without_standard_streams_can_have_ranks(tmp_path: Path) -> None:
    script = """
        import os, sys
        from conformance.tests.test_controller import PROGRAMS, Controller, get_backend, run_step

        for stream in range(3):
            os.close(stream)
        with Controller(get_backend("gloo"), preload=PROGRAMS) as controller:
            outcome = run_step(controller)
        with open(sys.argv[1], "w") as answer:
            answer.write(str(outcome))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "answer")], check=True)
    assert (tmp_path / "answer").read_text() == "{'returned'}"


@pytest.mark.nightly
def test_ranks_that_cannot_write_their_files_are_our_fault(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))  # less than a rank needs; the zygote inherits it
    try:
        controller = Controller(get_backend("gloo"), work_dir=tmp_path, preload=PROGRAMS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with controller:
        observations = controller.run(STEP, TORCH)
    for rank, seen in observations.items():
        assert seen.raised is not None
        assert seen.raised.type == "ConformanceError"
        assert f"rank {rank} cannot write its files: File too large: {tmp_path}/" in seen.raised.message


def test_a_work_dir_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConformanceError, match="cannot make a private directory"):
        Controller(get_backend("gloo"), work_dir=tmp_path / "missing")


@pytest.mark.nightly
def test_a_kernel_that_gives_no_more_processes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank of a pool cannot be forked once: the first is ended, and the next pool is whole."""
    (tmp_path / "few_processes.py").write_text(
        "import errno, os\nforks, real = [], os.fork\n"
        "def fork():\n    forks.append(1)\n    if len(forks) == 2:\n"
        "        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))\n    return real()\n"
        "os.fork = fork\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with Controller(
        get_backend("gloo"), work_dir=tmp_path, preload=("few_processes", "conformance.tests.worker_programs")
    ) as controller:
        with pytest.raises(ConformanceError, match="cannot start 2 ranks: Resource temporarily unavailable; give"):
            run_step(controller)
        assert len(processes_under(tmp_path)) == 1, "the zygote alone is left"
        assert run_step(controller) == {"returned"}
