"""`python -m workshop freeze VERSION`: write down which requirements a version of the specification holds."""

import re

import click

from conformance.checkers.explanation import counted
from conformance.cli import EXIT_FAILED
from conformance.errors import SpecificationError
from conformance.spec.catalogue import load_catalogue
from conformance.spec.version import (
    VERSIONS_DIR,
    changes_since,
    freeze,
    known_versions,
    load_errata,
    load_version,
    unexplained,
    version_text,
)


@click.command("freeze", short_help="Write a version of the specification, or compare with it.")
@click.argument("name", metavar="VERSION")
@click.option("--check", is_flag=True, help="Only say what has changed since; exit with 1 if anything has.")
def command(name: str, check: bool) -> None:
    """Write the ids and the digests of all requirements to conformance/spec/versions/VERSION.toml.

    A draft may be written again. A version is out when a person sets `released` in its file to a date; then only
    errata.toml beside the folder may speak of changes.
    """
    if check:
        _check(name)
        return
    if not re.fullmatch(r"[0-9]+\.[0-9]+", name):
        raise SpecificationError(f"a version of the specification is called like 1.0, got {name!r}")
    if name in known_versions() and (released := load_version(name).released):
        raise SpecificationError(f"specification {name} is out since {released}; freeze the next version instead")
    version = freeze(name, load_catalogue())
    VERSIONS_DIR.mkdir(exist_ok=True)
    (VERSIONS_DIR / f"{name}.toml").write_text(version_text(version), encoding="utf-8")
    click.echo(f"Specification {name} holds {counted(len(version.digests), 'requirement')}.")


def _check(name: str) -> None:
    version, catalogue = load_version(name), load_catalogue()
    changes = changes_since(version, catalogue)
    for kind, ids in {**changes.by_kind, "added": changes.added}.items():
        click.echo(f"{kind} since {name}: {', '.join(ids) or 'none'}")
    missing = unexplained(version, catalogue, load_errata())
    click.echo("\n".join(missing), nl=bool(missing))
    if missing or (not version.released and any((*changes.by_kind.values(), changes.added))):
        click.get_current_context().exit(EXIT_FAILED)
