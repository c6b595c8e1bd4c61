"""Upstream's shared tests of backends in our words: requirements named there exist, and flags are capabilities."""

from pathlib import Path
from types import SimpleNamespace

import torch
from click.testing import CliRunner

import conformance
from conformance.backends.backend import CAPABILITIES
from conformance.cli import main
from conformance.spec.catalogue import load_catalogue
from conformance.spec.upstream import ASKED_OF_ALL, DTYPES, FLAGS, declared_by, upstream_tests

ONBOARDING = Path(conformance.__file__).parents[1] / "docs" / "adapter_reference.md"


def test_every_test_names_requirements_of_backends_or_says_what_is_missing() -> None:
    catalogue = load_catalogue()
    for one in upstream_tests():
        assert one.requirements or one.missing, one.name
        assert {catalogue.requirement(id_).level for id_ in one.requirements} <= {"backend"}, one.name
    names = [one.name for one in upstream_tests()]
    assert len(names) == len(set(names)) > 40


def test_flags_become_capabilities() -> None:
    config = SimpleNamespace(
        supports_bitwise_reductions=True,
        supports_coalescing=False,
        dtypes=(torch.float32, torch.bfloat16, "int8"),
        float8_dtypes=(torch.float8_e4m3fn, torch.float8_e5m2),
    )
    assert declared_by(config) == ASKED_OF_ALL | {"bitwise", "bfloat16", "int8", "float8"}
    assert declared_by(SimpleNamespace(supports_coalescing=True)) - ASKED_OF_ALL == {"single_coalesced"}
    assert ASKED_OF_ALL.union(*FLAGS.values()) <= CAPABILITIES


def test_the_page_explains_every_flag() -> None:
    text = ONBOARDING.read_text(encoding="utf-8")
    assert [name for name in (*FLAGS, *DTYPES) if f"`{name}`" not in text] == []


def test_the_command_prints_the_mapping() -> None:
    result = CliRunner().invoke(main, ["list", "--upstream"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "test_c10d_p2p::test_send_recv" in result.output
    assert "needs CUDA streams" in result.output
