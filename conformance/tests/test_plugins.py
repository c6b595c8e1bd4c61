"""Backends and DDPs of installed packages: found by name, and a broken one harms nobody else."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from conformance import plugins
from conformance.backends.backend import get_backend
from conformance.backends.gloo import GLOO
from conformance.errors import BackendError, SubjectError
from conformance.run.doctor import _plugins
from conformance.subjects.subject import CAPABILITIES, get_subject

Install = Callable[..., None]

MODULE = """
import dataclasses
from conformance.backends.gloo import GLOO
from conformance.subjects.subject import CAPABILITIES, Subject

BACKEND = dataclasses.replace(GLOO, name="acme's own")
SUBJECT = Subject("acme-ddp", "torch.nn.parallel:DistributedDataParallel", CAPABILITIES - {"join"})
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs a package with one entry point per keyword, as pip would leave it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(package: str, group: str, **targets: str) -> None:
        folder = tmp_path / f"{package}-1.0.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        points = "".join(f"{name} = {target}\n" for name, target in targets.items())
        with (folder / "entry_points.txt").open("a") as file:
            file.write(f"[{group}]\n{points}")
        (tmp_path / f"{package}_adapter.py").write_text(MODULE)

    return install


def test_a_backend_is_found_by_the_name_of_its_entry_point(install: Install) -> None:
    install("acme", plugins.BACKENDS, acme="acme_adapter:BACKEND")
    backend = get_backend("acme")
    assert (backend.name, backend.source) == ("acme's own", "acme")


def test_a_backend_that_a_package_registers_with_torch_needs_no_adapter(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "fixtures" / "registered_backend"))
    install("acorn", plugins.REGISTERED_BACKENDS, acorn="registered_backend:register", none="registered_backend:lacks")
    backend = get_backend("acorn")
    assert (backend.name, backend.source, backend.device_type) == ("acorn", "acorn", "cpu")
    group: Any = backend.create(HashStore(), 0, 1, timedelta(seconds=5))
    tensor = torch.ones(2)
    group.allreduce([tensor]).wait()
    assert tensor.tolist() == [1.0, 1.0]
    with pytest.raises(BackendError, match=r"backend 'none': registered_backend:lacks registered none: AttributeError"):
        get_backend("none")


def test_a_subject_is_found_by_the_name_of_its_entry_point(install: Install) -> None:
    install(
        "acmeddp", plugins.SUBJECTS, acme="acmeddp_adapter:SUBJECT", plain="torch.nn.parallel:DistributedDataParallel"
    )
    assert get_subject("acme").capabilities == CAPABILITIES - {"join"}
    assert get_subject("plain").target == "torch.nn.parallel:DistributedDataParallel"


def test_a_mistyped_name_is_answered_with_what_is_installed(install: Install) -> None:
    install("acme", plugins.BACKENDS, acme="acme_adapter:BACKEND")
    install("acme", plugins.SUBJECTS, swift="acme_adapter:SUBJECT")
    with pytest.raises(
        BackendError,
        match="unknown backend 'acne'; expected gloo, nccl, sim, sim-alone, sim-late, acme, or module:attr",
    ):
        get_backend("acne")
    with pytest.raises(SubjectError, match="did you mean swift"):
        get_subject("swfit")


@pytest.mark.nightly
def test_a_plugin_that_raises_at_import_is_named_and_the_rest_goes_on(install: Install, tmp_path: Path) -> None:
    (tmp_path / "explosive.py").write_text("raise OSError('libacme.so.3 is missing')\n")
    install("bad", plugins.BACKENDS, aaa="explosive:BACKEND")
    install("good", plugins.BACKENDS, zzz="good_adapter:BACKEND")
    check = _plugins()
    assert not check.passed
    assert not check.needed
    assert "aaa (of bad 1.0): backend 'aaa': cannot import explosive: OSError: libacme.so.3 is missing" in check.detail
    assert "zzz (of good 1.0)" in check.detail
    assert get_backend("zzz").name == "acme's own"
    with pytest.raises(BackendError, match=r"libacme\.so\.3 is missing"):
        get_backend("aaa")


def test_two_packages_that_claim_one_name_are_both_named(install: Install) -> None:
    install("one", plugins.BACKENDS, acme="one_adapter:BACKEND")
    install("two", plugins.BACKENDS, acme="two_adapter:BACKEND")
    with pytest.raises(BackendError) as caught:
        get_backend("acme")
    assert "one_adapter:BACKEND (of one 1.0), two_adapter:BACKEND (of two 1.0)" in str(caught.value)


def test_nobody_takes_the_name_of_a_built_in_backend(install: Install) -> None:
    install("greedy", plugins.BACKENDS, gloo="greedy_adapter:BACKEND")
    assert get_backend("gloo").create is GLOO.create
    assert get_backend("gloo").name == "gloo"
    assert "'gloo' is the name of a built-in one" in _plugins().detail
