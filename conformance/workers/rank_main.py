"""The main function of a rank: connects once, then runs scenarios until the controller ends it.

A rank is a process forked from the zygote. It creates its default process group once, wrapped by the recorder, so that
the history contains everything that a program or a subject communicates over it. Creating a group per scenario would
take ten times as long as running the scenario. The rank prints into a file of its own, which the controller quotes if
the rank fails.
"""

import contextlib
import ctypes
import faulthandler
import gc
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from conformance.backends.backend import get_backend
from conformance.errors import ConformanceError, SubjectError
from conformance.models.catalogue import get_fixture
from conformance.observation import ENDINGS, IMPORT, Collective, Ending, Observation, Raised
from conformance.programs.rank_context import RankContext, Unsupported
from conformance.programs.registry import get_program
from conformance.recorder.flight_record import FlightRecord
from conformance.recorder.group import init_process_group, unconnected_group
from conformance.recorder.recorder import Recorder
from conformance.scenario import Scenario
from conformance.subjects.subject import Subject, get_subject, given_options, load, refused_options, takes
from conformance.surroundings.hygiene import Surroundings, knowing, seed_everything, surroundings, traces
from conformance.surroundings.interference import Interference
from conformance.surroundings.relied_functions import ReliedFunctions, inherited, inherited_now
from conformance.workers.channel import Channel, MessageError
from conformance.workers.faults import FaultInjector
from conformance.workers.lone_rank import command
from conformance.workers.messages import STACK_SIGNAL, Answer, Inspection, Job, Ready, Seat
from conformance.workers.numerics import pin_numerics
from conformance.workers.tensors import portable

#: The backend's own timeout. The controller's deadline must fire first: the controller knows all ranks, a backend one.
_GROUP_TIMEOUT = timedelta(hours=1)
#: Parameters of `mallopt` of the GNU C library: keep so many free bytes, and blocks of at most so many.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _KEPT_BLOCK = 2**28, 2**25
#: More than the parameters of most fixtures; takes a millisecond.
_NUM_SCATTERED = 512


def rank_main(seat: Seat, channel: Channel) -> None:
    """Run as the rank of `seat` until the controller closes `channel`. Every rank of the pool must run it."""
    try:
        rank = Rank(seat, _arrange_process(seat))
    except Exception as error:
        channel.send(Ready(Raised.of(error, traceback.format_exc())), None)
        return
    channel.send(Ready(), None)
    while True:
        try:
            job: Job = channel.receive(None)
        except EOFError:
            break
        _answer(channel, job.number, rank.run(job))


class Rank:
    """One rank's process group, recorder, flight record and fault injector, which several scenarios share."""

    def __init__(self, seat: Seat, flight: FlightRecord) -> None:
        """Connect the default group. All ranks must call it."""
        self._num_modules = len(sys.modules)  # until the backend's and the subject's are imported
        self._seat = seat
        self._scattered = _scatter(seat.rank)
        self._flight = flight
        self._faults = FaultInjector((), self._flight.fault_fires)
        self._recorder = Recorder(self._before_collective)
        self._relied: ReliedFunctions | None = None
        self._left: Surroundings | None = None  # what the scenario before has left as it was: the next one finds that
        self._interference = Interference()
        self._flight.entered("rendezvous", -1, True)
        backend = get_backend(seat.backend)
        self._noticed, self._declared = backend.noticed, backend.capabilities
        self._group = init_process_group(
            backend,
            self._recorder if seat.recorded else None,
            store=_meeting_place(seat),
            rank=seat.rank,
            world_size=seat.world_size,
            timeout=_GROUP_TIMEOUT,
        )
        self._device = torch.device(backend.device(seat.rank if seat.device_index is None else seat.device_index))
        pin_numerics(self._device)

    def run(self, job: Job) -> Observation:
        """Run one scenario and return the observation, which contains any exception that the program raises.

        All ranks must call it.
        """
        with contextlib.suppress(OSError):  # by its name: a subject may have made its own file of standard error
            os.truncate(self._seat.file("output"), 0)
        self._flight.start()
        self._recorder.start(looks=job.inspection.carried)
        self._interference.start()
        before = self._left or surroundings()
        started_ns, cpu_started_ns = time.perf_counter_ns(), time.process_time_ns()
        facts: dict[str, Any] = {}
        raised, unsupported = None, ""
        try:
            self._flight.entered(IMPORT, -1, True)
            if job.subject.is_ddp:
                load(job.subject)
            self._flight.entered("start", -1, True)
            if self._relied is None:  # what the subject's module does at import, such as to start a thread, stays
                before = surroundings()
                self._relied = inherited() if len(sys.modules) == self._num_modules else inherited_now()
            scenario = Scenario.from_json(job.scenario)
            self._faults = FaultInjector(
                [fault for fault in scenario.faults if fault.rank == self._seat.rank], self._flight.fault_fires
            )
            seed_everything(scenario.seed)
            context = self._context(scenario, job.subject)
            facts = context.facts
            with self._debugging(job.inspection):
                get_program(scenario.program).body(context)
        except Unsupported as reason:
            unsupported = str(reason) or "the program gave no reason"
        except ENDINGS:
            raise
        except BaseException as error:
            raised = Raised.of(error, traceback.format_exc())
        history = self._recorder.history()
        if job.subject.is_ddp:  # its cycles hold hooks and groups; cheap, since the zygote froze earlier objects
            gc.collect()
        hygiene, now = traces(knowing(before, self._recorder.backend_threads))
        self._left = None if hygiene else now
        return Observation(
            self._seat.rank,
            Ending("raised", detail=f"raised {raised}") if raised else Ending("returned"),
            facts=facts,
            raised=raised,
            history=history,
            phase=self._flight.phase,
            faults_fired=self._faults.num_fired,
            hygiene=(*hygiene, *(self._relied.changes() if self._relied else ())),
            device_reports=self._noticed(),
            interference=self._interference.found,
            unsupported=unsupported,
            duration_ns=time.perf_counter_ns() - started_ns,
            cpu_ns=time.process_time_ns() - cpu_started_ns,
            carried=self._recorder.carried(),
        )

    def _debugging(self, inspection: Inspection) -> AbstractContextManager[None]:
        """Return a block in which a person debugs a rank, if `inspection` says so."""
        if not inspection.terminal:
            return contextlib.nullcontext()
        from conformance.workers.debugger import debugged_at, debugged_elsewhere, passing_breakpoints  # pdb is for few

        if inspection.debugged < 0:
            return passing_breakpoints()
        over = Path(self._seat.directory, "debugged")
        if inspection.debugged != self._seat.rank:
            return debugged_elsewhere(over)
        return debugged_at(inspection.terminal, self._seat.rank, over)

    def _context(self, scenario: Scenario, subject: Subject) -> RankContext:
        return RankContext(
            scenario,
            rank=self._seat.rank,
            device=self._device,
            process_group=self._group,
            fixture=get_fixture(scenario.model),
            wrap=self._wrapper(subject),
            wrap_named=lambda name: self._wrapper(get_subject(name)),
            # Faults last, so that the others record the phase.
            listeners=(self._interference, self._recorder, self._flight, self._faults),
            history=self._recorder.history,
            in_flight=self._recorder.in_flight,
            takes=lambda option: takes(subject, option),
            declared=self._declared,
            unconnected=unconnected_group,
            lone_rank=lambda folder, lives: command(
                self._seat.backend, self._seat.rank, self._seat.world_size, self._device, folder, lives
            ),
        )

    def _wrapper(self, subject: Subject) -> Callable[..., nn.Module]:
        def wrap(module: nn.Module, **options: Any) -> nn.Module:
            if "process_group" not in options and "device_mesh" not in options:
                options["process_group"] = self._group
            ddp = load(subject)
            if self._device.type != "cpu" and not refused_options(ddp, ("device_ids",)):
                options.setdefault("device_ids", [self._device.index])
            options = given_options(ddp, options)
            if refused := refused_options(ddp, options):
                raise Unsupported(f"{subject.name} takes no argument {', '.join(refused)}")
            with self._interference.construction(module, options):
                wrapped = ddp(module, **options)
            if not isinstance(wrapped, nn.Module):
                raise SubjectError(
                    f"DDP {subject.name!r} must give a torch.nn.Module, {subject.target}(module, ...) gave "
                    f"{type(wrapped).__name__}"
                )
            return wrapped

        return wrap

    def _before_collective(self, collective: Collective) -> None:
        self._faults.before_collective(collective)
        self._flight.issued(collective)


