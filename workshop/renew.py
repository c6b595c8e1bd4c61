"""`python -m workshop renew`: bring the generated files of a checkout up to date."""

from collections.abc import Mapping
from pathlib import Path

import click

import workshop
from conformance.cli import EXIT_FAILED

COUNTS, DETECTED = Path("docs/counts.toml"), Path("conformance/mutants/detected.toml")


def generated(root: Path) -> tuple[Mapping[Path, str], tuple[str, ...]]:
    """Return what each generated file must hold, and the mutants whose kills only a run can fill in.

    The site makes its own pages (`bash ci/site.sh`), `bash ci/scoreboard.sh` those of other projects' DDPs, and
    `EXPECTTEST_ACCEPT=1 pytest ...` the texts that tests pin.
    """
    from conformance.mutants.catalogue import load_deviations, load_mutants
    from conformance.mutants.detected import found_in, made_in, not_tried, written
    from workshop.counts import count
    from workshop.torch_versions import JUDGED, PAGE, judged_of, page_of

    now, mutants = (root / DETECTED).read_text(encoding="utf-8"), load_mutants()
    found = found_in(now, mutants, load_deviations())
    texts = {
        COUNTS: count().to_toml(), DETECTED: written(found, made_in(now)), PAGE: page_of(root), JUDGED: judged_of(root),
    }  # fmt: skip
    return texts, tuple(mutant.name for mutant in not_tried(found, mutants))


@click.command("renew", short_help="Rewrite the generated files of a checkout of this project.")
@click.option("--check", is_flag=True, help="Only list the files that are stale; exit with 1 if any is.")
def command(check: bool) -> None:
    """Rewrite docs/counts.toml, detected.toml and what is made of ci/torch_versions, and list what changed.

    \b
    python -m workshop renew
    python -m workshop renew --check

    Exits with 1 where only a run can tell which requirement kills a mutant, and with --check when a file is stale.
    """
    texts, untried = generated(workshop.ROOT)
    stale = [path for path, text in texts.items() if _text(workshop.ROOT / path) != text]
    for path in stale:
        click.echo(f"{path} is stale: run `python -m workshop renew`" if check else f"rewrote {path}")
        if not check:
            (workshop.ROOT / path).write_text(texts[path], encoding="utf-8")
    if untried:
        names = " ".join(untried)
        click.echo(
            f"{DETECTED} does not say who notices {names}: run `ddp-conformance mutants {names} --into {DETECTED}"
            " --kills conformance/spec/kills.toml`"
        )
    if untried or (check and stale):
        click.get_current_context().exit(EXIT_FAILED)


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.is_file() else ""
