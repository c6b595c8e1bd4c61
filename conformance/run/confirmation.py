"""Confirms a failure of warm ranks on fresh ones: it is the subject's own, or an earlier scenario caused it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import trio

from conformance.observation import KEPT_ONCE
from conformance.run.attempt import Attempt
from conformance.scenario import Scenario
from conformance.verdict import Finding, ScenarioResult, Verdict

#: A failure that fresh ranks do not show keeps so many characters of each rank's stderr.
_MOST_SAID = 3000

#: So many fresh ranks must not fail before what others ran earlier is blamed.
_TIMES_ALONE = 3

#: The checkers that find something left behind.
_OF_TRACES = ("leaves_no_trace", "leaves_no_process")


class TryAgain(Protocol):
    """Runs a scenario on ranks of the subject."""

    async def __call__(self, scenario: Scenario, *, fresh: bool = False) -> Attempt:
        """Return the attempt; with `fresh` that of ranks that have run nothing yet."""


@dataclass(frozen=True)
class Confirmed:
    """The attempt that counts, the verdict on it, and the earlier scenario that spoilt the ranks, empty if none."""

    attempt: Attempt
    result: ScenarioResult
    contaminated_by: str = ""


@dataclass(frozen=True)
class Confirmation:
    """Confirms attempts: `judge` judges one, `try_again` makes another; `started`: the earlier scenarios by id.

    `doubt` ends the ranks that could run a scenario. Hold `in_turn` to call it, and to have the same ranks run several
    scenarios one after another. `is_of_backend`: there is no DDP, and only the backend keeps anything from one scenario
    to the next. Then a failure that needs earlier scenarios still counts.
    """

    judge: Callable[[Attempt], ScenarioResult]
    try_again: TryAgain
    doubt: Callable[[Scenario], None]
    started: Mapping[str, Scenario]
    in_turn: trio.Lock
    is_of_backend: bool = False

    async def of(self, attempt: Attempt, is_known: Callable[[ScenarioResult], bool]) -> Confirmed:
        """Return the attempt that counts; a failure of warm ranks that is not `is_known` is tried on fresh ones."""
        async with self.in_turn:
            attempt, result = await self._without_what_is_kept_once(attempt)
        if not result.verdict.is_failure or not attempt.after or is_known(result):
            return Confirmed(attempt, result)
        async with self.in_turn:
            self.doubt(attempt.scenario)
        again = await self.try_again(attempt.scenario, fresh=True)
        async with self.in_turn:
            return await self._of_both(attempt, result, again)

    async def _of_both(self, attempt: Attempt, result: ScenarioResult, again: Attempt) -> Confirmed:
        """Return what counts of a failure on warm ranks and of another attempt on fresh ones."""
        again, alone = await self._without_what_is_kept_once(again)
        if alone.verdict is result.verdict:
            return Confirmed(attempt, result)
        spoiler = await self._spoiler(attempt, result.verdict)
        if spoiler is None:
            return Confirmed(attempt, _unstable(result, alone.verdict, attempt.after[-1]))
        spoilt_by, is_certain = spoiler
        if is_certain and await self._fails_on_other_fresh_ranks(attempt.scenario, result.verdict):
            return Confirmed(attempt, _racy(result, alone.verdict))
        if is_certain and self.is_of_backend:
            return Confirmed(attempt, _kept_between_groups(result, alone.verdict, spoilt_by))
        return Confirmed(again, _contaminated(alone, result, spoilt_by, is_certain=is_certain), spoilt_by)

    async def _without_what_is_kept_once(self, attempt: Attempt) -> tuple[Attempt, ScenarioResult]:
        """Return the attempt and its result, or those of a second one if ranks only kept what a process may keep once.

        Ranks that have run the scenario before keep nothing more of that kind. If such ranks cannot be had, the first
        attempt stands.
        """
        result = self.judge(attempt)
        if not _kept_at_most_once(attempt, result):
            return attempt, result
        again = await self._again(attempt.scenario)
        own = attempt.scenario.id
        if again.after[-1:] != (own,):  # the same ranks run another scenario meanwhile
            await self._again(attempt.scenario, fresh=True)
            again = await self._again(attempt.scenario)
        return (again, self.judge(again)) if again.after[-1:] == (own,) else (attempt, result)

    async def _again(self, scenario: Scenario, *, fresh: bool = False) -> Attempt:
        if fresh:  # what has failed may have left something behind
            self.doubt(scenario)
        return await self.try_again(scenario, fresh=fresh)

    async def _fails_on_other_fresh_ranks(self, scenario: Scenario, verdict: Verdict) -> bool:
        """Whether further fresh ranks get `verdict`, as warm ranks did and the first fresh did not: it is a race."""
        for _ in range(_TIMES_ALONE - 1):
            if self.judge(await self._again(scenario, fresh=True)).verdict is verdict:
                return True
        return False

    async def _spoiler(self, attempt: Attempt, verdict: Verdict) -> tuple[str, bool] | None:
        """Return the scenario that spoils `attempt`, and whether that is certain; None if none does.

        It is certain if other ranks that run it and its followers get `verdict` as well; of several that do it together
        the first is named. Where ranks cannot run the same again, it is a guess.
        """

        async def fails_after(number: int) -> bool | None:
            """Whether the verdict is the same after the latest `number` scenarios; None if ranks cannot run them."""
            earlier = attempt.after[-number:]
            if not all(name in self.started for name in earlier):
                return None
            for place, name in enumerate(earlier):
                await self._again(self.started[name], fresh=place == 0)
            again = await self._again(attempt.scenario)
            return self.judge(again).verdict is verdict if again.after == earlier else None

        too_few, enough = 0, 1
        found = await fails_after(enough)
        if found is False and len(attempt.after) > enough:
            too_few, enough = enough, len(attempt.after)
            found = await fails_after(enough)
        if found is None:
            return attempt.after[-1], False
        while found and enough - too_few > 1:
            middle = (too_few + enough) // 2
            if await fails_after(middle):
                enough = middle
            else:
                too_few = middle
        return (attempt.after[-enough], True) if found else None


def _kept_at_most_once(attempt: Attempt, result: ScenarioResult) -> bool:
    """Whether the attempt failed for nothing but what ranks kept, and a process may keep all of that once."""
    kept = [phrase for observation in attempt.observations.values() for phrase in observation.hygiene]
    failed = [finding for finding in result.findings if finding.verdict.is_failure]
    only_kept = all(finding.checker in _OF_TRACES for finding in failed)
    return bool(failed) and only_kept and all(phrase.startswith(KEPT_ONCE) for phrase in kept)


def _contaminated(alone: ScenarioResult, after: ScenarioResult, by: str, *, is_certain: bool) -> ScenarioResult:
    """Return the verdict of fresh ranks with what it was `after` the same ranks had run the scenario `by`."""
    told = [one.summary for one in after.deciding_findings]
    summary = (
        f"contaminated by {by}: {after.verdict.value} on ranks that had run it{', twice' * is_certain},"
        f" {alone.verdict.value} on fresh ones{f', {_TIMES_ALONE} times' * is_certain}; it left something behind that"
        f" ranks could not notice{', or the verdict is not stable' * (not is_certain)}"
        f"{''.join(f'; wrong was: {one}' for one in told[:1])}"
    )
    told += [f"rank {one.rank} said:\n{one.stderr[-_MOST_SAID:]}" for one in after.ranks if one.stderr]
    finding = Finding("runner", alone.verdict, summary, "\n".join(told))
    return replace(alone, findings=(finding, *alone.findings))


def _kept_between_groups(result: ScenarioResult, alone: Verdict, by: str) -> ScenarioResult:
    """Return the failure `result` of a backend that keeps something from the groups of earlier scenarios."""
    summary = (
        f"only in processes that have used other groups before: {result.verdict.value}, twice, on ranks that had begun"
        f" with {by}; {alone.value} on fresh ones, {_TIMES_ALONE} times; the backend keeps something of its process"
        " (a counter, a buffer, a pool, a key of the store) from one group to the next"
    )
    return result.with_note(summary)


def _racy(result: ScenarioResult, alone: Verdict) -> ScenarioResult:
    """Return the failure `result` of ranks that fail at times, also where they have run nothing before."""
    summary = (
        f"the verdict is not stable: {result.verdict.value}, then {alone.value} on fresh ranks, then"
        f" {result.verdict.value} on other fresh ones, as where two things race; replay it with --times 100"
    )
    return result.with_note(summary)


def _unstable(result: ScenarioResult, alone: Verdict, before: str) -> ScenarioResult:
    """Return the failure `result` with a note on the other attempts: a scenario that fails at times fails."""
    summary = (
        f"the verdict is not stable: {result.verdict.value}, then {alone.value} on fresh ranks, and again no"
        f" {result.verdict.value} on others that had first run what those that failed had, {before} last; replay it"
        " with --times 100"
    )
    return result.with_note(summary)
