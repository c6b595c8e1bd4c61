"""Recognises ranks that could not connect to each other, so that a scenario never began."""

import re
from collections.abc import Mapping

from conformance.checkers.explanation import ranks, shorten
from conformance.observation import Observation

#: The phases of a rank before its program has entered one of its own.
_BEFORE = ("rendezvous", "start")
#: Messages of gloo, NCCL's bootstrap and torch's stores about a connection that failed.
_WORDS = re.compile(
    r"connectFullMesh|[Cc]onnect(ion)? (to \S+ )?(was )?(closed|reset|refused|timed out|failed)|[Ff]ailed to connect"
)
#: The beginning of a finding's summary about such ranks and their replacements.
TRIED_AGAIN = "tried again on fresh ranks"


def unconnected(observations: Mapping[int, Observation]) -> str:
    """Return which ranks could not connect, and why; empty if the scenario has begun.

    It has not if every rank that raised did so in a connection, before its program entered a phase or communicated, and
    no rank died: a death breaks the connections of others.
    """
    seen = [observations[rank] for rank in sorted(observations)]
    raised = [one for one in seen if one.raised is not None]
    if not raised or any(one.fate.kind in ("killed", "exited") or one.faults_fired for one in seen):
        return ""
    if any(one.phase not in _BEFORE or one.history or not _WORDS.search(str(one.raised)) for one in raised):
        return ""
    return f"{ranks(one.rank for one in raised)} could not connect to the others: {shorten(str(raised[0].raised))}"
