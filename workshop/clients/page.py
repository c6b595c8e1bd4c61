"""The table of clients, and the same table with some rows renewed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from conformance.report.markdown import as_code
from workshop.clients.client import Client
from workshop.clients.comparison import Judgement
from workshop.clients.row import Row

_TITLE = "# Clients: trainings that do not notice which DDP they have"
_TEXT = """\
`bash ci/clients.sh` makes this page. It runs every script of `fixtures/scripts/clients/` under torchrun on two gloo
ranks: with torch's DDP, with `ddp_impl` by the line `from ddp_impl import DistributedDataParallel`, where the script
itself names the DDP, and by `python -m ddp_impl`. A script records facts as it trains: numbers, and digests of the bits
of tensors; of a model its parameters, gradients, buffers and the keys of its state dict. The facts of each rank must be
equal. Where they are not, the script runs with torch's DDP once more, because a script that is not deterministic shows
nothing.

| verdict | meaning |
|---|---|
| same | every fact of every rank is bitwise equal |
| torch's documented fault | the facts differ because torch's DDP errs, as the issue behind the link says |
| differs | the facts differ; the first difference follows |
| ours raises, torch raises | one of them fails, with this message |
| broken client | the script fails with torch's DDP as well, is not deterministic, or wraps no model |
"""
_HEAD = (
    "| client | versions | what is compared | verdict | seconds: torch, ours |",
    "|---|---|---|---|--:|",
)
_ROW = re.compile(r"^\| <code>(?P<name>[^<]+)</code>")
_MAX_EVIDENCE = 300


def clients_page(rows: Mapping[str, str], made: str) -> str:
    """Return the page of these rows, each with the name of its client; `made` says when and with which torch."""
    return "\n".join([_TITLE, "", *_TEXT.splitlines(), "", f"{made}", "", *_HEAD, *rows.values(), ""])


def rows_on(page: str) -> dict[str, str]:
    """Return the rows of a page by the name of their client."""
    return {found["name"]: line for line in page.splitlines() if (found := _ROW.match(line))}


def renewed(page: str, rows: Sequence[Row], clients: Sequence[Client], made: str) -> str:
    """Return `page` with these rows in the place of what it said of their clients, in the order of `clients`.

    What the page says of a client that there is no longer is left out.
    """
    texts = rows_on(page) | {row.client.name: row_text(row) for row in rows}
    return clients_page({one.name: texts[one.name] for one in clients if one.name in texts}, made)


def row_text(row: Row) -> str:
    """Return a row as a line of Markdown."""
    cells = (
        f"{as_code(row.client.name)} {row.client.subject}",
        ", ".join(row.client.versions),
        ", ".join(row.compared),
        verdict_text(row),
        f"{row.torch_s:.0f}, {row.ours_s:.0f}",
    )
    return f"| {' | '.join(cells)} |"


def verdict_text(row: Row) -> str:
    """Return the verdict as Markdown, once if it is the same by every way."""
    texts = {way: _judgement_text(one) for way, one in row.judgements.items()}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "<br>".join(f"{way}: {text}" for way, text in texts.items())


def _judgement_text(judgement: Judgement) -> str:
    said = judgement.result.value
    if judgement.link:
        said = f"[{said}]({judgement.link})"
    if not judgement.evidence:
        return said
    cut = judgement.evidence[:_MAX_EVIDENCE] + "…" * (len(judgement.evidence) > _MAX_EVIDENCE)
    return f"{said}: {as_code(cut)}"
