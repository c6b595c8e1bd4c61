"""`python -m workshop freeze`: it compares and refuses; what it writes is tested beside `conformance.spec.version`."""

from click.testing import CliRunner

from workshop.__main__ import main


def test_changes_since_a_version_are_listed_by_kind() -> None:
    result = CliRunner().invoke(main, ["freeze", "1.0", "--check"])
    told = [line.partition(":")[0] for line in result.output.splitlines()]
    assert told[:3] == ["reworded since 1.0", "removed since 1.0", "added since 1.0"]


def test_a_version_has_a_number_and_a_point() -> None:
    result = CliRunner().invoke(main, ["freeze", "../1"])
    assert (result.exit_code, "is called like 1.0, got '../1'" in result.stderr) == (2, True)
    unknown = CliRunner().invoke(main, ["freeze", "9.9", "--check"])
    assert (unknown.exit_code, "known: 1.0" in unknown.stderr) == (2, True)
