"""`Controller`: runs a scenario on a subject and returns what every rank observed. All users of ranks call it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from conformance.backends.backend import Backend
from conformance.observation import Facts, Observation
from conformance.programs.replica import expected_by, replica_of
from conformance.scenario import Scenario
from conformance.subjects.subject import NO_DDP, Subject
from conformance.workers.pool import START_TIMEOUT_S, Pool
from conformance.workers.zygote_process import ZygoteGoneError, ZygoteProcess

#: World size, whether collectives are recorded, and whether the pool is the replica's.
_PoolKey = tuple[int, bool, bool]


class Controller:
    """Owns one zygote and one pool of warm ranks per world size that scenarios use. A context manager.

    Unrecorded scenarios have separate pools, whose default group no recorder wraps. Any number of controllers may exist
    at once, in one process or many: they share no port, no file and no name. Use a controller in one thread only.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        work_dir: Path | None = None,
        preload: tuple[str, ...] = (),
        start_timeout_s: float = START_TIMEOUT_S,
        zygote: ZygoteProcess | None = None,
    ) -> None:
        """Start the zygote in the background, or use the given `zygote`, which `close` then leaves running.

        The controller creates its private directory in `work_dir` (default: the system's temporary directory). The
        zygote imports the modules in `preload` before it forks ranks. Ranks may take `start_timeout_s` seconds to
        connect.
        """
        self._backend = backend
        self._work_dir = work_dir
        self._preload = preload
        self._start_timeout_s = start_timeout_s
        self._pools: dict[_PoolKey, Pool] = {}
        self._lent = zygote
        self._zygote = zygote or ZygoteProcess(work_dir, preload)

    def run(self, scenario: Scenario, subject: Subject) -> dict[int, Observation]:
        """Run the scenario and return one observation per rank, whatever its ranks do.

        Returns at the latest when no rank has made progress for the scenario's deadline, and after five deadlines in
        any case, plus the time to explain a hang (and, on the first call, to start). If anything failed, the next
        scenario gets new ranks.

        Raises:
            ConformanceError: the zygote cannot start, for example because an import fails.

        """
        key = (scenario.world_size, scenario.recorded, False)
        pool = self._take(key)
        try:
            return pool.start() or pool.run(scenario, subject)
        finally:  # also after an interrupt: a late answer must not count as the next scenario's
            self._give_back(key, pool)

    def expect(self, scenario: Scenario) -> Callable[[], Mapping[int, Facts]]:
        """Have a replica, a rank that no subject ever runs in, start to compute what ranks must observe in `scenario`.

        Returns a function that waits for the facts. If nobody calls it, the next scenario gets a new replica.

        Raises, when the facts are asked for:
            ReplicaError: the replica did not return.

        """
        computation = replica_of(scenario)
        key = (computation.world_size, computation.recorded, True)
        pool = self._pools[key] = self._take(key)
        failed = pool.start()
        if not failed:
            pool.begin(computation, NO_DDP)

        def result() -> Mapping[int, Facts]:
            try:
                return expected_by((failed or pool.finish())[0])
            finally:
                self._give_back(key, pool)

        return result

    def close(self) -> None:
        """End all ranks, and the zygote unless it was passed in. None of them is left when this returns."""
        if self._zygote is self._lent:
            for pool in self._pools.values():
                pool.close()
        else:
            self._zygote.close()
        self._pools.clear()

    def __enter__(self) -> Controller:
        """Return the controller."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Close the controller."""
        self.close()

    def _take(self, key: _PoolKey) -> Pool:
        pool = self._pools.pop(key, None)
        self._zygote.update()
        if pool is None or not pool.reusable:
            if pool is not None:
                pool.close()
            pool = self._new_pool(*key[:2])
        return pool

    def _give_back(self, key: _PoolKey, pool: Pool) -> None:
        if pool.reusable:
            self._pools[key] = pool
        else:
            self._pools.pop(key, None)
            pool.close()

    def _new_pool(self, world_size: int, recorded: bool) -> Pool:
        try:
            return self._fork_pool(world_size, recorded)
        except ZygoteGoneError:  # its pools died with it
            self.close()
            self._zygote = ZygoteProcess(self._work_dir, self._preload)
            return self._fork_pool(world_size, recorded)

    def _fork_pool(self, world_size: int, recorded: bool) -> Pool:
        timeout_s = self._start_timeout_s
        return Pool(self._zygote, self._backend, world_size, recorded=recorded, start_timeout_s=timeout_s)
