"""A Python that skips assertions is refused, and the ranks' Python never inherits what could change a verdict."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.workers.interpreter import start_interpreter

RUN = ("-m", "conformance", "run", "gradients/GRAD-01/mlp-world2", "--quiet", "--no-native", "--report")


@pytest.mark.parametrize(
    ("flags", "variables"), [(("-O",), {}), ((), {"PYTHONOPTIMIZE": "1"})], ids=["flag", "variable"]
)
def test_a_run_without_assertions_does_not_begin(
    tmp_path: Path, flags: tuple[str, ...], variables: dict[str, str]
) -> None:
    done = subprocess.run(
        [sys.executable, *flags, *RUN, str(tmp_path / "report")],
        env={**os.environ, **variables}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "removes the assertions of torch and of the DDP under test" in " ".join(done.stderr.split())
    assert not (tmp_path / "report" / "report.json").exists()


def test_ranks_inherit_no_variable_of_python_that_changes_what_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PYTHONOPTIMIZE": "2", "PYTHONWARNINGS": "error", "PYTHONDONTWRITEBYTECODE": "1"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "tells.py").write_text(
        "import os, socket, sys\nfrom conformance.workers.channel import Channel\n"
        "names = sorted(name for name in os.environ if name.startswith('PYTHON'))\n"
        "channel = Channel(socket.socket(fileno=int(sys.argv[1])), None)\n"
        "channel.send((sys.flags.optimize, sys.warnoptions, names))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    process, channel = start_interpreter("tells", expects=tuple[int, list[str], list[str]], environment={})
    assert channel.receive(60) == (
        0, [], ["PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "PYTHONPATH", "PYTHONUNBUFFERED"],
    )  # fmt: skip
    channel.close()
    assert process.wait(60) == 0
