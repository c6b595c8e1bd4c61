"""Program `feature_pair`: two DDP features in one training, which must work or raise an error with a reason.

The module consists of what the two features need. Its output is linear in every parameter, so gradients are small
integers with any optimizer and in any precision.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward

from conformance.checkers.protocol import is_gradient
from conformance.errors import certain, present
from conformance.models.integers import RankStep
from conformance.models.low_precision import Precision
from conformance.models.optimizers import SETS_TO_NONE
from conformance.models.small_integers import small_inputs, small_loss, with_small_weights
from conformance.observation import Raised
from conformance.programs import RankContext, program, rank_step
from conformance.scenario import Scenario
from conformance.truth.expected import AnyOf, Satisfies
from conformance.truth.steps import gradients

#: Feature -> words of which a refusal must use one, to be a reason.
FEATURES: Mapping[str, tuple[str, ...]] = {
    "join": ("join",),
    "static_graph": ("static_graph", "static graph"),
    "find_unused_parameters": ("find_unused_parameters", "unused parameters"),
    "comm_hook": ("hook",),
    "mixed_precision": ("mixed_precision", "mixed precision"),
    "optimizer_in_backward": ("optimizer",),
    "no_sync": ("no_sync",),
    "gradient_as_bucket_view": ("gradient_as_bucket_view", "bucket view"),
    "delayed_all_reduce": ("delay",),
    "skip_all_reduce_unused_params": ("skip_all_reduce_unused_params",),
    "ignored_parameters": ("ignore",),
    "sparse_gradients": ("sparse",),
    "update_process_group": ("process_group", "process group"),
    "buffers": ("buffer",),
}

#: Where a DDP may refuse: before it has trained with the pair.
_REFUSABLE = ("construct", "register", "join", "no_sync", "update")

_LEARNING_RATE = 2.0**-6
_ROWS = 4


@dataclass(frozen=True)
class Course:
    """What the ranks do: read from argument `features`, two names of `FEATURES`."""

    features: frozenset[str]
    world_size: int

    @staticmethod
    def of(scenario: Scenario) -> Course:
        names = frozenset(scenario.arguments["features"])
        certain(names <= set(FEATURES), f"unknown features {sorted(names - set(FEATURES))}")
        return Course(names, scenario.world_size)

    def __contains__(self, feature: str) -> bool:
        return feature in self.features

    @property
    def has_spare(self) -> bool:
        return bool({"find_unused_parameters", "skip_all_reduce_unused_params", "static_graph"} & self.features)

    def uses_spare(self, rank: int, index: int) -> bool:
        """Whether `rank` uses that layer in step `index`: in turn, or as a static graph or skipping requires."""
        if "static_graph" in self:
            return "find_unused_parameters" in self and rank == 0
        if "skip_all_reduce_unused_params" in self and "find_unused_parameters" not in self:
            return False
        return (rank + index) % 2 == 0

    @property
    def delayed(self) -> list[str]:
        """The parameters whose all-reduce waits for that of `a.weight`."""
        if "delayed_all_reduce" not in self:
            return []
        return ["c.weight", "c.bias", *(["table.weight"] if "sparse_gradients" in self else [])]

    @property
    def steps(self) -> list[tuple[int, list[int], bool]]:
        """The steps as (index, ranks that take part, whether it is in the join context), in order.

        With an update of the group, rank 0 trains alone in between; with join, the last rank has one input more.
        """
        all_ranks = list(range(self.world_size))
        alone = [(2, [0], False)] if "update_process_group" in self else []
        joined = "join" in self
        more = [(5, all_ranks[-1:], True)] if joined else []
        return [
            (0, all_ranks, False), (1, all_ranks, False), *alone, (3, all_ranks, joined), (4, all_ranks, joined), *more
        ]  # fmt: skip

    @property
    def num_local(self) -> int:
        return 1 if "no_sync" in self else 0


class Ignored(nn.Module):
    """A module with one parameter that the DDP must ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.empty(2))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.own