def _answer(channel: Channel, number: int, observation: Observation) -> None:
    try:
        channel.send(Answer(number, portable(observation)), None)
    except (TypeError, ValueError, OverflowError, MessageError) as error:  # a fact is no data, such as a huge integer
        raised = Raised.of(error, traceback.format_exc())
        fate = Ending("raised", detail=f"raised {raised}")
        channel.send(Answer(number, replace(observation, fate=fate, raised=raised, facts={})), None)


def _meeting_place(seat: Seat) -> Store:
    if seat.meeting is None:
        return FileStore(f"{seat.directory}/rendezvous", seat.world_size)
    host, port, prefix = seat.meeting
    return PrefixStore(prefix, TCPStore(host, port, is_master=False, wait_for_workers=False))


def _scatter(rank: int) -> list[object]:
    """Make later parameters lie in another order of addresses than on other ranks, while the returned list lives.

    The zygote's ranks inherit one heap, so that a set of parameters would have the same order on all ranks, which it
    has not where a launcher starts them.
    """
    objects: list[object] = [nn.Parameter(torch.empty(0)) for _ in range(_NUM_SCATTERED)]
    random.Random(rank).shuffle(objects)
    del objects[::2]
    return objects


def _arrange_process(seat: Seat) -> FlightRecord:
    """Set up the process's files and limits; returns its flight record. Raises `ConformanceError` if a file fails."""
    try:
        output = os.open(seat.file("output"), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        stack = os.open(seat.file("stack"), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        flight = FlightRecord(seat.file("flight"))
    except OSError as error:
        raise ConformanceError(
            f"rank {seat.rank} cannot write its files: {error.strerror}: {seat.directory}; make room there, or set"
            " TMPDIR to another folder"
        ) from error
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    faulthandler.enable(stack)
    signal.signal(STACK_SIGNAL, _stay)
    faulthandler.register(STACK_SIGNAL, stack, all_threads=True, chain=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would delay the report of a death by seconds
    torch.set_num_threads(1)
    _let_others_finish()
    _keep_freed_memory()
    return flight


def _let_others_finish() -> None:
    """Have no thread of the rank take a processor from another one as soon as it has something to do.

    The thread in which gloo waits for sockets asks again and again while a thread that it has interrupted holds a lock:
    forty times for each message, with three ranks on two processors. Where that may not be set, nothing changes.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _keep_freed_memory() -> None:
    """Have freed megabytes stay with the process, else each tensor of that size costs page faults, half of its time.

    Where the C library has no such switch, nothing changes.
    """
    with contextlib.suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _KEPT_BLOCK)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def _stay(_: int, __: object) -> None:
    """Stop here once the stack is written, so that the other ranks' stacks show where they waited for this one."""
    while True:
        signal.pause()
