"""Our class in the place of torch's, and torch's class back."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import ddp_impl
from ddp_impl.__main__ import main
from ddp_impl.api.distributed import install, is_installed, uninstall
from ddp_impl.api.torch_names import TORCH_DDP
from ddp_impl.module.mixed_precision import MixedPrecision
from ddp_impl.tests.ranks import run_ranks

OUR_DDP: type = ddp_impl.DistributedDataParallel
EARLY = "from torch.nn.parallel import DistributedDataParallel as Wrapped\nimport torch.nn.parallel.distributed as d\n"
OURS = "from ddp_impl import DistributedDataParallel\n"


@pytest.fixture
def module() -> Iterator[ModuleType]:
    """Return an imported module to run statements in; installs nothing, uninstalls whatever the test installed."""
    made = ModuleType("a_users_module")
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]
    uninstall()


def run(source: str, module: ModuleType) -> None:
    exec(compile(source, module.__name__, "exec"), module.__dict__)


def test_every_public_path_names_our_class(module: ModuleType) -> None:
    install()
    assert is_installed()
    assert torch.nn.parallel.DistributedDataParallel is OUR_DDP
    assert torch.nn.parallel.distributed.DistributedDataParallel is OUR_DDP
    run("from torch.nn.parallel import DistributedDataParallel as DDP", module)
    assert module.DDP is OUR_DDP


def test_names_taken_before_change_too(module: ModuleType) -> None:
    run(EARLY, module)
    assert module.Wrapped is TORCH_DDP
    install()
    assert module.Wrapped is OUR_DDP
    assert module.d.DistributedDataParallel is OUR_DDP


def test_torchs_own_modules_check_for_our_class(module: ModuleType) -> None:
    checkpoint = vars(importlib.import_module("torch.distributed.checkpoint.state_dict"))
    install()
    assert checkpoint["DDP"] is OUR_DDP
    uninstall()
    assert checkpoint["DDP"] is TORCH_DDP


def test_uninstall_restores_every_name(module: ModuleType) -> None:
    run(EARLY, module)
    before = everything()
    install()
    install()
    assert everything() != before
    uninstall()
    assert everything() == before
    assert not is_installed()
    uninstall()
    assert everything() == before


def test_names_taken_while_installed_are_restored(module: ModuleType) -> None:
    install()
    run(EARLY, module)
    uninstall()
    assert module.Wrapped is TORCH_DDP


def test_names_taken_from_this_package_stay(module: ModuleType) -> None:
    run(OURS, module)
    install()
    uninstall()
    assert module.DistributedDataParallel is OUR_DDP
    assert ddp_impl.DistributedDataParallel is OUR_DDP


def test_pickled_classes_are_found_again(module: ModuleType) -> None:
    theirs, ours = pickle.dumps(TORCH_DDP), pickle.dumps(OUR_DDP)
    install()
    assert pickle.loads(ours) is OUR_DDP
    assert pickle.loads(theirs) is OUR_DDP  # by its name, which means ours now
    assert pickle.loads(pickle.dumps(torch.nn.Linear)) is torch.nn.Linear
    uninstall()
    assert pickle.loads(theirs) is TORCH_DDP


def everything() -> dict[tuple[str, str], object]:
    """Return what every name of every module stands for, as far as it is one of the two classes."""
    classes = (TORCH_DDP, OUR_DDP)
    return {
        (name, attribute): value
        for name, module in list(sys.modules.items())
        for attribute, value in list(getattr(module, "__dict__", {}).items())
        if any(value is one for one in classes)
    }


SCRIPT = """
import multiprocessing, sys
import torch.nn.parallel
import neighbour

def work(queue):
    queue.put(torch.nn.parallel.DistributedDataParallel.__module__)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    print("spawned", queue.get(timeout=200))
    process.join()
    print("main", torch.nn.parallel.DistributedDataParallel.__module__)
    print("arguments", sys.argv[1:], neighbour.__name__)
    sys.exit(3)
"""


def test_script_runs_as_if_python_had_been_given_it(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").touch()
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    result = command(str(script), "--epochs", "2")
    assert result.returncode == 3, result.stderr
    assert result.stdout.splitlines() == [
        "spawned ddp_impl.api.distributed",
        "main ddp_impl.api.distributed",
        "arguments ['--epochs', '2'] neighbour",
    ]


def test_what_a_launcher_shows_of_a_failure_names_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, shown = tmp_path / "train.py", tmp_path / "error.json"
    script.write_text("raise ArithmeticError('no such batch')")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(shown))
    assert command(str(script)).returncode == 1
    for told in (f'File "{script}", line 1', "ArithmeticError: no such batch"):
        assert told in json.loads(shown.read_text())["message"]["extraInfo"]["py_callstack"]


def test_missing_script_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(monkeypatch, "absent.py") == 2
    assert "absent.py" in capsys.readouterr().err
    assert not is_installed()


def test_usage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(monkeypatch, "--help") == 0
    assert "SCRIPT" in capsys.readouterr().out
    for arguments in ((), ("-m",)):
        assert exit_status(monkeypatch, *arguments) == 2
        assert "SCRIPT" in capsys.readouterr().err


def exit_status(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["ddp_impl", *arguments])
    try:
        main()
    except SystemExit as end:
        return end.code
    return 0


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ddp_impl", *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


def _replicate(rank: int) -> None:
    from torch.distributed._composable.replicate import replicate

    install()
    try:
        module: Any = replicate(torch.nn.Linear(2, 2), mixed_precision=MixedPrecision(param_dtype=torch.float16))
        with pytest.raises(ValueError, match=r"param_dtype=torch.float16: .* Wrap the module itself"):
            module(torch.ones(1, 2))
        module = replicate(torch.nn.Linear(2, 2), mixed_precision=MixedPrecision(reduce_dtype=torch.float16))
        module(torch.full((1, 2), rank + 1.0)).sum().backward()
        assert module.weight.grad.tolist() == [[1.5, 1.5], [1.5, 1.5]]
    finally:
        uninstall()


def test_what_replicate_wraps_cannot_be_cast(tmp_path: Path) -> None:
    run_ranks(_replicate, 2, tmp_path / "ranks")
