"""The observations of ranks where a requirement killed a mutant, kept in files: judged again without ranks.

Rules of diagnosis are written against these: a pass over all mutants takes long, to judge again what it kept seconds.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from conformance.errors import ReportError
from conformance.observation import Facts, Observation
from conformance.programs.registry import get_program
from conformance.run.attempt import Attempt, Truth, judged
from conformance.run.outcome import Outcome
from conformance.scenario import Scenario
from conformance.subjects.subject import NO_DDP
from conformance.truth.carried import packed, unpacked
from conformance.workers.tensors import from_extension, portable, portable_facts

_ENDING = ".kept"


class Kept(msgspec.Struct, frozen=True):
    """A mutant in the scenario that killed it: what ranks observed, and had to observe (`packed`; None: nothing)."""

    mutant: str
    requirement: str
    scenario: dict[str, Any]
    observations: dict[int, Observation]
    expected: dict[str, Any] | None = None

    def outcome(self) -> Outcome:
        """Return what it comes to, judged anew."""
        scenario = Scenario.from_json(self.scenario)
        attempt = Attempt(scenario, NO_DDP, self.observations)
        truth = Truth(None if self.expected is None else unpacked(self.expected))
        return Outcome.of(scenario, judged(attempt, get_program(scenario.program), truth))


def keep(
    folder: Path,
    mutant: str,
    requirement: str,
    scenario: Scenario,
    observations: Mapping[int, Observation],
    expected: Mapping[int, Facts] | None,
) -> None:
    """Write a file about a kill into `folder`."""
    expectation = None if expected is None else portable_facts(packed(expected))
    seen = {rank: portable(one) for rank, one in observations.items()}
    kept = Kept(mutant, requirement, json.loads(json.dumps(scenario.to_json())), seen, expectation)
    (folder / f"{mutant}.{requirement}{_ENDING}").write_bytes(msgspec.msgpack.encode(kept))


def kept_in(folder: Path) -> Iterator[Kept]:
    """Yield what `keep` wrote into `folder`; raises `ReportError` if that is nothing, or nothing that can be read."""
    decoder = msgspec.msgpack.Decoder(Kept, ext_hook=from_extension)
    paths = sorted(folder.glob(f"*{_ENDING}"))
    if not paths:
        raise ReportError(f"{folder} keeps nothing of mutants; `ddp-conformance mutants --keep {folder}` fills it")
    for path in paths:
        try:
            yield decoder.decode(path.read_bytes())
        except (OSError, msgspec.MsgspecError) as error:
            raise ReportError(f"cannot read {path}: {error}") from error
