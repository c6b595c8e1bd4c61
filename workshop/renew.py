"""`python -m workshop renew`: bring the generated pages of a checkout up to date."""

from __future__ import annotations

import click

import workshop
from conformance.cli import EXIT_FAILED


@click.command("renew", short_help="Rewrite the generated pages of a checkout of this project.")
@click.option("--check", is_flag=True, help="Only say which pages are stale; exit with 1 if any is.")
def command(check: bool) -> None:
    """Rewrite every generated file of this project's repository, and list those that changed.

    `bash ci/site.sh` makes the pages of the site, which the repository does not hold.

    \b
    python -m workshop renew
    python -m workshop renew --check

    Exits with 1 when a page is stale that only a run can renew, and with --check when any is.
    """
    from workshop.generated_pages import ELSEWHERE, generated_pages
    from workshop.page import State, compare, write

    pages = compare(workshop.ROOT, generated_pages(workshop.ROOT))
    for page in pages:
        if check and page.state is not State.FRESH:
            click.echo(page.explanation)
        elif not check and write(workshop.ROOT, page):
            click.echo(f"{'rewrote' if page.made.text is not None else 'removed'} {page.path}")
        if not check and page.made.lacks:
            click.echo(page.explanation, err=True)
    click.echo("Made elsewhere, and owed by no change of a requirement:")
    for page_name, how in ELSEWHERE.items():
        click.echo(f"    {page_name}; {how}")
    stale = [page for page in pages if page.state is State.LACKING or (check and page.state is not State.FRESH)]
    verb = "stale" if check else "not to be had without a run, see above"
    what = f"{len(stale)} of them {verb}" if stale else "all of them up to date"
    click.echo(f"{len(pages)} generated pages, {what}.")
    if stale:
        click.get_current_context().exit(EXIT_FAILED)
