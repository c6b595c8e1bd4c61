"""Programs about a wrapper that continues with other ranks: `_update_process_group` and related methods."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.checkers.protocol import is_gradient
from conformance.errors import present
from conformance.models.bomb import Bomb
from conformance.models.integers import RankStep, with_integer_weights
from conformance.observation import Facts
from conformance.programs import RankContext, program, rank_step
from conformance.programs.storages import marks_of_options, num_storages
from conformance.programs.unused_parameters import error_naming
from conformance.scenario import Scenario
from conformance.truth.expected import Raises

#: What a rank may do in a step that has no backward.
_WITHOUT_BACKWARD = ("forward", "evaluate")


class Team(nn.Module):
    """Three layers in a row and one beside them; if asked, a buffer that adds up the sums of all inputs."""

    def __init__(self, *, with_buffer: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.middle = nn.Linear(3, 4)
        self.last = nn.Linear(4, 2)
        self.beside = nn.Linear(3, 2)
        self.seen: Tensor | None
        self.register_buffer("seen", torch.zeros(2) if with_buffer else None)
        self.armed = False
        self.midway: Callable[[], None] | None = None

    def forward(self, inputs: Tensor, uses: str) -> Tensor:
        if self.seen is not None:
            with torch.no_grad():
                self.seen += inputs.sum()
        hidden: Tensor = self.first(inputs)
        if self.armed:
            hidden = Bomb.apply(hidden)
        elif self.midway is not None:
            midway, self.midway = self.midway, None
            hidden.register_hook(lambda _: midway())
        output: Tensor = self.last(self.middle(hidden))
        return output + self.beside(inputs) if "b" in uses else output


def _build(scenario: Scenario) -> Team:
    return with_integer_weights(Team(with_buffer=bool(scenario.arguments.get("buffer"))), scenario.seed)


def _backward(model: nn.Module, turn: RankStep, micro: int, uses: str) -> None:
    turn.backward(turn.loss(turn.forward(model, turn.inputs(4, 3, micro=micro), uses), micro))


def _phases(scenario: Scenario) -> list[tuple[list[int], list[str]]]:
    """Return the course: for each phase its members, and one word per step.

    Argument `phases` holds a list [members, steps] for each. The words: `step` trains; `bomb` raises in the middle of
    backward; `forward` runs no backward; `evaluate` runs none either and records no graph; `local` runs a backward
    under `no_sync` and keeps its gradients for the next step. A word may end with `:` and what the forward uses, `b`
    for the layer beside.
    """
    return [(list(members), list(steps)) for members, steps in scenario.arguments["phases"]]


def _word(text: str) -> tuple[str, str]:
    word, _, uses = text.partition(":")
    return word, uses or "b"


@program("membership", invariants=("nothing_in_flight", "leaves_no_trace"))
def membership(ctx: RankContext) -> None:
    """Train phase by phase, each with the ranks that it names; each rank wraps once, in the default group.

    At the beginning of a phase every member updates its wrapper, unless it is the first phase and has all ranks. With
    `outsiders`, the other ranks update theirs as well, with the placeholder that torch returned to them. Argument
    `hook` averages with a comm hook; `buffer` gives the module a buffer. Observes gradients and buffers after each
    step; where they are known, `step<k>/num_buckets` (collectives that reduced gradients) and `step<k>/num_storages`
    (how many storages hold the gradients); `phase<p>/silent` (the update itself communicated nothing), `phase<p>/own`
    (all gradients went through the phase's group) and `phase<p>/hook_called`. All ranks run it.
    """
    _course(ctx)


@program("membership_after_exception", invariants=("leaves_no_trace",))
def membership_after_exception(ctx: RankContext) -> None:
    """Run `membership` for courses with a `bomb`, where no rank waits for the collectives in flight at that moment.

    With `late`, they are in flight for long: the last rank runs that backward only when the others are in the middle of
    their next one, with half of its gradients reduced or on their way, and those continue once the old collectives are
    complete. What these have left anywhere by then must not be taken for a gradient.
    """
    _course(ctx)


def _course(ctx: RankContext) -> None:
    module = _build(ctx.scenario).to(ctx.device)
    model: Any = ctx.wrap(module)
    groups: dict[tuple[int, ...], Any] = {tuple(range(ctx.world_size)): ctx.process_group}
    calls: list[int] = []
    lateness = _Lateness(ctx, module, groups) if ctx.arguments.get("late") else None
    if ctx.arguments.get("hook"):
        model.register_comm_hook(None, _averaging_hook(model, calls))
    index = 0
    for phase, (members, steps) in enumerate(_phases(ctx.scenario)):
        marks = marks_of_options(ctx.scenario.options, len(list(module.parameters())), len(members))
        group = groups.get(tuple(members))
        if group is None:
            group = groups[tuple(members)] = dist.new_group(members)
        if _updates(ctx.scenario, phase, members, ctx.rank):
            before = len(ctx.collectives())
            model._update_process_group(group)
            ctx.observe(f"phase{phase}/silent", len(ctx.collectives()) == before, must=True)
        if ctx.rank in members:
            before = len(ctx.collectives())
            for offset, text in enumerate(steps):
                # By the third step in a row buckets are those of the options.
                are_known = steps[: offset + 1] == ["step"] * max(3, offset + 1)
                _run(ctx, module, model, index + offset, text, marks if are_known else {}, lateness)
            names = {each.group for each in ctx.collectives()[before:] if is_gradient(each)}
            expected = {"default"} if group is ctx.process_group else names - {"default"}
            ctx.observe(f"phase{phase}/own", names <= expected and len(names) <= 1, must=True)
            ctx.observe(f"phase{phase}/hook_called", len(calls) > 0, must=bool(ctx.arguments.get("hook")))
            calls.clear()
        index += len(steps)
    dist.barrier(group=ctx.process_group)
    for ranks, group in groups.items():
        if ctx.rank in ranks and group is not ctx.process_group:
            dist.destroy_process_group(group)
    if lateness is not None:
        lateness.end()


class _Lateness:
    """Makes the last rank late with the backward that raises, and the others wait for it in the middle of the next."""

    def __init__(self, ctx: RankContext, module: Team, groups: dict[tuple[int, ...], Any]) -> None:
        """Add the group of every phase to `groups`: later its ranks would meet the late one. All ranks must call it."""
        self._ctx, self._module = ctx, module
        self._signal = dist.new_group()  # what is in flight in other groups does not hold it up
        for members, _ in _phases(ctx.scenario):
            if tuple(members) not in groups:
                groups[tuple(members)] = dist.new_group(members)

    def before_bomb(self) -> None:
        """Wait on the last rank until the others are in the middle of their next backward."""
        if self._ctx.rank == self._ctx.world_size - 1:
            dist.barrier(group=self._signal)

    def after_bomb(self) -> None:
        """Let the others, in the middle of the next backward, wait for the last rank's old collectives and theirs."""
        if self._ctx.rank == self._ctx.world_size - 1:
            return
        num_old = len(self._ctx.collectives())

        def wait() -> None:
            dist.barrier(group=self._signal)
            self._ctx.let_complete(num_old)

        self._module.midway = wait

    def end(self) -> None:
        """Give up the group of its own. All ranks must call it."""
        dist.destroy_process_group(self._signal)


def _updates(scenario: Scenario, phase: int, members: Sequence[int], rank: int) -> bool:
    if phase == 0 and len(members) == scenario.world_size:
        return False
    return rank in members or bool(scenario.arguments.get("outsiders"))


def _run(
    ctx: RankContext, module: Team, model: Any, index: int, text: str, marks: Mapping[str, int],
    lateness: _Lateness | None,
) -> None:  # fmt: skip
    """Run the step that `text` is; `marks` is what the numbers of buckets and storages must be, if they are known."""
    word, uses = _word(text)
    turn = rank_step(ctx, index)
    if word == "local":
        with ctx.no_sync(model):
            _backward(model, turn, 0, uses)
        ctx.observe_gradients(f"step{index}", module)
        return
    if word in _WITHOUT_BACKWARD:
        with torch.set_grad_enabled(word == "forward"):
            turn.forward(model, turn.inputs(4, 3), uses)
        return
    if word == "bomb":
        module.armed = True
        if lateness is not None:
            lateness.before_bomb()
        with ctx.catching(f"step{index}/raised", must=Raises(("ArithmeticError",), ("bomb",))):
            _backward(model, turn, 0, uses)
        if lateness is not None:
            lateness.after_bomb()
        module.armed = False
        module.zero_grad()
        return
    before = len(ctx.collectives())
    _backward(model, turn, 0, uses)
    ctx.observe_gradients(f"step{index}", module)
    found = {"num_buckets": sum(map(is_gradient, ctx.collectives()[before:])), "num_storages": num_storages(module)}
    for name, number in marks.items():
        ctx.observe(f"step{index}/{name}", found[name], must=number)
    if module.seen is not None:
        ctx.observe(f"step{index}/buffer/seen", module.seen)
    module.zero_grad()


def _averaging_hook(model: Any, calls: list[int]) -> Callable[[Any, Any], Any]:
    def average(bucket: Any) -> Any:
        calls.append(bucket.index())
        group = model.process_group
        work = present(dist.all_reduce(bucket.buffer().div_(dist.get_world_size(group)), group=group, async_op=True))
        return work.get_future().then(lambda future: future.value()[0])

    return lambda _, bucket: average(bucket)  # without annotations, which torch compares with its own types


@program("removed_hooks", invariants=("same_collectives", "nothing_in_flight", "leaves_no_trace"))
def removed_hooks(ctx: RankContext) -> None:
    """Train a step, if argument `first` says so, call `_remove_autograd_hooks`, and run forwards and backwards.

    Each of `uses` is what one of them uses. Observes gradients, and `num_reduced`: gradient collectives after the call.
    All ranks run it.
    """
    module = _build(ctx.scenario).to(ctx.device)
    model: Any = ctx.wrap(module)
    if ctx.arguments.get("first", True):
        _backward(model, rank_step(ctx, 0), 0, "b")
        ctx.observe_gradients("step0", module)
    model._remove_autograd_hooks()
    before = len(ctx.collectives())
    for index, uses in enumerate(ctx.arguments["uses"], start=1):
        module.zero_grad()
        _backward(model, rank_step(ctx, index), 0, uses)
        ctx.observe_gradients(f"step{index}", module)
    ctx.observe("num_reduced", sum(map(is_gradient, ctx.collectives()[before:])), must=0)


@program("finalized_reducer", invariants=("leaves_no_trace",))
def finalized_reducer(ctx: RankContext) -> None:
    """Call `_check_reducer_finalized` at every stage of a training.

    Observes what it raises, or None: `constructed`, `forward`, `backward`, `no_sync`, `evaluated`. Argument `accident`
    makes a backward fail, by `incomplete` (a layer gets no gradient) or `bomb` (it raises); fact `accident` is the call
    after that, and `recovered` the call after an update of the group. All ranks run it.
    """
    module = _build(ctx.scenario).to(ctx.device)
    model: Any = ctx.wrap(module)

    def ask(name: str) -> None:
        with ctx.catching(name):
            model._check_reducer_finalized()

    ask("constructed")
    turn = rank_step(ctx, 0)
    loss = turn.loss(turn.forward(model, turn.inputs(4, 3), "b"))
    ask("forward")
    turn.backward(loss)
    ask("backward")
    with ctx.no_sync(model):
        _backward(model, turn, 1, "b")
        ask("no_sync")
    with torch.no_grad():
        turn.forward(model, turn.inputs(4, 3), "b")
    ask("evaluated")
    module.armed = ctx.arguments["accident"] == "bomb"
    with contextlib.suppress(Exception):
        _backward(model, turn, 2, "b" if module.armed else "-")
    ask("accident")
    model._update_process_group(ctx.process_group)
    ask("recovered")


@finalized_reducer.expects
def _finalized_reducer(scenario: Scenario) -> Mapping[int, Facts]:
    names = [name for name, _ in Team().named_parameters()]
    facts: dict[str, Any] = dict.fromkeys(("constructed", "forward", "backward", "no_sync", "evaluated", "recovered"))
    if scenario.arguments["accident"] == "bomb":
        facts["accident"] = Raises(("RuntimeError",), ("reduc",))
    else:
        missing = [(name, index) for index, name in enumerate(names) if name.startswith("beside.")]
        facts["accident"] = error_naming(missing)
    return dict.fromkeys(range(scenario.world_size), facts)


@program("foreign_group", invariants=("leaves_no_trace",))
def foreign_group(ctx: RankContext) -> None:
    """Call `_update_process_group` with None and with a string; observe the exceptions. All ranks run it."""
    model: Any = ctx.wrap(_build(ctx.scenario).to(ctx.device))
    refusal = Raises(("TypeError", "ValueError", "RuntimeError"))
    for name, value in (("none", None), ("text", "gloo"), ("number", 7)):
        with ctx.catching(name, must=refusal):
            model._update_process_group(value)
