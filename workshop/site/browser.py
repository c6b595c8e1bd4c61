"""Opens the built site in Chromium: `python -m workshop.site.browser FOLDER`.

It fails on an error in a page's console, on a page that is wider than a telephone, on a request to another server, and
when the search does not find a requirement.
"""

from __future__ import annotations

import random
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from conformance.checkers.explanation import counted
from conformance.cli import EXIT_FAILED, UsageError
from conformance.cli.options import NamedPath

if TYPE_CHECKING:
    from playwright.sync_api import Page, Request

ALWAYS = ("", "requirements/GRAD-01/", "cli/", "results/")
SOUGHT, FOUND_AT = "GRAD-01", "requirements/GRAD-01/"
_NUM_DRAWN, _SEED = 10, 1
_WIDTHS = {"wide": 1280, "narrow": 390}  # px; the second is a telephone's
_HEIGHT, _PATIENCE_MS = 844, 30_000
_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: a dead link is an error of its page."""


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serve a folder on this machine alone, at a free port, and yield its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def chosen_pages(site: Path) -> tuple[str, ...]:
    """Return the addresses that are opened, relative to the site: those of `ALWAYS`, and some drawn with one seed."""
    others = sorted(
        file.parent.relative_to(site).as_posix() + "/"
        for file in site.rglob("index.html")
        if file.parent != site and file.parent.relative_to(site).as_posix() + "/" not in ALWAYS
    )
    return (*ALWAYS, *sorted(random.Random(_SEED).sample(others, min(_NUM_DRAWN, len(others)))))


def complaints(site: Path, pages: Sequence[str], program: str, pictures: Path | None = None) -> Iterator[str]:
    """Yield a sentence for each thing that is wrong on `pages`, or with the search.

    With `pictures`, a folder, a picture of each page is kept there in both widths.
    """
    from playwright.sync_api import sync_playwright

    with served(site) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name, width in _WIDTHS.items():
            tab = browser.new_page(viewport={"width": width, "height": _HEIGHT})
            tab.set_default_timeout(_PATIENCE_MS)
            said: list[str] = []
            _listen(tab, address, said)
            for page in pages:
                said.clear()
                answer = tab.goto(address + page, wait_until="networkidle")
                where = f"/{page} at {width} px"
                if answer is None or not answer.ok:
                    said.append(f"the server answers {answer.status if answer else 'nothing'}")
                if (overflow := tab.evaluate(_OVERFLOW)) > 0:
                    said.append(f"it is {overflow} px too wide")
                yield from (f"{where}: {one}" for one in dict.fromkeys(said))
                if pictures is not None:
                    tab.screenshot(path=pictures / f"{page.strip('/').replace('/', '_') or 'start'}-{name}.png")
            tab.close()
        tab = browser.new_page(viewport={"width": _WIDTHS["wide"], "height": _HEIGHT})
        yield from _search(tab, address, pictures)
        browser.close()


def _listen(tab: Page, address: str, said: list[str]) -> None:
    """Append what a page does wrong to `said`, while it loads and afterwards."""

    def on_request(request: Request) -> None:
        if not request.url.startswith((address, "data:", "blob:")):
            said.append(f"it asks another server: {request.url}")

    tab.on("request", on_request)
    tab.on("pageerror", lambda error: said.append(f"a script failed: {error}"))
    tab.on("console", lambda text: said.append(f"console: {text.text}") if text.type == "error" else None)


def _search(tab: Page, address: str, pictures: Path | None) -> Iterator[str]:
    from playwright.sync_api import TimeoutError as NotFoundInTimeError

    tab.goto(address, wait_until="networkidle")
    try:
        field = tab.locator("input.md-search__input")
        field.click()
        field.fill(SOUGHT)  # at once: what is typed letter by letter has results before it is complete
        field.press("End")
        first = tab.locator(".md-search-result__link").first
        first.wait_for(timeout=_PATIENCE_MS)
        if FOUND_AT not in (found := first.get_attribute("href") or ""):
            yield f"the search for {SOUGHT} finds {found.removeprefix(address)} first, not /{FOUND_AT}"
    except NotFoundInTimeError:
        yield f"the search for {SOUGHT} finds nothing"
    if pictures is not None:
        tab.screenshot(path=pictures / "search.png")


@click.command()
@click.argument("site", type=NamedPath(exists=True, file_okay=False))
@click.option("--pictures", type=NamedPath(file_okay=False), help="Keep a picture of each page in this folder.")
@click.option("--without-browser", is_flag=True, help="Do not check, and say so.")
def main(site: Path, pictures: Path | None, without_browser: bool) -> None:
    """Open some pages of the built SITE in Chromium, and exit with 1 if anything is wrong with them."""
    if without_browser:
        click.echo("The site was not opened in a browser.")
        return
    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if program is None:
        names = ", ".join(_PROGRAMS)
        raise UsageError(f"no Chromium here (looked for {names}); install it, or say --without-browser")
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
    pages = chosen_pages(site)
    wrong = list(complaints(site, pages, program, pictures))
    opened = f"{len(pages)} pages opened in Chromium at {len(_WIDTHS)} widths"
    click.echo("\n".join([*wrong, f"{opened}, {counted(len(wrong), 'complaint')}."]))
    if wrong:
        click.get_current_context().exit(EXIT_FAILED)


if __name__ == "__main__":
    sys.exit(main())