class Kit(nn.Module):
    """Layers beside each other, each with columns of the output of its own, and what the course's features need."""

    def __init__(self, course: Course) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 3)
        self.c = nn.Linear(2, 1)
        self.spare = nn.Linear(2, 2) if course.has_spare else None
        self.table = nn.Embedding(_ROWS, 2, sparse=True) if "sparse_gradients" in course else None
        self.ignored = Ignored() if "ignored_parameters" in course else None
        self.seen: Tensor | None
        self.register_buffer("seen", torch.zeros(2) if "buffers" in course else None)

    def forward(self, inputs: Tensor, rows: Tensor, with_spare: bool) -> Tensor:
        if self.seen is not None:
            with torch.no_grad():
                self.seen += inputs.sum().to(self.seen.dtype)
        columns = [self.a(inputs), self.b(inputs), self.c(inputs)]
        if self.spare is not None and with_spare:
            columns.append(self.spare(inputs))
        if self.table is not None:
            columns.append(self.table(rows))
        if self.ignored is not None:
            columns.append(self.ignored(inputs))
        return torch.cat(columns, dim=1)


def _backward(course: Course, model: nn.Module, turn: RankStep, micro: int) -> None:
    inputs = small_inputs(turn, 1, 2, micro=micro)
    rows = torch.tensor([(turn.rank + turn.step + micro) % _ROWS]).to(turn.device)
    output = turn.forward(model, inputs, rows, course.uses_spare(turn.rank, turn.step))
    turn.backward(small_loss(turn, output, micro))


def _ignored(course: Course) -> list[str]:
    return ["ignored.own"] if "ignored_parameters" in course else []


def _options(course: Course, module: Kit) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for feature in ("static_graph", "find_unused_parameters", "gradient_as_bucket_view"):
        if feature in course:
            options[feature] = True
    if "skip_all_reduce_unused_params" in course:
        options |= {"skip_all_reduce_unused_params": True, "find_unused_parameters": True}
    if "mixed_precision" in course:
        options["mixed_precision"] = Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    if "delayed_all_reduce" in course:
        options["delay_all_reduce_named_params"] = [(name, module.get_parameter(name)) for name in course.delayed]
        options["param_to_hook_all_reduce"] = module.a.weight
    return options


@program("feature_pair", invariants=("silent_no_sync", "leaves_no_trace"))
def feature_pair(ctx: RankContext) -> None:
    """Train with the two features of argument `features` (or one alone).

    Observes `outcome`: gradients and parameters after each step, parameters and buffers at the end, and facts which
    show that the features were active; or the exception by which the DDP refused the pair. `stage` is the last stage
    that the training reached, and `refused` is 1 if the DDP refused. All ranks run it.
    """
    run = _Run(ctx)
    raised = None
    try:
        with mock.patch.dict(os.environ, {SETS_TO_NONE: "1"}):
            run.train()
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        if run.stage not in _REFUSABLE:
            raise
        raised = Raised.of(error)
    ctx.observe("stage", run.stage, must=AnyOf("trained", *_REFUSABLE))
    refused = Satisfies("1, where the pair is refused", _is_one_of, ((None, 1),))
    ctx.observe("refused", None if raised is None else 1, must=refused)
    features = sorted(run.course.features)
    reasoned = Satisfies(f"a refusal that speaks of {' and '.join(features)}", _is_refusal_of, (features,))
    trained = {**run.facts, "signs": _signs_of(run.course)}
    ctx.observe("outcome", run.facts if raised is None else raised, must=AnyOf(trained, reasoned))


