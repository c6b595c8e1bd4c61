"""`Controller`: runs a scenario on a subject and returns what every rank observed. All users of ranks call it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from conformance.backends.backend import Backend
from conformance.errors import ConformanceError
from conformance.observation import Facts, Observation
from conformance.programs import replica
from conformance.programs.registry import misuses
from conformance.scenario import Scenario
from conformance.subjects.subject import NO_DDP, Subject
from conformance.waiting import loop
from conformance.waiting.limits import CONNECT_TIMEOUT_S
from conformance.workers.messages import NOTHING, Inspection, Seat
from conformance.workers.pool import Pool
from conformance.workers.zygote_process import ZygoteGoneError, ZygoteProcess

#: The world size, whether collectives are recorded, and whether each rank has an interpreter of its own.
_Kind = tuple[int, bool, bool]
#: The subject's target, and the kind of its ranks.
_PoolKey = tuple[str, _Kind]
#: So many idle pools of one kind are kept: one scenario begins while another is judged.
_MOST_IDLE = 2
#: Ranks that so many others were preferred to are ended: each keeps tens of megabytes, and hundreds if it has compiled.
_MOST_TURNS_IDLE = 64


class Controller:
    """Owns one zygote and a pool of warm ranks per subject and world size. A context manager.

    A rank serves one subject only: whatever a subject does to its process, torch's own DDP beside it runs in others.
    Unrecorded scenarios have separate pools, whose default group no recorder wraps. Any number of controllers may exist
    at once, in one process or many: they share no port, no file and no name. Use a controller in one thread only.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        work_dir: Path | None = None,
        preload: tuple[str, ...] = (),
        start_timeout_s: float = CONNECT_TIMEOUT_S,
        zygote: ZygoteProcess | None = None,
        inspection: Inspection = NOTHING,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the zygote in the background, or use the given `zygote`, which `close` then leaves running.

        The controller creates its private directory in `work_dir` (default: the system's temporary directory). Either
        zygote imports the modules in `preload` before it forks ranks, which show what `inspection` asks for; its own
        one has `environment` beside the usual variables. Ranks may make no progress for `start_timeout_s` seconds while
        they connect. Raises `BackendError` for a backend that cannot be used here.
        """
        backend.require()
        self._backend = backend
        self._work_dir = work_dir
        self._preload = preload
        self._environment = environment
        self._start_timeout_s = start_timeout_s
        self._inspection = inspection
        self._idle: dict[_PoolKey, list[Pool]] = {}  # by key, the latest last
        self._num_turns = 0
        self._last_turn: dict[_PoolKey, int] = {}
        self._busy: dict[Pool, _PoolKey] = {}
        self._ahead: dict[_Kind, Pool] = {}
        self._lent = zygote
        if zygote is not None:
            zygote.preload(preload)
        self._zygote = zygote or ZygoteProcess(work_dir, preload, environment)

    def run(self, scenario: Scenario, subject: Subject, *, fresh: bool = False) -> Mapping[int, Observation]:
        """Run the scenario and return one observation per rank, whatever its ranks do; if `fresh`, on new ranks.

        Returns at the latest when no rank has made progress for the scenario's deadline, not counting seconds in which
        one could not for want of a processor or of memory; after five deadlines in any case, plus 10 s where a death is
        not reported, and the time to explain a hang (on the first call, to start). All this by the clock of
        `machine_time`. If anything failed, the next scenario gets new ranks.

        Raises:
            ConformanceError: the zygote cannot start, for example because an import fails.

        """
        return loop.run(self.observe, scenario, subject, fresh)

    async def observe(self, scenario: Scenario, subject: Subject, fresh: bool = False) -> Mapping[int, Observation]:
        """Do what `run` does, from a coroutine. Concurrent calls use other ranks."""
        await self._zygote.ready()
        key = _key(scenario, subject)
        pool = await self._take(key, fresh=fresh)
        try:
            failed = await pool.connect()
            if not failed:
                pool.begin(scenario, subject, self._asked_for(scenario))
            if fresh:  # who asks for new ranks will again
                self._fork_ahead(key[1])
            observations = failed or await pool.finish()
            if misuses(scenario.program):
                pool.retire()
        finally:  # also where it is cancelled: a late answer must not count as the next scenario's
            self._give_back(key, pool)
        if not pool.reusable:
            self._fork_ahead(key[1])
        return observations

    def retire(self, scenario: Scenario, subject: Subject) -> None:
        """Let none of the ranks that could run `scenario` on the subject run another one, when they have ended theirs.

        Something may have been left behind in them that nobody can see.
        """
        key = _key(scenario, subject)
        for busy in [pool for pool, its_key in self._busy.items() if its_key == key]:
            busy.retire()
        self._forget(lambda other: other == key)

    @property
    def num_ranks(self) -> int:
        """How many ranks the controller keeps: running, waiting for another scenario, or forked ahead."""
        return sum(pool.num_ranks for pool in self._pools())

    def _pools(self) -> list[Pool]:
        return [*self._busy, *self._ahead.values(), *itertools.chain.from_iterable(self._idle.values())]

    def _asked_for(self, scenario: Scenario) -> Inspection:
        """Return the inspection of a scenario; another attempt at it is not debugged."""
        if scenario.program == "replica":
            return NOTHING
        asked, self._inspection = self._inspection, msgspec.structs.replace(self._inspection, debugged=-1)
        return asked

    async def expect(self, scenario: Scenario) -> Mapping[int, Facts]:
        """Have it computed what ranks must observe in `scenario`: by a replica, where a device has to.

        Raises:
            ReplicaError: the replica did not return.

        """
        return await replica.expect(scenario, lambda one: self.observe(one, NO_DDP))

    def close(self) -> None:
        """End all ranks, and the zygote unless it was passed in. None of them is left when this returns."""
        if self._zygote is self._lent:
            for pool in self._pools():
                pool.close()
        else:
            self._zygote.close()
        self._idle.clear()
        self._busy.clear()
        self._ahead.clear()

    def __enter__(self) -> Controller:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _forget_subjects_but(self, target: str) -> None:
        """End the ranks of all subjects but this one, the one that ran last, and none: mutants are hundreds."""
        others = [key[0] for key in self._idle if key[0] not in (target, NO_DDP.target)]
        kept = {target, NO_DDP.target, *others[-1:]}
        self._forget(lambda key: key[0] not in kept)

    def _close_unneeded_pools(self) -> None:
        recent = {key for key, turn in self._last_turn.items() if self._num_turns - turn <= _MOST_TURNS_IDLE}
        self._forget(lambda key: key not in recent)
        for kind in self._ahead.keys() - {kind for _, kind in recent}:
            self._ahead.pop(kind).close()

    def _forget(self, is_meant: Callable[[_PoolKey], bool]) -> None:
        for key in list(filter(is_meant, self._idle)):
            for pool in self._idle.pop(key):
                pool.close()

    async def _take(self, key: _PoolKey, *, fresh: bool = False) -> Pool:
        self._zygote.update()
        self._num_turns += 1
        self._last_turn[key] = self._num_turns
        self._close_unneeded_pools()
        idle = self._idle.pop(key, [])
        usable = [one for one in idle if one.reusable]
        pool = usable.pop() if usable and not fresh else None
        self._keep(key, usable, of=[one for one in idle if one is not pool])
        if pool is None:
            self._forget_subjects_but(key[0])
            pool = await self._new_pool(key[1])
        self._busy[pool] = key
        return pool

    def _give_back(self, key: _PoolKey, pool: Pool) -> None:
        del self._busy[pool]
        idle = [*self._idle.pop(key, []), pool]
        self._keep(key, [one for one in idle if one.reusable][-_MOST_IDLE:], of=idle)

    def _keep(self, key: _PoolKey, kept: list[Pool], *, of: list[Pool]) -> None:
        for one in of:
            if one not in kept:
                one.close()
        if kept:
            self._idle[key] = kept

    async def _new_pool(self, kind: _Kind) -> Pool:
        if (ahead := self._ahead.pop(kind, None)) is not None:
            if ahead.is_whole:
                return ahead
            ahead.close()
        try:
            return self._fork_pool(kind)
        except ZygoteGoneError:  # its pools died with it; who waits for one that is busy finds out
            self._forget(lambda key: True)
            while self._ahead:
                self._ahead.popitem()[1].close()
            if self._zygote is not self._lent:
                self._zygote.close()
            self._zygote = ZygoteProcess(self._work_dir, self._preload, self._environment)
            await self._zygote.ready()
            return self._fork_pool(kind)

    def _fork_ahead(self, kind: _Kind) -> None:
        """Fork ranks that will be the next new ones of this kind, so that they connect while others run.

        Not on a device, whose memory they would take, nor ranks that import torch for themselves.
        """
        _, _, apart = kind
        if not apart and self._backend.runs_side_by_side and kind not in self._ahead:
            with contextlib.suppress(ConformanceError):  # `_new_pool` tries again, and raises
                self._ahead[kind] = self._fork_pool(kind)

    def _fork_pool(self, kind: _Kind) -> Pool:
        world_size, recorded, apart = kind
        backend = self._backend.source or self._backend.name
        seats = (Seat(rank, world_size, backend, recorded, apart=apart) for rank in range(world_size))
        return Pool(self._zygote, seats, self._start_timeout_s)


def _key(scenario: Scenario, subject: Subject) -> _PoolKey:
    return subject.target, scenario.kind_of_ranks
