"""Subjects by name, and what is said of one that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from conformance.errors import SubjectError
from conformance.subjects.subject import KNOWN, get_subject, load


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_a_known_subject_can_be_loaded(name: str) -> None:
    subject = get_subject(name)
    assert subject.name == name
    assert load(subject).__name__ == "DistributedDataParallel"


def test_the_long_way_to_write_a_known_subject_is_the_same_subject() -> None:
    assert get_subject("torch.nn.parallel:DistributedDataParallel") is get_subject("torch")


def test_any_other_class() -> None:
    subject = get_subject("torch.nn:Sequential")
    assert subject.name == "torch.nn:Sequential"
    assert load(subject) is nn.Sequential


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tortch", "unknown DDP 'tortch'; did you mean torch?"),
        ("something", "expected ddp_impl, torch, or module:Class"),
        ("no_such_module:Class", "cannot import no_such_module: ModuleNotFoundError"),
        ("torch.nn:Sequentiall", "has no attribute Sequentiall; did you mean Sequential?"),
        ("torch:__version__", "must be a class, got TorchVersion"),
        ("dies_at_import:Class", "cannot import dies_at_import: ZeroDivisionError: division by zero"),
        ("exits_at_import:Class", "cannot import exits_at_import: SystemExit: 4"),
    ],
)
def test_what_is_no_subject(text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dies_at_import.py").write_text("1 / 0\n")
    (tmp_path / "exits_at_import.py").write_text("raise SystemExit(4)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SubjectError) as caught:
        get_subject(text)
    assert says in str(caught.value)
