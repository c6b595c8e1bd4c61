"""`RankContext`: a program's view of its rank: the model, the subject, the data, and a place to report facts."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.errors import certain, instance, present
from conformance.observation import ENDINGS, PLAIN, Raised, Unmeasured
from conformance.truth.baton import DesertedError

if TYPE_CHECKING:
    from conformance.models.catalogue import ModelFixture
    from conformance.observation import Collective
    from conformance.scenario import Scenario


#: The default of `must`: the program states no demand.
UNSTATED: Any = object()


class Unsupported(Exception):  # noqa: N818 - a signal to the harness, not an error
    """Raised by `RankContext.unsupported` with the reason: the scenario does not apply here."""


class PhaseListener(Protocol):
    """What the context calls when the phase changes: the recorder, the flight record, the fault injector."""

    def entered(self, phase: str, step: int, sync: bool) -> None:
        """Handle that the rank has entered `phase`."""


class Wrap(Protocol):
    """Builds the DDP under test around a module."""

    def __call__(self, module: nn.Module, **options: Any) -> nn.Module:
        """Return the wrapped module."""


class RankContext:
    """One rank's view of one scenario. Programs use nothing else of the harness."""

    def __init__(
        self, scenario: Scenario, *, rank: int, device: torch.device, process_group: dist.ProcessGroup,
        fixture: ModelFixture, wrap: Wrap, wrap_named: Callable[[str], Wrap] | None = None,
        listeners: tuple[PhaseListener, ...] = (), history: Callable[[], tuple[Collective, ...]] = tuple,
        in_flight: Callable[[int], int] = lambda among: 0, takes: Callable[[str], bool] = lambda option: True,
        declared: frozenset[str] = frozenset(), lone_rank: Callable[[Path, int], list[str]] | None = None,
        unconnected: Callable[[int, int, timedelta], dist.ProcessGroup] | None = None,
    ) -> None:  # fmt: skip
        """Bind a scenario to a rank; only the harness calls it.

        `history` and `in_flight` are the recorder's; `declared` are the capabilities that the backend declares.
        """
        self.scenario = scenario
        self.rank = rank
        self.world_size = scenario.world_size
        self.device = device
        self.process_group = process_group
        self.fixture = fixture
        self.declared = declared
        self.facts: dict[str, Any] = {}
        self._wrap = wrap
        self._wrap_named = wrap_named
        self._listeners = listeners
        self._history = history
        self._in_flight = in_flight
        self._takes = takes
        self._lone_rank = lone_rank
        self._unconnected = unconnected
        self._phase = "start"
        self._step = -1
        self._sync = True

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The program's arguments from the scenario."""
        return self.scenario.arguments

    def build_model(self) -> nn.Module:
        """Return the fixture's model on this rank's device, the same weights on every rank."""
        return self.fixture.build(self.scenario, self.device)

    def wrap(self, module: nn.Module, **options: Any) -> nn.Module:
        """Return the subject around `module`, with the scenario's options updated by `options`."""
        return self.wrap_with(module, {**self.scenario.options, **options})

    def wrap_with(self, module: nn.Module, options: Mapping[str, Any]) -> nn.Module:
        """Return the subject around `module`, with `options` and none of the scenario's."""
        with self.phase("construct"):
            return self._wrap(module, **options)

    def wrap_in(self, subject: str, module: nn.Module, **options: Any) -> nn.Module:
        """Return `module` wrapped in the DDP called `subject`, for comparisons within one run."""
        return present(self._wrap_named)(subject)(module, **options)

    def takes(self, option: str) -> bool:
        """Whether the subject has this option, so that its errors may advise it."""
        return self._takes(option)

    def lone_rank(self, folder: Path, lives: int = 0) -> list[str]:
        """Return the command of a process of this rank alone, which sums and exits without destroying its group.

        The processes of all ranks rendezvous in `folder`, an empty one; each creates the file `exits<rank>` before it
        exits. In each of the `lives` before, it makes the default group, sums, and destroys all groups.
        """
        return present(self._lone_rank)(folder, lives)

    def unconnected_group(self, timeout: timedelta) -> dist.ProcessGroup:
        """Return a group of the backend that torch has no record of; it connects in its `reconfigure`. Local."""
        return present(self._unconnected)(self.rank, self.world_size, timeout)

    @contextlib.contextmanager
    def group_with_timeout(self, timeout: timedelta) -> Iterator[dist.ProcessGroup]:
        """Make a group of all ranks in which a wait raises `at_this_load(timeout)`; all must call it, and end together.

        Unsupported on an accelerator, where a wait does not raise on the host.
        """
        if self.device.type != "cpu":
            self.unsupported("a wait for an accelerator's collective does not raise on the host")
        group = instance(dist.new_group(timeout=self.at_this_load(timeout)), dist.ProcessGroup)
        try:
            yield group
        finally:
            dist.barrier(group=self.process_group)  # no rank leaves before all have failed
            dist.destroy_process_group(group)

    def at_this_load(self, timeout: timedelta) -> timedelta:
        """Return `timeout`, and twice what the slowest rank takes now for a wrapper and a step; all ranks must call it.

        On a busy machine ranks would else wait in vain for others that get no processor. It is at most half of the
        scenario's deadline more, since ranks that wait make no progress.
        """
        began = time.monotonic()
        model = self.wrap_with(nn.Linear(1, 1).to(self.device), {})
        (self.world_size * model(torch.ones(1, 1, device=self.device))).sum().backward()  # means are exact
        took = torch.tensor([time.monotonic() - began], device=self.device)
        dist.all_reduce(took, dist.ReduceOp.MAX, group=self.process_group)
        del model
        gc.collect()  # the next wrapper is alone again
        return timeout + timedelta(seconds=min(2 * took.item(), self.scenario.deadline_s / 2))

    def finalize_by_hand(self, model: Any) -> None:
        """Leave the finalization of backwards to `finalize_backward()`; unsupported for a DDP without that method."""
        if not hasattr(model, "finalize_backward"):
            self.unsupported(f"{type(model).__module__}.{type(model).__qualname__} has no finalize_backward")
        model.require_manual_backward_finalization = True

    def loss(self, model: nn.Module, step: int, micro: int = 0) -> Tensor:
        """Run forward on this rank's data for (`step`, `micro`) and return the scalar loss."""
        with self.phase("forward", step):
            return self.fixture.loss(model, self.scenario, rank=self.rank, step=step, micro=micro, device=self.device)

    def backward(self, loss: Tensor, step: int, **kwargs: Any) -> None:
        """Run `loss.backward` as phase `backward`."""
        with self.phase("backward", step):
            loss.backward(**kwargs)

    def observe(self, name: str, value: Any, *, must: Any = UNSTATED) -> None:
        """Report a fact. Detaches and copies tensors to the CPU at once; a DTensor becomes its full tensor.

        The fact must be `must`, an exact value or a matcher, or else what it is on plain ranks (`truth_of`), which show
        no traffic, for example. All ranks must call it for a sharded DTensor.
        """
        certain(name not in self.facts, f"fact {name} observed twice")
        self.facts[name] = _snapshot(value)

    def observe_gradients(self, prefix: str, module: nn.Module) -> None:
        """Report every parameter's gradient as `prefix/grad/<name>`, None where there is none."""
        for name, parameter in module.named_parameters():
            self.observe(f"{prefix}/grad/{name}", parameter.grad)

    def observe_parameters(self, prefix: str, module: nn.Module) -> None:
        """Report every parameter as `prefix/parameter/<name>`."""
        for name, parameter in module.named_parameters():
            self.observe(f"{prefix}/parameter/{name}", parameter)

    def observe_buffers(self, prefix: str, module: nn.Module) -> None:
        """Report every buffer as `prefix/buffer/<name>`."""
        for name, buffer in module.named_buffers():
            self.observe(f"{prefix}/buffer/{name}", buffer)

    @contextlib.contextmanager
    def catching(self, name: str, *, must: Any = UNSTATED) -> Iterator[None]:
        """Report as fact `name` the exception that the block raises (a `Raised`), or None when it raises nothing."""
        try:
            yield
        except (Unsupported, DesertedError, *ENDINGS):
            raise
        except BaseException as error:
            self.observe(name, Raised.of(error, traceback.format_exc()), must=must)
        else:
            self.observe(name, None, must=must)

    @property
    def current_phase(self) -> str:
        """The phase that the rank entered last; an error leaves it as it is."""
        return self._phase

    @contextlib.contextmanager
    def phase(self, name: str, step: int | None = None) -> Iterator[None]:
        """Enter a phase, for the history, for faults and for explanations of hangs."""
        before = (self._phase, self._step)
        self._enter(name, self._step if step is None else step)
        yield
        self._enter(*before)

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Enter the subject's `no_sync`, and mark collectives in the history as issued inside it."""
        self._sync = False
        try:
            with model.no_sync():
                yield
        finally:
            self._sync = True

    def collectives(self) -> tuple[Collective, ...]:
        """Return the collectives that this rank has issued, in order; none if the scenario is not recorded."""
        return self._history()

    def let_complete(self, among: int) -> None:
        """Wait until the backend has completed the first `among` collectives of this rank, if they are recorded."""
        while self._in_flight(among):
            time.sleep(0.001)

    def unsupported(self, reason: str) -> NoReturn:
        """End the program with UNSUPPORTED: the scenario does not apply here. All ranks must call it."""
        raise Unsupported(reason)

    def _enter(self, phase: str, step: int) -> None:
        self._phase, self._step = phase, step
        for listener in self._listeners:
            listener.entered(phase, step, self._sync)


def _is_sharded(value: object) -> bool:
    """Whether `value` is a DTensor; a process that has none need not import them, which takes a second."""
    of_torch = sys.modules.get("torch.distributed.tensor")
    return of_torch is not None and isinstance(value, of_torch.DTensor)


def _snapshot(value: Any) -> Any:
    if type(value) in PLAIN:
        return value
    if _is_sharded(value):
        value = value.full_tensor()
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, (list, tuple)):
        return list(value) if PLAIN.issuperset(map(type, value)) else [_snapshot(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _snapshot(item) for key, item in value.items()}
    if isinstance(value, (bool, int, float, str, Raised, Unmeasured)):
        return value
    raise TypeError(f"facts are tensors, Raised, Unmeasured or JSON data, got {type(value).__name__}")
