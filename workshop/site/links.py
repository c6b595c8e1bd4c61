"""Checks that every internal link of the built site leads somewhere: `python -m workshop.site.links FOLDER`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    """Collects what a page links to, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep `href` and `src`, `id` and `name`; a hint to the browser is no link."""
        for name, value in attrs:
            if value and name in ("href", "src"):
                self.links.append(value)
            elif value and name in ("id", "name"):
                self.anchors.add(value)


def dead_links(site: Path) -> tuple[int, tuple[str, ...]]:
    """Return how many internal links the pages below `site` have, and a sentence for each that leads nowhere."""
    site = site.resolve()
    pages = {file: _Page(file.read_text(encoding="utf-8")) for file in sorted(site.rglob("*.html"))}
    checked, dead = 0, []
    for file, page in pages.items():
        for link, target, anchor in _internal(file, page.links):
            checked += 1
            if not target.is_relative_to(site) or not target.is_file():
                dead.append(f"{file.relative_to(site)} links to {link}, which is not there")
            elif anchor and target in pages and anchor not in pages[target].anchors:
                dead.append(f"{file.relative_to(site)} links to {link}, whose page has no such anchor")
    return checked, tuple(dict.fromkeys(dead))


def _internal(file: Path, links: list[str]) -> Iterator[tuple[str, Path, str]]:
    for link in links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc or file.name == "404.html":  # which a server shows at any address
            continue
        target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
        yield link, target / "index.html" if target.is_dir() else target, unquote(parts.fragment)


def main(site: Path) -> int:
    """Print what is dead, and how much was checked; returns an exit code."""
    if not any(site.rglob("*.html")):
        print(f"{site} holds no page: nothing was checked")
        return 1
    checked, dead = dead_links(site)
    print("\n".join([*dead, f"{len(list(site.rglob('*.html')))} pages, {checked} internal links, {len(dead)} dead."]))
    return 1 if dead else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
