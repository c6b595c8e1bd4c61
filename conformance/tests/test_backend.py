"""Backends by name, and that gloo keeps what its description promises."""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from conformance.backends.backend import get_backend
from conformance.backends.gloo import GLOO
from conformance.errors import BackendError
from conformance.programs.operations.cell import Cell
from conformance.programs.registry import preloads_of
from conformance.recorder.recorded_group import as_process_group
from conformance.run import needs
from conformance.run.environment import package_version
from conformance.run.needs import needs_of
from conformance.run.scenario_runner import ScenarioRunner
from conformance.scenario import Scenario
from conformance.subjects.subject import NO_DDP
from conformance.verdict import Verdict
from conformance.workers.controller import Controller
from conformance.workers.finder import find_backend
from conformance.workers.zygote_process import ZygoteProcess


def test_gloo_is_known_and_usable() -> None:
    gloo = get_backend("gloo")
    assert (gloo.name, gloo.device_type, gloo.source) == ("gloo", "cpu", "gloo")
    assert gloo.unavailable() == ""
    assert gloo.device(3) == "cpu"
    assert gloo.max_world_size() is None


def test_nccl_says_why_it_cannot_be_used() -> None:
    usable_here = dist.is_nccl_available() and torch.cuda.is_available()
    assert bool(get_backend("nccl").unavailable()) is not usable_here


def test_a_backend_elsewhere_is_found_again_by_the_same_text() -> None:
    found = get_backend("conformance.backends.gloo:GLOO")
    assert found.name == "gloo"
    assert get_backend(found.source) == found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("glo", "unknown backend 'glo'; expected gloo, nccl, sim, sim-alone, sim-late, "),  # and what torch registers
        ("no_such_module:BACKEND", "cannot import no_such_module: ModuleNotFoundError"),
        ("os:path", "must be a conformance.backends.backend.Backend, got module"),
        ("os:no_such_thing", "no such attribute"),
        ("os:", "unknown backend"),
    ],
)
def test_what_is_no_backend(text: str, says: str) -> None:
    with pytest.raises(BackendError) as caught:
        get_backend(text)
    assert says in str(caught.value)


def test_gloo_connects_over_loopback(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), 1)
    group = as_process_group(get_backend("gloo").create(store, 0, 1, timedelta(seconds=10)))
    assert (group.rank(), group.size(), group.name()) == (0, 1, "gloo")
    tensor = torch.ones(2)
    group.allreduce([tensor]).wait()
    assert torch.equal(tensor, torch.ones(2))


@pytest.mark.parametrize(
    ("fields", "needs"),
    [
        ({}, set()),
        ({"dtype": "bfloat16"}, {"bfloat16"}),
        ({"model": "complex", "dtype": "complex64"}, {"complex64"}),
        ({"model": "sparse_embedding"}, {"sparse", "sparse_gradients"}),
        ({"arguments": {"gradients": "sparse"}}, {"sparse", "sparse_gradients"}),
        ({"arguments": {"dtypes": ["float64", "float16"]}}, {"float16"}),
        (
            {"arguments": {"param_dtype": "bfloat16", "rate": 3}, "needs": ("mixed_precision",)},
            {"bfloat16", "mixed_precision"},
        ),
    ],
)
def test_what_a_scenario_needs_follows_from_its_dtypes_and_model(fields: dict[str, Any], needs: set[str]) -> None:
    assert needs_of(Scenario("a/A-01/x", ("A-01",), "train", **fields)) == needs


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import os; os._exit(0)", "the process that imported bad_backend exited 0"),
        ("raise KeyboardInterrupt", "its import raised KeyboardInterrupt"),
        ("BACKEND = 3", "must be a conformance.backends.backend.Backend, got int"),
    ],
    ids=["exits", "interrupts", "is none"],
)
def test_the_import_of_a_backend_harms_only_the_process_that_does_it(
    source: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that a backend's import ends, with exit code 0 and no report, would pass for a conforming one."""
    (tmp_path / "bad_backend.py").write_text(source + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    find_backend.cache_clear()
    with pytest.raises(BackendError, match=says):
        find_backend("bad_backend:BACKEND")
    assert "bad_backend" not in sys.modules


def test_a_backend_is_described_without_its_import_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_backend.py").write_text(
        "import dataclasses\nfrom conformance.backends.gloo import GLOO\n"
        "def refuse(): raise OSError('no driver')\n"
        "LIMITED = dataclasses.replace(GLOO, name='limited', max_world_size=lambda: 2)\n"
        "BROKEN = dataclasses.replace(GLOO, name='broken', unavailable=refuse)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    limited = find_backend("own_backend:LIMITED")
    assert (limited.name, limited.max_world_size(), limited.unavailable()) == ("limited", 2, "")
    assert (limited.capabilities, limited.source) == (get_backend("gloo").capabilities, "own_backend:LIMITED")
    assert find_backend("own_backend:BROKEN").unavailable() == "asking it raised OSError: no driver"
    with pytest.raises(BackendError, match="only a rank"):
        limited.device(0)
    assert "own_backend" not in sys.modules


def test_what_no_backend_has_for_want_of_a_newer_torch_is_unsupported_whatever_is_declared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(needs, "UNKNOWN_TO_TORCH", {"reduce"})
    for fields in ({"needs": ("reduce",)}, {"arguments": {"undeclared": ["reduce"]}}):
        scenario = Scenario("a/b/c", ("A-1",), "train", "mlp", **fields)
        assert needs.why_unsupported(scenario, NO_DDP, GLOO) == f"torch {package_version('torch')} has no reduce"


@pytest.mark.parametrize(("name", "verdict"), [("without_time", Verdict.PASS), ("ends_at_once", Verdict.FAIL)])
def test_what_ends_with_its_timeout_is_not_taken_for_a_refusal(
    zygote: ZygoteProcess, name: str, verdict: Verdict
) -> None:
    """A backend that is right loses a group so on a machine that is too busy; one that refuses keeps its group."""
    backend = get_backend(f"broken_backends:{name}")
    cells = [Cell("broadcast", numel=20, root=1, reads="strided", writes="strided").to_json()]
    scenario = Scenario(
        "layouts/LAY-05/broadcast", ("LAY-05",), "operation_cells", world_size=2, min_collectives=0, recorded=False,
        arguments={"cells": cells, "refusable": True},
    )  # fmt: skip
    with Controller(backend, preload=preloads_of([scenario]), zygote=zygote) as controller:
        runner = ScenarioRunner(NO_DDP, backend, controller, native=False)
        assert runner.run(scenario).subject.verdict == verdict
