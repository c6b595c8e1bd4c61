"""Unmodified training scripts under torchrun: the same losses with torch's DistributedDataParallel and with ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "fixtures" / "scripts"
WORLD_SIZE = 2
TORCHRUN = (
    *("-m", "torch.distributed.run", "--nproc-per-node", str(WORLD_SIZE)),
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "127.0.0.1"),
)


#: What a person writes, and the libraries on top of it, which the nightly's clients use as well.
SCRIPTS_OF_USERS = ("train_plain.py", "train_accelerate.py", "train_lightning.py")


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", SCRIPTS_OF_USERS)
def test_losses_are_those_of_torch(script: str, tmp_path: Path) -> None:
    theirs = trained(script, tmp_path / "torch")
    ours = trained(script, tmp_path / "ours", "-m", "ddp_impl")
    for rank in range(WORLD_SIZE):
        assert theirs[rank], "the script reported no case"
        assert ours[rank].keys() == theirs[rank].keys()
        for case in theirs[rank]:
            expected, got = theirs[rank][case], ours[rank][case]
            assert expected.pop("ddp") == "torch.nn.parallel.distributed.DistributedDataParallel"
            assert got.pop("ddp") == "ddp_impl.api.distributed.DistributedDataParallel"
            assert got.pop("is_ddp"), f"{case}: the library no longer recognises its model as wrapped"
            assert expected.pop("is_ddp")
            assert len(expected["losses"]) >= 8
            for fact in expected:
                assert got[fact] == expected[fact], f"{case}, rank {rank}: {fact}"


def trained(script: str, results: Path, *through: str) -> list[dict[str, Any]]:
    """Run `script` on both ranks, `through` a module if given; return by rank what it found in each case."""
    results.mkdir()
    done = subprocess.run(
        [
            sys.executable,
            *TORCHRUN,
            str(SCRIPTS / "without_teardown.py"),
            *through,
            str(SCRIPTS / script),
            str(results),
        ],
        cwd=results,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    found = [json.loads((results / f"rank{rank}.json").read_text()) for rank in range(WORLD_SIZE)]
    return [{"training": one} if "losses" in one else one for one in found]
