"""`Trainee`: one rank's part in a training."""

import contextlib
import copy
import dataclasses
import gc
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from conformance.composed.changes import CHANGES, Changes, block_of, is_meant, unit_of
from conformance.composed.exchanges import AllReduce, Exchanges
from conformance.composed.modules import (
    ROWS,
    UNIT,
    WIDTH,
    Composed,
    DeliberateError,
    Unset,
    Where,
    rows_of,
    step_by_whole_numbers,
)
from conformance.composed.numerics import SmallGradients
from conformance.composed.snapshots import (
    AT_THE_END,
    CONSTRUCTED,
    OBSERVED,
    Observables,
    Snapshot,
    returned_by,
    values_of,
)
from conformance.composed.surroundings import Surroundings
from conformance.composed.training import CONTAINERS, Action, Training
from conformance.composed.transforms import TRANSFORMS
from conformance.errors import instance
from conformance.models.integers import integers

_Phase = Callable[[str], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class _Pending:
    """A forward that awaits its backward; `kept` is the module's own output, if the training keeps it."""

    loss: Tensor
    rows: Tensor
    synchronised: bool
    kept: Any = None


@dataclass(frozen=True, slots=True)
class Wrapping:
    """The collective functions of a training: three wrap a module; all ranks must call them."""

    first: Callable[[nn.Module], nn.Module]
    beside: Callable[[nn.Module], nn.Module]
    within: Callable[[nn.Module], nn.Module]
    all_reduce: AllReduce


#: How many iterations the ranks with most data have in a join context.
JOIN_TURNS = 2
_GradMode = Callable[[], contextlib.AbstractContextManager[Any]]
_GRAD_MODES: Mapping[str, _GradMode] = {"no_grad": torch.no_grad, "inference": torch.inference_mode}


class Trainee:
    """Plays the actions of a training on `model`, a wrapped module; `beside` is the second wrapper, if there is one."""

    def __init__(
        self, training: Training, rank: int, seed: int, wrapping: Wrapping, *, device: torch.device | str, phase: _Phase
    ) -> None:
        """Build the module, the same on every rank, and wrap it. All ranks must construct it."""
        self._training = training
        self._rank = rank
        self._seed = seed
        self._device = device
        self._phase = phase
        with torch.random.fork_rng(devices=[]):  # only the DDP may change the random state
            module = Composed(training, seed).to(device)
            self.beside: Any = self._make_beside(module)
        self.observables = Observables(module, training.nested_block)
        self._wrapping = wrapping
        _wrap_within(training, module, wrapping.within)
        self._module = module
        self._model: Any = wrapping.first(module)
        if self.beside is not None:
            self.beside = wrapping.beside(self.beside)
        self._small = SmallGradients(training.precision)
        self._around = Surroundings(training.around)
        self._keeps = any(action.kind == "in_place" for action in training.actions)
        self._exchanges = Exchanges(training, rank, device, wrapping.all_reduce)
        self._pending: list[_Pending] = []
        self._kept: list[Any] = []
        self._num_forwards = 0
        self._has_synchronised = False
        self._transformed: Mapping[str, Any] = {}
        self._changes = Changes(training, rank, seed, device, module)
        self._first_state = {name: value.clone() for name, value in self.model.state_dict().items()}
        # A loss with another leaf has a backward even if forward used no parameter.
        self._outside = torch.ones((), device=device, requires_grad=True) if training.idle else None

    @property
    def module(self) -> Composed:
        """The module without the DDP."""
        return self._module

    @property
    def model(self) -> Any:
        """The wrapped module, wrapped anew if the loop has dropped the wrapper."""
        if self._model is None:
            self._model = self._wrapping.first(self._module)
        return self._model

    @property
    def module_beside(self) -> Composed | None:
        """The second module without its DDP, if there is one."""
        return None if self.beside is None else instance(self.beside.module, Composed)

    def _make_beside(self, module: Composed) -> Composed | None:
        beside = self._training.beside
        if beside is None:
            return None
        first = module.first if beside.shares else None
        made = Composed(Training((beside.block,)), self._seed + 1, first)
        return made.to(self._device)

    def play(self) -> Iterator[Snapshot]:
        """Do all actions, and yield snapshots. All ranks must play it."""
        yield Snapshot(CONSTRUCTED, self.observables.of(self.module, self._num_forwards))
        with self._around:
            for index, action in enumerate(self._training.all_actions):
                self._has_synchronised = False
                if action.kind in CHANGES:
                    self._change(action)
                else:
                    getattr(self, f"_{action.kind}")(action)
                if action.kind in OBSERVED:
                    yield Snapshot(f"{index}.{action.kind}", self.facts(), self._has_synchronised)
        yield Snapshot(AT_THE_END, self.observables.of(self.module, self._num_forwards))

    def facts(self) -> Mapping[str, Any]:
        """Return copies of all parameters, gradients and buffers by name, and the new exchanges."""
        found: dict[str, Any] = values_of(self.module)
        if self.module_beside is not None:
            found |= values_of(self.module_beside, "beside: ")
        transformed, self._transformed = self._transformed, {}
        return {**found, **self._exchanges.take(), **transformed}

    def _forward(self, action: Action) -> None:
        was_training = self.model.training
        if action.how == "eval_mode":
            self.model.eval()
        self._run_forward(grad_mode=_GRAD_MODES.get(action.how), functional=action.how == "functional")
        if action.how == "eval_mode":
            self.model.train(was_training)

    def _run_forward(
        self, *, synchronised: bool = True, grad_mode: _GradMode | None = None, functional: bool = False
    ) -> None:
        for module in filter(None, (self.module, self.module_beside)):
            self._small.of(module)
        note = self.observables.note_idle(self._num_forwards)
        where = Where(self._rank, self._num_forwards, self._exchanges.behind, note)
        self._num_forwards += 1
        inputs = self._inputs("rows", where)
        given = Unset(inputs) if self._training.output in CONTAINERS else inputs
        model = self.model  # may wrap the module again, outside of forward's context

        def forward() -> Any:
            with grad_mode() if grad_mode else contextlib.nullcontext():
                return self._call_functional(inputs, where) if functional else model(given, where=where)

        with self._phase("forward"), returned_by(self.module, wanted=self._keeps) as kept:
            output = self._around.forward(forward)
        loss_beside = self._run_beside(inputs, where, grad_mode)
        rows = rows_of(output)
        self.observables.look_at(where.forward, inputs, output, rows)
        if grad_mode is not None:
            return
        loss = self._loss(rows, where)
        loss = loss if self._outside is None else loss + self._outside
        loss = loss if loss_beside is None else loss + loss_beside
        if loss.requires_grad:
            self._pending.append(_Pending(loss, rows, synchronised, *kept))

    def _run_beside(self, inputs: Tensor, where: Where, grad_mode: _GradMode | None) -> Tensor | None:
        """Run the second wrapper; returns its loss, if the first wrapper's backward goes through both."""
        beside = self._training.beside
        if beside is None:
            return None

        def forward() -> Any:
            with grad_mode() if grad_mode else contextlib.nullcontext():
                return self.beside(inputs, where=Where(where.rank, where.forward))

        with self.beside.no_sync() if beside.turn == "apart_local" else contextlib.nullcontext():
            with self._phase("forward"):
                rows = self._around.forward(forward)
            if grad_mode is not None:
                return None
            loss = self._loss(rows, "beside", where.forward)
            if not beside.turn:
                return loss
            with self._phase("backward"):
                self._around.backward(loss.backward)
        return None

    def _call_functional(self, inputs: Tensor, where: Where) -> Any:
        """Call the model with clones in place of its parameters.

        Not with `tie_weights`: torch would not restore the parameters of a layer with two names.
        """
        stand_ins = {name: parameter.clone() for name, parameter in self.model.named_parameters()}
        return torch.func.functional_call(self.model, stand_ins, (inputs,), {"where": where}, tie_weights=False)

    def _loss(self, rows: Tensor, *key: object) -> Tensor:
        # In half precision a larger one overflows, and the sign of a gradient that is not a number is any.
        unit = 1 if self._training.precision else UNIT
        coefficients = unit * integers(ROWS, WIDTH, key=("loss", self._rank, *key), largest=2)
        return (rows * coefficients.to(rows.device)).sum()

    def _backward(self, action: Action) -> None:
        pending, self._pending = self._pending, []
        if not pending:
            return
        synchronised = any(one.synchronised for one in pending)
        if action.how == "together":
            self._run_backward(_total(pending), synchronised=synchronised)
        elif action.how == "twice":
            self._run_backward(_total(pending), synchronised=synchronised, retain_graph=True)
            self._run_backward(_total(pending), synchronised=synchronised)
        else:
            for one in reversed(pending) if action.how == "reversed" else pending:
                self._run_backward(one.loss, synchronised=one.synchronised)

    def _run_backward(self, loss: Tensor, *, synchronised: bool, retain_graph: bool = False) -> None:
        self._exchanges.at("before_backward")
        with self._phase("backward"):
            self._around.backward(partial(loss.backward, retain_graph=retain_graph))
            if synchronised and self._training.finalizes:
                self.model.finalize_backward()
        self._exchanges.at("after_backward")
        self._has_synchronised |= synchronised

    def _no_sync(self, action: Action) -> None:
        local = action.how != "backward_only"
        with contextlib.ExitStack() as outside:
            if local:
                outside.enter_context(self._local())
            if action.how == "nested":
                with self._local():
                    pass
            if action.how == "exception":
                with contextlib.suppress(DeliberateError), self._local():
                    raise DeliberateError("under no_sync")
            self._run_forward(synchronised=not local)
            if not self._pending:
                return
            one = self._pending.pop()
            if action.how == "forward_only":
                outside.close()
            if action.how == "backward_only":
                outside.enter_context(self._local())
            self._run_backward(one.loss, synchronised=one.synchronised)

    @contextlib.contextmanager
    def _local(self) -> Iterator[None]:
        wrappers = [self.model] if self._beside_stays or self.beside is None else [self.model, self.beside]
        if (index := self._training.nested_block) is not None:
            wrappers.append(self.module.blocks[index])
        with contextlib.ExitStack() as within:
            for wrapper in wrappers:
                within.enter_context(wrapper.no_sync())
            yield

    @property
    def _beside_stays(self) -> bool:
        return self._training.beside is not None and self._training.beside.stays

    def _zero_grad(self, action: Action) -> None:
        for model in filter(None, (self._model or self.module, self.beside)):
            model.zero_grad(set_to_none=action.how == "none")

    def _step(self, action: Action) -> None:
        self._pending.clear()  # their graphs hold parameters that change in place now
        with self._phase("optimizer"):
            self._take_step()

    def _take_step(self) -> None:
        if self._training.optimizer:
            return  # the backward has stepped
        modules = filter(None, (self.module, self.module_beside))
        step_by_whole_numbers(dict.fromkeys(chain(*(module.parameters() for module in modules))))

    def _change(self, action: Action) -> None:
        changes_forward = action.kind in ("freeze", "unfreeze", "replace")
        if changes_forward and any(block.checkpoint for block in self._training.blocks):
            self._pending.clear()  # a checkpoint must compute again what it saved
        self._changes.make(self.module, action)

    def _mode(self, action: Action) -> None:
        self.model.train(action.how == "train")

    def _penalty(self, action: Action) -> None:
        if self._pending and is_meant(action, self._rank):
            squares = [
                unit_of(self._training, parameter) * parameter.abs().square().sum().to(torch.float32)
                for parameter in block_of(self.module, action).parameters()
            ]
            self._add_to_loss(sum(squares, torch.zeros((), device=self._device)))

    def _head(self, action: Action) -> None:
        """Run a block's layer outside of forward, on the rows that forward returned."""
        if self._pending and is_meant(action, self._rank):
            call = partial(block_of(self.module, action).layer, self._pending[-1].rows, Where(self._rank, 1))
            rows = self._around.forward(call)
            self._add_to_loss(self._loss(rows, "head", self._num_forwards))

    def _in_place(self, action: Action) -> None:
        """Change the rows of the last forward in place; the loss also uses the module's own output."""
        if self._pending:
            last = self._pending[-1]
            kept = rows_of(last.kept)
            shares = kept.view(-1) if action.how == "view" else kept
            last.rows.mul_(2)
            for index, tensor in enumerate((last.rows, shares.view(ROWS, WIDTH))):
                self._add_to_loss(self._loss(tensor, "in_place", index, self._num_forwards))

    def _add_to_loss(self, more: Tensor) -> None:
        last = self._pending[-1]
        self._pending[-1] = dataclasses.replace(last, loss=last.loss + more)

    def _autograd_grad(self, action: Action) -> None:
        """Compute gradients of the first layer by `autograd.grad`; of the second order, add them to the loss."""
        weight = self.module.first.weight
        reentrant = any(block.checkpoint == "reentrant" for block in self._training.blocks)  # autograd would refuse
        if self._pending and weight.requires_grad and not reentrant:
            second = action.how == "second_order"
            gradients = torch.autograd.grad(
                _total(self._pending), [weight], retain_graph=True, create_graph=second, allow_unused=True
            )
            if second and gradients[0] is not None and gradients[0].requires_grad:
                self._add_to_loss(gradients[0].sum())

    def _fail(self, action: Action) -> None:
        """Fail in the user's own code, catch it, forget the gradients and go on."""
        module = self.module
        module.fails = action.how
        kept, self._pending = self._pending, []
        with contextlib.suppress(DeliberateError):
            self._run_forward()
            if self._pending:
                self._pending[-1].loss.backward()
        module.fails = ""
        self._pending = kept if action.how == "forward" else []
        if action.how == "backward":
            self.model.zero_grad()

    def _load(self, action: Action) -> None:
        self._pending.clear()
        if action.how == "first_state":
            self.model.load_state_dict(self._first_state, strict=False)
        else:  # distributed checkpoints name everything as in the bare module
            from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

            bare = {name.removeprefix("module."): value.clone() for name, value in self._first_state.items()}
            both = {**bare, **self._first_state}  # names in a DDP that torch does not know keep their prefix
            set_model_state_dict(self.model, both, options=StateDictOptions(strict=False))

    def _regroup(self, action: Action) -> None:
        """Set the DDP's process group again, as after a failure that all ranks survived."""
        self._pending.clear()
        self.model._update_process_group(self.model.process_group)

    def _copy(self, action: Action) -> None:
        self._pending.clear()
        self._changes.remove_hooks()
        self._model = pickle.loads(pickle.dumps(self.model)) if action.how == "pickle" else copy.deepcopy(self.model)
        self._module = self._model.module

    def _wrapper(self, action: Action) -> None:
        """Drop the wrapper, whose outputs may await their backward; wrap the module again now or later."""
        self._kept += [self._model] * (action.how == "kept" and self._rank == 0)
        self._model = self._wrapping.first(self._module) if action.how in ("again", "kept") else None
        gc.collect()
        if action.how == "bare":
            where = Where(self._rank, self._num_forwards)
            with self._phase("forward"):
                output = self._around.forward(partial(self._module, self._inputs("bare", where), where=where))
            loss = self._loss(rows_of(output), "bare", where.forward)
            if loss.requires_grad:
                with self._phase("backward"):
                    self._around.backward(loss.backward)

    def _transform(self, action: Action) -> None:
        """Call the model within a function transform, in evaluation mode: transforms forbid changes of buffers."""
        where = Where(self._rank, self._num_forwards)
        was_training = self.model.training
        self.model.eval()
        call = partial(TRANSFORMS[action.how], self.model, self._inputs("transformed", where), where)
        with self._phase("forward"):
            self._transformed = self._around.forward(call)
        self.model.train(was_training)

    def _inputs(self, what: str, where: Where) -> Tensor:
        key = (what, self._seed, where.rank, where.forward)
        return integers(ROWS, WIDTH, key=key, largest=2).to(self._device)

    def _join(self, action: Action) -> None:
        """Train with more or less data on rank 0; drop gradients, which are undefined on a rank that has joined."""
        self._pending.clear()
        is_last = (self._rank == 0) == (action.how == "rank_0_last")
        turns = JOIN_TURNS if is_last else JOIN_TURNS - 1
        with self.model.join():
            for _ in range(turns):
                self.model.zero_grad()
                self._run_forward()
                pending, self._pending = self._pending, []
                self._run_backward(_total(pending), synchronised=True)
                with self._phase("optimizer"):
                    self._take_step()
        self._num_forwards += JOIN_TURNS - turns
        self.model.zero_grad()


def _wrap_within(training: Training, module: Composed, wrap: Callable[[nn.Module], nn.Module]) -> None:
    if (index := training.nested_block) is None:
        return
    block = module.blocks[index] = wrap(module.blocks[index])
    if training.nested == "frozen":
        block.requires_grad_(False)
    else:
        names = [name for name, _ in chain(block.named_parameters(), block.named_buffers())]
        module._ddp_params_and_buffers_to_ignore = [f"blocks.{index}.{name}" for name in names]  # type: ignore[assignment]


def _total(pending: list[_Pending]) -> Tensor:
    return torch.stack([one.loss for one in pending]).sum()
