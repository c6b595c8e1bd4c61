"""The diagram of `ddp_impl`'s reducer, for the page that shows it."""

from __future__ import annotations


def reducer_diagram() -> str:
    """Return the table of the reducer's states as a Mermaid diagram; imports no torch."""
    from ddp_impl.reducer.reducer_state import diagram

    return diagram()
