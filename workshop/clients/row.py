"""A client, run with torch's DDP and with ours: one row of the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workshop.clients.client import Client
from workshop.clients.comparison import Judgement, Result, judged
from workshop.clients.torch_fault import TorchFault
from workshop.clients.trial import tried
from workshop.clients.way import BY_IMPORT, BY_LAUNCHER, TORCH, Way


@dataclass(frozen=True, slots=True)
class Row:
    """What was compared and what came of it, by way; durations are of one run, torch's and the mean of ours."""

    client: Client
    compared: tuple[str, ...]
    judgements: Mapping[str, Judgement]
    torch_s: float
    ours_s: float

    @property
    def is_good(self) -> bool:
        """Whether every way came out as it should."""
        return all(judgement.is_good for judgement in self.judgements.values())


def run(client: Client, folder: Path, fault: TorchFault | None = None, ways: Sequence[Way] = ()) -> Row:
    """Run a client with torch's DDP, then by each of the `ways`: by default those that are open to it."""
    ways = ways or ((BY_IMPORT, BY_LAUNCHER) if client.names_ddp else (BY_LAUNCHER,))
    torch = tried(client, TORCH, folder)
    ours = {way.name: tried(client, way, folder) for way in ways}
    judgements = {name: judged(torch, None, trial, fault) for name, trial in ours.items()}
    if any(one.result is not Result.SAME for one in judgements.values()):
        again = tried(client, TORCH, folder)
        judgements = {name: judged(torch, again, trial, fault) for name, trial in ours.items()}
    compared = tuple(dict.fromkeys(name for facts in torch.facts for name in facts))
    ours_s = sum(trial.duration_s for trial in ours.values()) / len(ours)
    return Row(client, compared, judgements, torch.duration_s, ours_s)
