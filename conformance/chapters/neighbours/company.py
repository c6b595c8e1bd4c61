"""Program `company`: wrappers beside wrappers and beside the user's collectives; its truth is itself on `PlainDDP`.

Its arguments are axes (`Company`), which `grid.py` crosses. What a DDP communicates must not depend on what this rank
uses, on when its gradients arrive or on what it has communicated before: else its collectives meet others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward

from conformance.chapters.neighbours.towers import DEPTH, WIDTH, Around, Sealed, Tower, Uses
from conformance.chapters.neighbours.user_collectives import User, rows_for
from conformance.errors import instance
from conformance.models.integers import UNIT, RankStep, integers, with_integer_weights
from conformance.models.low_precision import precision_option
from conformance.programs import RankContext, program, rank_step
from conformance.scenario import Scenario

LAYOUTS = ("alone", "side_by_side", "separate", "chained", "nested", "shared", "three")
GROUPS = ("one", "own", "parts", "overlapping")
#: The layer that ranks skip with `unused` = "skipped".
SKIPPED = 1
#: Besides these there are "first_tower" and "last_tower", for towers of which only one may leave parameters unused, and
#: "idle": a rank, by turns, uses no parameter of the first tower.
UNUSED = ("none", "nobody", "one_rank", "alternating", "later", "crosswise", "skipped")
LOCAL = ("none", "first", "last", "all")
OPTIMIZERS = ("none", "ordinary", "zero", "in_backward")
#: A place for the user's collective besides those of `PLACES`: behind rank 0's forward, before every other rank's.
STAGGERED = "staggered"
BACKWARDS = ("once", "probed", "twice", "penalised", "forward_more", "either")
ORDERS = ("alike", "by_rank")


@dataclass(frozen=True)
class Company:
    """The arguments: each is one of the tuple of its name, or a flag.

    `layout`: how wrappers go together. `groups`: over which ranks each averages. `unused`: which branches which ranks
    do not use. `local`: which wrappers are within `no_sync` in every other step. `collective`: where the user
    communicates, with `layer`, behind which layer, `own_group`, whether over a group of the user's, and `as_a_bucket`,
    with as many elements as a bucket has. `others`: options of all wrappers but the first, on top of the scenario's.
    `hides`: branches lie behind a function that no search looks through. `hook`: "ready" or "talking" comm hooks.
    `backward`: "probed" by `torch.autograd.grad` before, on one rank alone; "twice" through the same graph; "penalised"
    by the weights of branches that forward does not use; behind "forward_more", one that one rank alone runs of the
    last tower and drops; of "either" of two forwards, which depends on the rank; or "reversed", one of each tower, the
    last one's first. `order`: ranks run their wrappers' forwards in the same order or, once no forward communicates,
    not. `unlike`: each tower but the first has one more parameter, which no rank uses, so that what wrappers exchange
    has different sizes. `joins`: the step before which the towers but the first are wrapped and begin to train, of a
    layout in which none feeds another. `in_turn`: each step runs one of such towers and no other. The tower with number
    `seals` returns its rows behind a call. In layout `shared` the towers have in common what `shares` names, by default
    the part whose gradient arrives last.
    """

    layout: str = "side_by_side"
    groups: str = "one"
    unused: str = "none"
    local: str = "none"
    collective: str = "none"
    layer: int = 1
    own_group: bool = False
    as_a_bucket: bool = False
    others: Mapping[str, Any] | None = None
    hides: bool = False
    checkpoints: bool = False
    hook: str = "none"
    optimizer: str = "none"
    backward: str = "once"
    order: str = "alike"
    unlike: bool = False
    joins: int = 0
    in_turn: bool = False
    seals: int = -1
    shares: str = "layers.0"
    num_steps: int = 4

    @staticmethod
    def of(scenario: Scenario) -> Company:
        return Company(**scenario.arguments)

    @property
    def num_towers(self) -> int:
        return {"alone": 1, "three": 3}.get(self.layout, 2)

    @property
    def depth(self) -> int:
        """How many layers a tower has: fewer where one stands on another, so that numbers stay small."""
        return DEPTH if self.layout in ("alone", "side_by_side", "separate", "shared") else DEPTH - 1

    def uses(self, rank: int, step: int, tower: int, world_size: int) -> Uses:
        """Return which branches of a tower a rank uses in a step; None where it uses the layer neither."""
        everything: list[bool | None] = [True] * self.depth
        idle = {
            "none": False,
            "nobody": True,
            "one_rank": rank == 0,
            "alternating": rank == step % world_size,
            "later": step > 0 and rank != 1 % world_size,
            "skipped": False,
            "idle": False,
            "first_tower": step > 0 and rank != 1 % world_size and tower == 0,
            "last_tower": rank == 0 and tower == self.num_towers - 1,
            "crosswise": rank == (0 if tower % 2 else world_size - 1),
        }[self.unused]
        if idle:
            everything[(tower + self.depth - 1) % self.depth] = False
        if self.unused == "skipped" and rank == 0 and step > 0:
            everything[SKIPPED] = None
        if self.unused == "idle" and tower == 0 and rank == step % world_size:
            return [None] * self.depth
        return everything

    def is_local(self, step: int, tower: int) -> bool:
        chosen = {"none": (), "first": (0,), "last": (self.num_towers - 1,), "all": range(self.num_towers)}[self.local]
        return step % 2 == 0 and tower in chosen

    def is_probed(self, rank: int, step: int, world_size: int) -> bool:
        """Whether a rank looks at a gradient of its inputs before the backward of a step."""
        return self.backward == "probed" and rank == (step + 1) % world_size

    def forwards(self, rank: int, step: int) -> list[int]:
        """Return the towers in the order in which a rank runs those that do not feed each other in a step."""
        if self.in_turn:
            return [step % self.num_towers]
        towers = list(range(self.num_towers if step >= self.joins else 1))
        # A DDP may agree on its buckets in the first two synchronised forwards.
        agrees_until = 2 if self.local == "none" else 4
        return towers[::-1] if self.order == "by_rank" and step >= agrees_until and rank % 2 else towers

    def backwards(self, losses: list[Tensor]) -> list[Tensor]:
        """Return what each backward of a step begins with."""
        if self.backward == "reversed":
            return losses[::-1]
        return losses if self.layout == "separate" else [sum(losses[1:], start=losses[0])]

    def members(self, tower: int, world_size: int) -> list[list[int]]:
        """Return the groups over which ranks average a tower; no rank is in two."""
        everyone = list(range(world_size))
        if self.groups == "parts" and tower:
            return [everyone[: world_size // 2], everyone[world_size // 2 :]]
        if self.groups == "overlapping":
            return [everyone[1:] if tower else everyone[:-1]]
        return [everyone]


class WholeSteps(torch.optim.Optimizer):
    """Moves each weight by one against its gradient, within -2 to 2: an optimizer that stays exact."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign()).clamp_(-2, 2)


