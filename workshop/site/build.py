"""`python -m workshop site FOLDER`: the site's pages as Markdown, for mkdocs; written pages, and those made here."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import click

import workshop
from conformance.cli.options import NamedPath

RESULTS = "results"
DEFINITION = workshop.ROOT / "conformance/truth/plain_ddp.py"
#: Which of its passages defines which requirements.
PASSAGES = DEFINITION.with_name("passages.toml")


@click.command("site", short_help="Write the pages of the site, for mkdocs.")
@click.argument("out", type=NamedPath())
@click.option(
    "--results", type=NamedPath(), help="Stored reports.  [default: results/ of this checkout, if it is there]"
)
def command(out: Path, results: Path | None) -> None:
    """Write every page of the site to OUT, which is emptied first."""
    stored = results or workshop.ROOT / RESULTS
    if out.exists():
        shutil.rmtree(out)
    shutil.copytree(workshop.ROOT / "docs", out)
    (out / "README.md").unlink(missing_ok=True)  # of the folder, on a forge; the site begins with index.md
    for name, text in _generated(stored if stored.is_dir() else None).items():
        file = out / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    click.echo(f"{len(list(out.rglob('*.md')))} pages in {out}.")


def _generated(stored: Path | None) -> Mapping[str, str]:
    from conformance.backends.gloo import GLOO
    from conformance.cli import main
    from conformance.mutants.catalogue import load_deviations, load_mutants
    from conformance.mutants.detected import DETECTED, found_in
    from conformance.report.results import results_pages, stored_reports
    from conformance.report.schema import report_schema
    from conformance.run.baseline import FOLDER, read_baseline
    from conformance.spec.catalogue import load_catalogue
    from conformance.spec.version import known_versions, load_version
    from conformance.suite import load_scenarios
    from workshop.behaviours import page_of
    from workshop.capabilities import capabilities_page
    from workshop.site.command_pages import command_pages
    from workshop.site.passages import definition_page, read_passages
    from workshop.site.requirement_pages import Evidence, requirement_pages

    catalogue, scenarios, mutants = load_catalogue(), load_scenarios(), load_mutants()
    versions = tuple(map(load_version, known_versions()))
    reports = stored_reports([stored]) if stored is not None and any(stored.rglob("report.json*")) else ()
    found = found_in(DETECTED.read_text(encoding="utf-8"), mutants, load_deviations())
    passages = read_passages(DEFINITION, PASSAGES, catalogue)
    evidence = Evidence(
        found,
        tuple(read_baseline(file.read_text(encoding="utf-8")) for file in sorted(FOLDER.glob("*.toml"))),
        tuple(one.report for one in reports),
        versions,
        passages,
    )
    results = results_pages(reports) if reports else {"index.md": "# Results\n\nNo report is stored here.\n"}
    return {
        **requirement_pages(catalogue, scenarios, evidence),
        **command_pages(main),
        "behaviours.md": page_of(reports, scenarios),
        "capabilities.md": capabilities_page(GLOO, scenarios, {one.id: one.level for one in catalogue}),
        "reducer.md": _reducer(),
        **{f"{RESULTS}/{name}": text for name, text in results.items()},
        "report_schema.md": f"# The schema of reports\n\n```json\n{json.dumps(report_schema(), indent=1)}\n```\n",
        "definition.md": definition_page(DEFINITION, passages),
        "decisions/index.md": _decisions(),
    }


def _reducer() -> str:
    from conformance.subjects.reducer_diagram import reducer_diagram

    page = (workshop.ROOT / "docs/reducer.md").read_text(encoding="utf-8")
    return f"{page}\n## The state machine\n\n```mermaid\n{reducer_diagram()}```\n"


def _decisions() -> str:
    rows = []
    for file in sorted((workshop.ROOT / "docs/decisions").glob("*.md")):
        title = file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        rows.append(f"- [{title}]({file.name})")
    return "\n".join(["# Decisions", "", *rows]) + "\n"