class _Run:
    """One rank's training; `stage` is what it is about to do."""

    def __init__(self, ctx: RankContext) -> None:
        self.ctx = ctx
        self.course = Course.of(ctx.scenario)
        self.facts: dict[str, Any] = {}
        self.stage = "construct"
        self.hook_calls = 0

    def train(self) -> None:
        ctx, course = self.ctx, self.course
        self.module = module = with_small_weights(Kit(course), ctx.scenario.seed).to(ctx.device)
        module._ddp_params_and_buffers_to_ignore = _ignored(course)  # type: ignore[assignment]
        optimizer = None
        if "optimizer_in_backward" in course:
            _apply_optimizer_in_backward(optim.SGD, module.parameters(), {"lr": _LEARNING_RATE})
        else:
            optimizer = optim.SGD(module.parameters(), lr=_LEARNING_RATE)
        self.model: Any = ctx.wrap(module, **_options(course, module))
        self.stage = "register"
        if "comm_hook" in course:
            cast(Any, self.model).register_comm_hook(None, lambda _, bucket: self._average(bucket))
        self._steps([step for step in course.steps if not step[2]], optimizer)
        if "join" in course:
            self.stage = "join"
            with (
                warnings.catch_warnings(),
                cast(Any, self.model).join(),
            ):  # torch's context changes the filters for good
                self._steps([step for step in course.steps if step[2]], optimizer)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            self.facts[f"final/{name}"] = tensor.detach().clone()
        reduced = [dtype for each in ctx.collectives() if is_gradient(each) for dtype in each.dtypes]
        self.facts["signs"] = {
            "hook_called": self.hook_calls > 0,
            "low_precision_wire": "bfloat16" in reduced,
            "full_precision_wire": "float32" in reduced and "sparse_gradients" not in course,
        }
        self.stage = "trained"

    def _steps(self, steps: Sequence[tuple[int, list[int], bool]], optimizer: optim.Optimizer | None) -> None:
        for index, members, in_join in steps:
            with self._group_of(members, in_join):
                if self.ctx.rank in members:
                    self._step(index, optimizer)

    @contextlib.contextmanager
    def _group_of(self, members: Sequence[int], in_join: bool) -> Iterator[None]:
        if in_join or len(members) == self.ctx.world_size:
            yield
            return
        group = dist.new_group(list(members))
        if self.ctx.rank in members:
            self.stage = "update"
            self.model._update_process_group(group)
        yield
        self.stage = "update"
        self.model._update_process_group(self.ctx.process_group)
        dist.barrier(group=self.ctx.process_group)
        if self.ctx.rank in members:
            dist.destroy_process_group(group)

    def _step(self, index: int, optimizer: optim.Optimizer | None) -> None:
        turn = rank_step(self.ctx, index)
        self.module.zero_grad()
        for micro in range(self.course.num_local):
            self.stage = "no_sync"
            with self.ctx.no_sync(self.model):
                self.stage = "backward"
                _backward(self.course, self.model, turn, micro)
        self.stage = "backward"
        _backward(self.course, self.model, turn, self.course.num_local)
        self.facts |= gradients(f"step{index}", self.module)
        if optimizer is not None:
            optimizer.step()
        for name, parameter in self.module.named_parameters():
            self.facts[f"step{index}/parameter/{name}"] = parameter.detach().clone()

    def _average(self, bucket: Any) -> Any:
        self.hook_calls += 1
        group = self.model.process_group
        buffer = bucket.buffer() / dist.get_world_size(group)
        work = present(dist.all_reduce(buffer, group=group, async_op=True))
        return work.get_future().then(lambda _: buffer)


def _signs_of(course: Course) -> Mapping[str, bool]:
    """Return what shows that the features were active."""
    is_low = "mixed_precision" in course
    return {
        "hook_called": "comm_hook" in course,
        "low_precision_wire": is_low,
        "full_precision_wire": not is_low and "sparse_gradients" not in course,
    }


def _is_refusal_of(got: Any, features: Sequence[str]) -> bool:
    if not isinstance(got, Raised):
        return False
    message = got.message.lower()
    return all(any(word in message for word in FEATURES[feature]) for feature in features)


def _is_one_of(got: Any, choices: Sequence[Any]) -> bool:
    return got in choices