@program("company", invariants=("same_collectives", "leaves_no_trace"))
def company(ctx: RankContext) -> None:
    """Train as `Company` says. All ranks run it.

    Observes `step<k>/grad/<tower>.<name>`, `step<k>/seen/<i>`, what the user's collectives gave, and at the end
    `final/parameter/<tower>.<name>`.
    """
    _Training(ctx).run()


class _Training:
    def __init__(self, ctx: RankContext) -> None:
        self._ctx = ctx
        self._plan = plan = Company.of(ctx.scenario)
        self._made: list[dist.ProcessGroup] = []
        self._group = self._new_group(list(range(ctx.world_size))) if plan.own_group else None
        self._towers = _towers(plan, ctx.scenario.seed, ctx.device)
        self._tops: list[nn.Module] = []
        self._wrappers: list[Any] = []
        self._wrap(self._towers[:1] if plan.joins else self._towers)
        like = torch.zeros(WIDTH * rows_for(plan.as_a_bucket), device=ctx.device)
        self._user = User(plan.collective, plan.layer, ctx.process_group, self._group, like)
        self._user.listen(self._towers[0])
        self._all = nn.ModuleList(self._towers)
        self._optimizer = self._make_optimizer()

    def run(self) -> None:
        plan, ctx = self._plan, self._ctx
        for step in range(plan.num_steps):
            if step and step == plan.joins:
                self._wrap(self._towers[1:])
            self._user.begin(step)
            if step == 0 or not any(plan.is_local(step - 1, tower) for tower in range(plan.num_towers)):
                self._all.zero_grad(set_to_none=True)
            self._step(rank_step(ctx, step))
            ctx.observe_gradients(f"step{step}", self._all)
            for index, tensor in enumerate(self._user.seen):
                ctx.observe(f"step{step}/seen/{index}", tensor)
            if self._optimizer is not None:
                with ctx.phase("optimizer", step):
                    self._optimizer.step()
        ctx.observe_parameters("final", self._all)
        for group in self._made:
            dist.destroy_process_group(group)

    def _step(self, turn: RankStep) -> None:
        plan = self._plan
        with contextlib.ExitStack() as local:
            for tower, wrapper in enumerate(self._wrappers):
                if plan.is_local(turn.step, tower) and hasattr(wrapper, "no_sync"):
                    local.enter_context(self._ctx.no_sync(wrapper))
            if plan.collective == STAGGERED and turn.rank:
                self._user.reduce()
            losses = self._losses(turn)
            if plan.collective == STAGGERED and not turn.rank:
                self._user.reduce()
            self._user.before_backward()
            for loss in plan.backwards(losses):
                if plan.backward == "twice":
                    turn.backward(loss, retain_graph=True)
                turn.backward(loss)
            with self._ctx.phase("after backward", turn.step):
                self._user.after_backward(self._towers[0])

    def _losses(self, turn: RankStep) -> list[Tensor]:
        plan = self._plan
        rows = [turn.inputs(rows_for(plan.as_a_bucket), WIDTH, micro=index) for index in range(plan.num_towers)]
        if plan.backward == "probed" or plan.unused == "idle":
            rows[0].requires_grad_()
        uses = [plan.uses(turn.rank, turn.step, tower, self._ctx.world_size) for tower in range(plan.num_towers)]

        def forward(tower: int, given: Tensor) -> Tensor:
            behind = self._user.behind_layer if tower == 0 else _nothing
            output: Any = turn.forward(self._tops[tower], given, uses[tower], behind)
            rows: Tensor = output() if isinstance(output, Sealed) else output
            return rows

        def forwards() -> list[Tensor]:
            if plan.layout == "nested":
                return [turn.forward(self._tops[-1], rows[0], uses, _Inner(self._user.behind_layer, plan.depth))]
            if plan.layout == "chained":
                return [forward(1, forward(0, rows[0]))]
            if plan.layout == "three":
                return [forward(2, forward(0, rows[0]) + forward(1, rows[1]))]
            made = {tower: forward(tower, rows[tower]) for tower in plan.forwards(turn.rank, turn.step)}
            return [made[tower] for tower in sorted(made)]

        outputs = forwards()
        if plan.backward == "either":
            outputs = (outputs, forwards())[turn.rank % 2]
        if plan.backward == "forward_more" and turn.rank == turn.step % self._ctx.world_size:
            forward(len(self._tops) - 1, rows[len(self._tops) - 1])
        losses = [self._loss(turn, self._user.loss(output), micro) for micro, output in enumerate(outputs)]
        if plan.is_probed(turn.rank, turn.step, self._ctx.world_size):
            torch.autograd.grad(losses[0], rows[0], retain_graph=True)
        if plan.backward == "penalised":
            losses[0] = losses[0] + self._penalty(uses)
        return losses

    def _penalty(self, uses: Sequence[Uses]) -> Tensor:
        """Return what weights of unused branches cost: autograd reaches them before it reaches a wrapper's output."""
        sums = [
            branch.get_parameter("weight").sum()
            for tower, used_of in zip(self._towers, uses, strict=True)
            for branch, is_used in zip(tower.branches, used_of, strict=True)
            if not is_used
        ]
        return sum((UNIT * each for each in sums), start=torch.zeros((), device=self._ctx.device))

    def _loss(self, turn: RankStep, output: Tensor, micro: int) -> Tensor:
        """Return a loss whose gradients can be averaged: twice where they are kept, or are two wrappers' at once."""
        plan = self._plan
        twice = plan.local != "none" or plan.backward == "twice" or plan.layout in ("nested", "shared")
        unit = UNIT if twice else UNIT // 12
        key = ("loss", turn.rank, turn.step, micro)
        coefficients = unit * integers(*output.shape, key=key, largest=2, dtype=output.dtype).to(output.device)
        return (output * coefficients).sum()

    def _new_group(self, members: list[int]) -> dist.ProcessGroup | None:
        """Return a group of `members`, None on other ranks. All ranks must call it."""
        group = dist.new_group(members)
        if not isinstance(group, dist.ProcessGroup):
            return None
        self._made.append(group)
        return group

    def _wrap(self, towers: Sequence[Tower]) -> None:
        """Wrap these towers, behind those that are wrapped, over their groups; forward is called on `tops`."""
        inner: nn.Module | None = None
        for index, tower in enumerate(towers, len(self._wrappers)):
            module: nn.Module = tower if inner is None or self._plan.layout != "nested" else Around(inner, tower)
            made = self._wrapped(index, module)
            self._wrappers.append(made)
            self._tops.append(made)
            inner = made

    def _wrapped(self, index: int, module: nn.Module) -> nn.Module:
        plan, ctx = self._plan, self._ctx
        options: dict[str, Any] = dict(plan.others or {}) if index else {}
        options |= precision_option({**ctx.scenario.options, **options})
        if plan.groups != "one":
            made = [self._new_group(members) for members in plan.members(index, ctx.world_size)]
            mine = [group for group in made if group is not None]
            if not mine:
                return module
            options["process_group"] = mine[0]
        if plan.optimizer == "in_backward":
            _apply_optimizer_in_backward(WholeSteps, module.parameters(), {})
        wrapper: Any = ctx.wrap(module, **options)
        group = options.get("process_group", ctx.process_group)
        if plan.hook == "ready":
            wrapper.register_comm_hook(group, default_hooks.allreduce_hook)
        elif plan.hook == "talking":
            wrapper.register_comm_hook(group, lambda state, bucket: _talking(state, bucket))  # torch reads annotations
        return instance(wrapper, nn.Module)

    def _make_optimizer(self) -> torch.optim.Optimizer | None:
        if self._plan.optimizer == "ordinary":
            return WholeSteps(self._all.parameters())
        if self._plan.optimizer == "zero":
            return ZeroRedundancyOptimizer(self._all.parameters(), WholeSteps, self._ctx.process_group)
        return None


