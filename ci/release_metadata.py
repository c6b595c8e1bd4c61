"""Writes into a copy of the repository what only the place of a release knows: the repository's address.

    python ci/release_metadata.py FOLDER https://github.com/who/ddp-conformance

`pyproject.toml` gets its URLs, and links of `README.md` to other files become links to the released version of them,
because an index shows the page without the repository.
"""

import re
import sys
import tomllib
from pathlib import Path

URLS = """
[project.urls]
Source = "{address}"
Documentation = "{address}/tree/v{version}/docs"
Changelog = "{address}/blob/v{version}/CHANGELOG.md"
Issues = "{address}/issues"
"""


def with_urls(pyproject: str, address: str) -> str:
    """Return `pyproject` with the URLs of the repository at `address`."""
    version = tomllib.loads(pyproject)["project"]["version"]
    return pyproject + URLS.format(address=address, version=version)


def with_absolute_links(page: str, address: str, version: str) -> str:
    """Return the Markdown of `page` with its relative links, to files and pictures, made absolute."""

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link["target"].endswith((".svg", ".png")) else "blob"
        return f"]({address}/{kind}/v{version}/{link['target']})"

    return re.sub(r"\]\((?P<target>(?!https?:|#|mailto:)[^)\s]+)\)", absolute, page)


def main() -> None:
    """Rewrite the two files of the folder."""
    folder, address = Path(sys.argv[1]), sys.argv[2].rstrip("/")
    if not re.fullmatch(r"https://[\w.-]+(/[\w.-]+)+", address):
        sys.exit(f"expected the repository's address, such as https://github.com/who/what, got {address!r}")
    project, page = folder / "pyproject.toml", folder / "README.md"
    text = project.read_text(encoding="utf-8")
    version = tomllib.loads(text)["project"]["version"]
    project.write_text(with_urls(text, address), encoding="utf-8")
    page.write_text(with_absolute_links(page.read_text(encoding="utf-8"), address, version), encoding="utf-8")


if __name__ == "__main__":
    main()
