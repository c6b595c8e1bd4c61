"""Program `derived_wrapper`: subclasses of a DDP, as public projects write them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from conformance.models.integers import RankStep, with_integer_weights
from conformance.observation import Facts
from conformance.programs import RankContext, observe_run, program, run_steps, truth_of
from conformance.scenario import Scenario
from conformance.truth.expected import AnyOf, Raises

NUM_STEPS = 3


class WithTrainStep(nn.Module):
    """Two layers, a buffer, and another method than forward to train by."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.last = nn.Linear(3, 2)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.count += 1
        output: Tensor = self.last(self.first(inputs))
        return output

    def train_step(self, inputs: Tensor) -> Tensor:
        output: Tensor = self(inputs)
        return 2 * output


class TrainedByMethod(nn.Module):
    """Has the method that subclasses train by as its forward."""

    def __init__(self, module: WithTrainStep) -> None:
        super().__init__()
        self.inner = module

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner.train_step(inputs)


def _runs_another_method(base: Any) -> Any:
    class Derived(base):  # type: ignore[misc]
        def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
            return self.module.train_step(*inputs, **kwargs)

    return Derived


def _forward_of_phases(base: Any) -> Any:
    class Derived(base):  # type: ignore[misc]
        def forward(self, *inputs: Any, **kwargs: Any) -> Any:
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            if self._delay_all_reduce_all_params:
                return self._post_forward(self.module.train_step(*inputs, **kwargs))
            return self._post_forward(2 * self._run_ddp_forward(*inputs, **kwargs))

    return Derived


def _around_the_phases(base: Any) -> Any:
    class Derived(base):  # type: ignore[misc]
        def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
            return super()._pre_forward(*inputs, **kwargs)

        def _post_forward(self, output: Any) -> Any:
            return super()._post_forward(2 * output)

    return Derived


def _forward_of_its_own(base: Any) -> Any:
    class Derived(base):  # type: ignore[misc]
        def train_step(self, *inputs: Any) -> Any:
            self.logger.set_runtime_stats_and_log()
            self.reducer.prepare_for_forward()
            work = Join.notify_join_context(self)
            if work is not None:
                self.reducer._set_forward_pass_work_handle(work, self._divide_by_initial_world_size)
            self.reducer._rebuild_buckets()
            if self._check_sync_bufs_pre_fwd():
                self._sync_buffers()
            if self._join_config.enable:
                self._check_global_requires_backward_grad_sync(is_joined_rank=False)
            with self._inside_ddp_forward():
                output = self.module.train_step(*inputs)
            if self._check_sync_bufs_post_fwd():
                self._sync_buffers()
            self.require_forward_param_sync = True
            searched = self.find_unused_parameters and not self.static_graph
            self.reducer.prepare_for_backward([output] if searched else [])
            self._clear_grad_buffer()
            return output

        def forward(self, *inputs: Any) -> Any:
            return self.train_step(*inputs)

    return Derived


def _passes_attributes_through(base: Any) -> Any:
    class Derived(base):  # type: ignore[misc]
        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.module, name)

        def forward(self, *inputs: Any) -> Any:
            if not callable(self.train_step):
                raise TypeError(f"train_step must be the wrapped module's method, got {self.train_step!r}")
            return 2 * super().forward(*inputs)

    return Derived


def _chooses_parameters(base: Any) -> Any:
    class Derived(base):  # type: ignore[misc]
        heard = False

        def _build_params_for_reducer(self) -> Any:
            Derived.heard = True
            parameters, sparse = super()._build_params_for_reducer()
            return parameters[:2], sparse[:2]

        def forward(self, *inputs: Any) -> Any:
            return 2 * super().forward(*inputs)

    return Derived


#: What a subclass does -> (the class made from a DDP's, whether a DDP may refuse to be constructed).
KINDS: Mapping[str, tuple[Callable[[Any], Any], bool]] = {
    "runs_another_method": (_runs_another_method, False),
    "forward_of_phases": (_forward_of_phases, False),
    "around_the_phases": (_around_the_phases, False),
    "forward_of_its_own": (_forward_of_its_own, False),
    "passes_attributes_through": (_passes_attributes_through, False),
    "chooses_parameters": (_chooses_parameters, True),
}


@program("derived_wrapper", invariants=("leaves_no_trace",))
def derived_wrapper(ctx: RankContext) -> None:
    """Train a module in a subclass, of the kind that argument `kind` names, of the DDP under test. All ranks run it.

    Observes `step<k>/grad/<name>` and the buffer. Where a DDP may refuse the subclass, `outcome` holds these and
    `heard`, whether the method that the subclass overrides was called; or the refusal. Without the argument there is no
    subclass: the DDP wraps a module whose forward is the method that subclasses train by.
    """
    module: Any = with_integer_weights(WithTrainStep(), ctx.scenario.seed).to(ctx.device)

    def step(model: Any, turn: RankStep) -> Mapping[str, Any]:
        turn.backward(turn.loss(turn.forward(model, turn.inputs(4, 3))))
        return {"count": module.count.clone()}

    if "kind" not in ctx.arguments:
        observe_run(ctx, lambda: run_steps(ctx, module, ctx.wrap(TrainedByMethod(module)), step, NUM_STEPS))
        return
    make, may_refuse = KINDS[ctx.arguments["kind"]]
    probe: Any = ctx.wrap(with_integer_weights(WithTrainStep(), ctx.scenario.seed).to(ctx.device))
    derived = make(type(probe))

    def run() -> dict[str, Any]:
        model = derived(module, process_group=ctx.process_group, **ctx.scenario.options)
        facts = run_steps(ctx, module, model, step, NUM_STEPS)
        return {**facts, "heard": derived.heard} if may_refuse else facts

    observe_run(ctx, run, may_refuse=may_refuse)


@derived_wrapper.expects
def _as_without_subclass(scenario: Scenario) -> Mapping[int, Facts]:
    facts = truth_of(scenario.replace(arguments={}))
    if not KINDS[scenario.arguments["kind"]][1]:
        return facts
    refusal = Raises(("TypeError", "ValueError", "RuntimeError"))
    return {rank: {"outcome": AnyOf({**expected, "heard": True}, refusal)} for rank, expected in facts.items()}
