"""Every `ddp-conformance` command of README and docs is one that this release takes: names, options and arguments."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from conformance.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="installed without its repository")

#: A line of its own, or in backticks; up to a comment, a pipe or the next command.
COMMAND = re.compile(r"^(?:    |\$ )(ddp-conformance [^#|&\n]+)|`(ddp-conformance [^`\n]+)`", re.MULTILINE)


def commands() -> list[tuple[str, str]]:
    return [
        (page.name, (line or quoted).strip())
        for page in PAGES
        for line, quoted in COMMAND.findall(page.read_text())
        if not re.search(r"\.\.\.( |$)|\.\.\.`", line + quoted) and (line or quoted.count(" ") > 1)
    ]


def parse(command: str) -> None:
    """Have click take the command apart, as it does before it runs it; raises `click.ClickException`."""
    _, *words = shlex.split(command)
    context = click.Context(main)
    group: click.Group = main
    while True:
        name, *words = words
        found = group.get_command(context, name)
        if found is None:
            raise click.UsageError(f"no command {name}")
        if not isinstance(found, click.Group):
            break
        group = found
    found.make_context(name, words)


def test_there_are_commands_and_a_wrong_one_is_noticed() -> None:
    assert len(commands()) > 40
    for wrong in ("ddp-conformance run --no-such", "ddp-conformance rum", "ddp-conformance report diff one"):
        with pytest.raises(click.ClickException):
            parse(wrong)


@pytest.mark.parametrize(("page", "command"), commands())
def test_a_documented_command_is_one(page: str, command: str) -> None:
    parse(command)
