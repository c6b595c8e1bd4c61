"""`ci/gpu.sh` on the simulated device, with a few scenarios; nightly, because it starts ranks a dozen times."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.backends.sim_device import build

SCRIPT = Path(__file__).parents[2] / "ci" / "gpu.sh"

pytestmark = [
    pytest.mark.skipif(not SCRIPT.exists(), reason="installed without its repository"),
    pytest.mark.nightly,
    pytest.mark.skipif(bool(build.why_not()), reason=build.why_not()),
]


def test_the_script_writes_its_page(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    environment = {
        **os.environ, "PYTHON": sys.executable, "PROFILES": "gpu", "RANKS": "1 2,3", "ROUNDS": "4", "PAGE": str(page),
        "OUT": str(tmp_path / "out"),
    }  # fmt: skip
    command = ["bash", str(SCRIPT), "--backend", "sim", "--", "DEV-01"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    text = page.read_text()
    assert "| gpu | 1 | " in text
    assert "| gpu | 3 | " in text
    assert "nothing about\nNCCL" in text
    assert "a simulated device" not in text.split("| accelerator |")[0]


def test_an_argument_that_does_not_exist_is_refused() -> None:
    done = subprocess.run(["bash", str(SCRIPT), "--quick"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "unknown argument --quick" in done.stderr