def _towers(plan: Company, seed: int, device: torch.device) -> list[Tower]:
    """Return the towers, the same on every rank; those of layout `shared` have a part in common."""
    first = Tower(plan.depth)
    shared = {plan.shares: first.get_submodule(plan.shares)} if plan.layout == "shared" else None
    towers = [first, *(Tower(plan.depth, shared) for _ in range(plan.num_towers - 1))]
    for index, tower in enumerate(towers):
        with_integer_weights(tower, seed, index).to(device)
        tower.hides, tower.checkpoints, tower.seals = plan.hides, plan.checkpoints, index == plan.seals
        if plan.unlike and index:
            tower.register_parameter("spare", nn.Parameter(torch.zeros(1, device=device)))
    return towers


def _nothing(index: int, rows: Tensor) -> Tensor:
    return rows


class _Inner:
    """Has the user's part in the inner tower, which runs first, alone."""

    def __init__(self, behind: Callable[[int, Tensor], Tensor], depth: int) -> None:
        self._behind = behind
        self._left = depth

    def __call__(self, index: int, rows: Tensor) -> Tensor:
        self._left -= 1
        return self._behind(index, rows) if self._left >= 0 else rows


def _talking(group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[Tensor]:
    """Agree on the largest gradient, as hooks do that scale, and average: a comm hook."""
    largest = bucket.buffer().detach().abs().max().reshape(1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return default_hooks.allreduce_hook(group, bucket)
