"""Whether a client trained with one DDP as it did with torch's: pure judgement of trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from workshop.clients.torch_fault import TorchFault
from workshop.clients.trial import Trial


class Result(Enum):
    """What came of a client; the first two are as they should be."""

    SAME = "same"
    TORCH_FAULT = "torch's documented fault"
    DIFFERS = "differs"
    OURS_RAISES = "ours raises"
    TORCH_RAISES = "torch raises"
    BROKEN = "broken client"


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of comparing one way with torch's DDP, what tells, and a link to who says so already."""

    result: Result
    evidence: str = ""
    link: str = ""

    @property
    def is_good(self) -> bool:
        """Whether nothing is to be done about it."""
        return self.result in (Result.SAME, Result.TORCH_FAULT)


def judged(torch: Trial, again: Trial | None, ours: Trial, fault: TorchFault | None) -> Judgement:
    """Compare the trial of a DDP with the one of `torch`.

    `again` is a second trial of torch's DDP, which is needed only where the first two differ: a client that is not
    deterministic shows nothing. `fault` is what torch's DDP is known to do wrong in this client.
    """
    if not (torch.error or ours.error or any(torch.facts)):
        return Judgement(Result.BROKEN, "it recorded no fact")
    if again is not None and (unstable := _instability(torch, again)):
        return Judgement(Result.BROKEN, f"two runs with torch's DDP differ: {unstable}")
    if torch.error and ours.error:
        return Judgement(Result.BROKEN, f"both fail: {torch.error}")
    if ours.error:
        return Judgement(Result.OURS_RAISES, ours.error)
    found = [torch.error] if torch.error else _differences(torch, ours)
    if fault is not None and not any(map(fault.explains, found)):
        return Judgement(Result.BROKEN, f"torch's DDP no longer shows its documented fault: {fault.sentence}")
    unexplained = [one for one in found if fault is None or not fault.explains(one)]
    if unexplained:
        return Judgement(Result.TORCH_RAISES if torch.error else Result.DIFFERS, _first_of(unexplained))
    return Judgement(Result.SAME) if fault is None else Judgement(Result.TORCH_FAULT, fault.sentence, fault.link)


def _instability(torch: Trial, again: Trial) -> str:
    """Return how two trials with torch's DDP differ, "" if they do not; two that fail do not."""
    if torch.error or again.error:
        return "" if torch.error and again.error else torch.error or again.error
    return _first_of(_differences(torch, again))


def _differences(torch: Trial, ours: Trial) -> list[str]:
    return [
        f"rank {rank}: {difference}"
        for rank, (expected, got) in enumerate(zip(torch.facts, ours.facts, strict=True))
        for difference in differences_of(expected, got)
    ]


def _first_of(differences: Sequence[str]) -> str:
    if len(differences) <= 1:
        return "".join(differences)
    return f"{differences[0]}, and {len(differences) - 1} more"


def differences_of(expected: Any, got: Any, path: str = "") -> list[str]:
    """Return where two facts differ, in the order in which the first run recorded them; [] if they are equal."""
    if isinstance(expected, Mapping) and isinstance(got, Mapping):
        found = []
        for key in dict.fromkeys((*expected, *got)):
            place = f"{path}/{key}" if path else key
            if key not in got or key not in expected:
                found.append(f"{place} is recorded {'with torch alone' if key in expected else 'without torch alone'}")
            else:
                found += differences_of(expected[key], got[key], place)
        return found
    if _is_list(expected) and _is_list(got) and len(expected) == len(got):
        pairs = enumerate(zip(expected, got, strict=True))
        return [one for place, pair in pairs for one in differences_of(*pair, f"{path}[{place}]")]
    return [] if expected == got else [f"{path} is {got}, with torch {expected}"]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
