"""`DistributedDataParallel`: the module that wraps a module, with torch 2.13's arguments, attributes and methods."""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Literal, Never

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable

from ddp_impl.api.arguments import (
    buffer_policy,
    check_arguments,
    check_flags,
    check_nested,
    resolve_devices,
    resolve_group,
)
from ddp_impl.api.copied_state import BufferLayouts
from ddp_impl.api.join import JoinedWrapper
from ddp_impl.api.torch_names import (
    TORCH_DDP,
    refuse_absent,
    refuse_unknown,
    refuse_unsupported_overrides,
    with_named_arguments_only,
)
from ddp_impl.autograd.hooks import is_averaged
from ddp_impl.autograd.marks import marked
from ddp_impl.base import messages
from ddp_impl.base.nested_tensors import find_tensors, move
from ddp_impl.base.options import BucketCaps, ReducerOptions
from ddp_impl.buckets.bucket import ManagedParameter
from ddp_impl.buckets.comm_hooks import BoundHook, BufferHook, bind_hook, builtin_hook
from ddp_impl.compile.compiled_calls import (
    ActiveCompiler,
    CompiledCalls,
    InGraph,
    compiler_behind,
    in_graph,
    runs_outside_graphs,
)
from ddp_impl.compile.graph_split import AveragedParameters
from ddp_impl.compile.in_graph import InGraphReducer
from ddp_impl.module.mixed_precision import MixedPrecision, PrecisionCaster
from ddp_impl.module.parameter_watch import (
    ParameterWatch,
    device_type,
    first_device,
    managed_parameters,
    refuse_expanded,
)
from ddp_impl.module.replicas import decline, describe, verify_replicas
from ddp_impl.module.sync_batch_norm import check_sync_batch_norm
from ddp_impl.reducer.company import Construction, company
from ddp_impl.reducer.iteration import Progress
from ddp_impl.reducer.reducer import Reducer
from ddp_impl.reducer.reduction import take_over_optimizers
from ddp_impl.torch_internals.autograd import brought_by_backward, current_backward, in_compiled_backward
from ddp_impl.torch_internals.compile import break_graph, frame_callback
from ddp_impl.torch_internals.tensors import (
    has_tensor_hooks,
    ignored_names,
    num_nodes,
    num_post_accumulate_hooks,
    outside_transforms,
    transforms_active,
)
from ddp_impl.wire.collectives import BROADCAST_CHUNK_BYTES, backend_of, rank_in, size_of
from ddp_impl.wire.peers import Peers, slow_waits

#: Attributes that a pickled copy makes anew.
_OF_THIS_PROCESS = (
    "process_group", "reducer", "device_mesh", "_join_config", "_caster", "_watch", "_compiled_calls",
    "_in_graph_backwards", "_peers", "_in_use", "_outputs_in_use",
)  # fmt: skip


class _InUse:
    """Lives as long as a wrapper, or another object that has its attributes; or as an output of its forward."""


# A virtual subclass, as abstract base classes allow: libraries find a DDP by isinstance (torch.distributed.checkpoint,
# pipelining, accelerate, transformers, ignite), and of torch's implementation nothing is inherited.
@nn.parallel.DistributedDataParallel.register
class DistributedDataParallel(JoinedWrapper):
    """Averages a module's gradients over a process group during backward.

    `isinstance(ddp, torch.nn.parallel.DistributedDataParallel)` is true.

    Construction, forward in training and backward are collective: every rank of the group must go through them in the
    same order. Arguments have the names, order and meaning of `torch.nn.parallel.DistributedDataParallel` (torch 2.13).

    Args:
        module: what to train; all its parameters on one kind of device.
        device_ids: for a module on one accelerator, its index in a list of one; inputs are then moved there.
        output_device: the device of a single-accelerator module's outputs; only checked, as in torch.
        dim: the dimension that torch's `scatter` would split; kept for compatibility.
        broadcast_buffers: deprecated form of `forward_sync_buffers`; False also keeps buffers out of `init_sync`.
        init_sync: compare the modules of all ranks and copy rank 0's parameters and buffers to all.
        process_group: whose ranks to average over; the default group if None.
        bucket_cap_mb: MiB of gradients per all-reduce; 25, with a first bucket of 1, if None. "auto": chosen after
            three iterations, from measured times of computation and communication.
        find_unused_parameters: allow parameters without a gradient, which may differ between ranks and steps. An
            optimizer in the backward then steps when the backward is over: a rank may still refuse to average.
        check_reduction: deprecated, has no effect.
        gradient_as_bucket_view: let gradients live in the communication buckets.
        static_graph: promise that every iteration uses the same parameters in the same way.
        delay_all_reduce_named_params: names and parameters whose gradients are held back.
        param_to_hook_all_reduce: the parameter whose gradient they wait for; in the first iteration, for all others.
        mixed_precision: a `MixedPrecision`: compute and reduce in lower precision, keep parameters in full.
        device_mesh: a 1-D mesh, instead of `process_group`.
        skip_all_reduce_unused_params: with `find_unused_parameters`, do not communicate buckets that no rank used.
        bucket_cap_mb_list: MiB per bucket in launch order, the last for all further ones.
        batched_grad_copy: accepted; copies between gradients and buckets are always batched here.
        forward_sync_buffers: copy rank 0's buffers to all ranks before each forward that follows a synchronised one.
        lazy_bucket_allocation: allocate a bucket when its gradients arrive, and hold none of it after the backward.

    Raises:
        RuntimeError: no parameter requires a gradient; a parameter is uninitialised; ranks wrap different modules
            (on every rank, naming the parameter); no default process group.
        ValueError: arguments that contradict each other or the module's devices.
        TypeError: an argument of another type than its own, or of a newer torch; a subclass overrides what torch's
            class calls and this one does not.

    """

    @with_named_arguments_only
    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | Literal["auto"] | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        **unknown: Never,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        refuse_absent(DistributedDataParallel)
        refuse_unsupported_overrides(type(self), DistributedDataParallel)
        if check_reduction:
            warnings.warn("check_reduction has no effect and will go away; leave it out", FutureWarning, stacklevel=2)
        self.process_group = resolve_group(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self._peers = Peers(self.process_group, decline=partial(decline, self.process_group, first_device(module)))
        with self._peers.publishing_errors("construction"):
            refuse_unknown(unknown)
            check_arguments(module, device_ids, output_device, delay_all_reduce_named_params, param_to_hook_all_reduce)
            check_flags(
                broadcast_buffers=broadcast_buffers is not None and broadcast_buffers,
                forward_sync_buffers=forward_sync_buffers is not None and forward_sync_buffers,
                init_sync=init_sync,
                find_unused_parameters=find_unused_parameters,
                gradient_as_bucket_view=gradient_as_bucket_view,
                static_graph=static_graph,
                skip_all_reduce_unused_params=skip_all_reduce_unused_params,
                lazy_bucket_allocation=lazy_bucket_allocation,
            )
            caps = BucketCaps.from_mb(bucket_cap_mb, bucket_cap_mb_list)
            precision = None if mixed_precision is None else MixedPrecision.of(mixed_precision)
            if precision is not None:
                precision.check_can_cast(module)
            self.parameters_to_ignore = set(ignored_names(module))
            members = managed_parameters(module, self.parameters_to_ignore)
            check_nested(module, members, gradient_as_bucket_view)
            self.device_type = device_type(module, self.parameters_to_ignore)
            self.device = members[0].parameter.device
            self.is_multi_device_module = len({member.parameter.device for member in members}) > 1
            self.device_ids, self.output_device = resolve_devices(members, device_ids, output_device)
            check_sync_batch_norm(module, self.device_type)

        self.module = module
        self.dim = dim
        self.batched_grad_copy = batched_grad_copy
        self.mixed_precision = mixed_precision
        self.bucket_bytes_cap_default = bucket_cap_mb is None and not bucket_cap_mb_list
        self.broadcast_bucket_size = BROADCAST_CHUNK_BYTES
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.forward_sync_buffers, init_sync_buffers = buffer_policy(broadcast_buffers, forward_sync_buffers)
        self._comm_hook: tuple[Any, Any] | None = None
        self._buffer_hook: BufferHook | None = None
        self._lazy_init_ran = False
        self._has_buffers = bool(self.modules_buffers)
        self._options = ReducerOptions(
            caps=caps,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            lazy_bucket_allocation=bool(lazy_bucket_allocation),
            reduce_dtype=None if precision is None else precision.communication_dtype,
            delayed=frozenset(name for name, _ in delay_all_reduce_named_params or ()),
            releases_delayed=next((m.name for m in members if m.parameter is param_to_hook_all_reduce), ""),
        )
        self._copied: Construction = ()
        self._may_share_backward = True  # unless no rank has another wrapper
        if init_sync:
            with self._peers.publishing_errors("construction"):
                refuse_expanded(module, self.parameters_to_ignore)
                mine = describe(
                    members,
                    self.copied_tensors(init_sync_buffers),
                    self.parameters_to_ignore,
                    self._options,
                    forward_sync_buffers=self.forward_sync_buffers,
                )
        self._peers.publish_init_sync(init_sync, has_buffers=self._has_buffers)
        self._has_checked_init_sync = init_sync  # verify_replicas checks it
        if init_sync:
            with self._peers.awaiting("construction", "the other ranks' modules"):
                agreed = verify_replicas(
                    mine, self.process_group, self.device, has_other_wrappers=company.wrapper_lives,
                    meanwhile=partial(self._peers.refuse_unlike, compares=True),
                )  # fmt: skip
                self._may_share_backward = agreed.has_other_wrappers
                self._peers.company.run = self._peers.company.run or agreed.run
                self.synchronise_state(init_sync_buffers)
        self._caster = None if precision is None else PrecisionCaster(module, precision, self.parameters_to_ignore)
        if init_sync and init_sync_buffers:
            self._buffer_layouts = BufferLayouts.of(self.named_module_buffers)
        self.attach_reducer(members)
        if init_sync:
            company.mark_shared(self.reducer)
        self.reducer.planning.log_plan(
            f"wraps {type(module).__name__} for {size_of(self.process_group)} ranks over "
            f"{backend_of(self.process_group)}, {self._options}"
        )

    # -- forward ------------------------------------------------------------------------------------------------------

    @runs_outside_graphs
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the wrapped module and return its outputs as they are. Collective while gradients are synchronised."""
        callback = frame_callback()
        if callback is None:
            return self._forward(None, inputs, kwargs)
        return self.forward_compiled(callback, inputs, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward_compiled(self, callback: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward that `torch.compile` calls; `callback` is that of Dynamo."""
        return self._forward(compiler_behind(callback), inputs, kwargs)

    def _forward(self, compiler: ActiveCompiler | None, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Shown to those that begin to listen within it, and to observers that are no profiler, too.
        named = torch.autograd.profiler.record_function("DistributedDataParallel.forward")
        with named:
            try:
                inputs, kwargs = self._pre_forward(*inputs, **kwargs)
                with self._compiled_calls.for_one_forward(self.module, compiler, self.averages_in_graph):
                    return self._post_forward(self._run_ddp_forward(*inputs, **kwargs))
            except BaseException as error:
                self.reducer.peers.raised("forward", error, error.__traceback__)
                raise

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the wrapped module; a subclass may call another method of it, and is then compiled without cuts."""
        call = self._compiled_calls.current(self.module)
        if self._caster is None:
            return call(*inputs, **kwargs)
        with self._caster.casting(self.device, at_once=self._compiled_calls.is_whole):
            return call(*inputs, **kwargs)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not transforms_active():
            self._meet_before_forward()
        else:
            with outside_transforms():  # the user transforms the module, and not what ranks exchange
                self._meet_before_forward()
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            inputs, kwargs = move(inputs, device), move(kwargs, device)
        if self._caster is not None:
            inputs, kwargs = self._caster.cast_inputs(inputs), self._caster.cast_inputs(kwargs)
        self.reducer.num_nodes_before_forward = num_nodes()
        return inputs, kwargs

    def _meet_before_forward(self) -> None:
        if not self._lazy_init_ran:
            self._lazy_init()
        synchronise = self._synchronises
        compares_first = synchronise and not self._has_checked_init_sync
        if compares_first:  # they may have waited for this rank since construction
            self._has_checked_init_sync = True
            self._peers.refuse_unlike(compares=False)
        if synchronise and self._watch.check(allow_removed=self.reducer.ranks_may_differ):
            self._has_buffers = bool(self.modules_buffers or self._buffer_layouts.parts)
        if compares_first and not self._has_buffers and self._buffer_hook is None:  # where others may have some
            self._has_buffers = self._peers.any_has_buffers()
        if torch.is_grad_enabled() and not synchronise:  # under `no_sync` too: the backward could not go on
            self.reducer.check_finished()
        if self._join_config.enable:
            self.reducer.check_finished()
            self.reducer.reduction.await_join_agreements()  # of a forward without a backward
            notified = Join.notify_join_context(self)  # raises on every rank alike where the user wants that
            if notified is not None:
                self.reducer._set_forward_pass_work_handle(notified, self._divide_by_initial_world_size)
            self._check_global_requires_backward_grad_sync(is_joined_rank=False)
        if synchronise:
            self.reducer.prepare_for_forward()
        if self._has_buffers and self._check_sync_bufs_pre_fwd():
            self._sync_buffers()

    def averages_in_graph(self) -> InGraph | None:
        """Return how the compiled backward of this forward averages; None if the reducer has to."""
        if getattr(self._run_ddp_forward, "__func__", None) is not DistributedDataParallel._run_ddp_forward:
            return None
        reducer, calls = self.reducer, self._compiled_calls
        synchronises = self._synchronises and not reducer.hooks.are_removed
        return in_graph(
            calls.reduction, calls.averaged, self._options, self.process_group,
            reducer_must=not synchronises or self._join_config.enable or reducer.reduction.steps_optimizers,
            comm_hook=self._comm_hook, param_dtype=None if self._caster is None else self._caster.config.param_dtype,
        )  # fmt: skip

    def _post_forward(self, output: Any) -> Any:
        if self._buffer_hook is not None and self._check_sync_bufs_post_fwd():
            with outside_transforms():
                self._sync_buffers()
        synchronises = self._synchronises
        if self.require_forward_param_sync is not synchronises:  # a module's attributes are set by Python code
            self.require_forward_param_sync = synchronises
        if not torch.is_grad_enabled():
            return output
        tensors = find_tensors(output)
        if (averages := self._compiled_calls.averages_in_graph) is not None:
            self._in_graph_backwards.forward_in_graph(tensors, averages, self._outputs_in_use)
        elif synchronises:
            reported = output
            if self.reducer.expectation.allows_absence:
                reported = self.reducer.expectation.tie(output, tensors)
            # Ranks exchange something when a backward gets here: before hooks of the module's own on what it returns.
            reducer = self.reducer
            if reducer.ranks_may_differ or (reducer.may_share_backward and company.has_an_order(reducer)):
                reported = marked(
                    reported,
                    tensors if reported is output else find_tensors(reported),
                    self.reducer.num_nodes_before_forward,
                )
            self.reducer.prepare_for_backward(tensors if reported is output else find_tensors(reported))
            return reported
        else:
            self._in_graph_backwards.forward_ran()
            self.reducer.forward_was_local(tensors)
        return output

    def _lazy_init(self) -> None:
        self._lazy_init_ran = True
        self.reducer.reduction.steps_optimizers = take_over_optimizers(self.reducer.members)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: forwards run inside are not synchronised, whenever their backward runs.

        The next forward and backward outside average all that was accumulated. Ranks may run different numbers of
        forwards inside; where forwards synchronise buffers, every rank must use it for the same ones.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # -- comm hooks ---------------------------------------------------------------------------------------------------

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Let `hook(state, bucket)` reduce each `GradBucket`, which is not divided; every rank the same hook.

        It returns a `torch.futures.Future` of the reduced tensor. Raises `RuntimeError` when one is registered already,
        `TypeError`/`ValueError` for one that cannot be called like this.
        """
        try:
            bound = bind_hook(state, hook)
        except (TypeError, ValueError) as error:
            raise self.reducer.telemetry.logged(error) from None
        self._claim_comm_hook(state, hook, getattr(hook, "__qualname__", type(hook).__name__), bound)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Use one of `torch.distributed.BuiltinCommHookType`; every rank the same."""
        reducer: Any = weakref.ref(self.reducer)  # which holds the hook
        bound = builtin_hook(comm_hook_type, lambda: reducer().group)
        self._claim_comm_hook(comm_hook_type, None, str(comm_hook_type), bound)

    def _claim_comm_hook(self, state: Any, hook: Any, name: str, bound: BoundHook | None) -> None:
        if self._comm_hook is not None:
            error = (
                "register_comm_hook or register_builtin_comm_hook can only be called once; "
                f"{self.reducer.telemetry.comm_hook} is registered already"
            )
            raise self.reducer.telemetry.logged(RuntimeError(error))
        self._comm_hook = (state, hook)
        self.reducer.telemetry.comm_hook, self.reducer.reduction.comm_hook = name, bound

    # -- pickling -----------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Leave out group and reducer; raises `RuntimeError` off the default group, and if averages are missing."""
        if self.process_group is not dist.group.WORLD:
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported with the default process group: the copy is attached to "
                "the default group of the process that loads it. Save module.state_dict() instead, or wrap without "
                "process_group"
            )
        if self.reducer.reduction.iteration.is_incomplete:
            self.reducer.check_finished()  # a copy knows nothing of it: the next forward would not say so
        self._watch.check_hidden()
        if self._join_config.enable:
            warnings.warn("pickled inside a join context: the copy is outside of any", stacklevel=2)
        state: Any = super().__getstate__() if hasattr(nn.Module, "__getstate__") else dict(self.__dict__)
        kept = {name: value for name, value in state.items() if name not in _OF_THIS_PROCESS}
        return {**kept, "_copy_of": self._peers.copied_now, "_copied": self.reducer.construction}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Attach to this process's default group with a new reducer and the same hooks; nothing is communicated."""
        copy_of = state.get("_copy_of", "?")
        super().__setstate__({name: value for name, value in state.items() if name != "_copy_of"})
        Joinable.__init__(self)
        self.process_group = resolve_group(None, None)
        self._peers = Peers(self.process_group, copy_of=copy_of)
        self._has_checked_init_sync = True  # a copy compares nothing
        precision = None if self.mixed_precision is None else MixedPrecision.of(self.mixed_precision)
        self._caster = None if precision is None else PrecisionCaster(self.module, precision, self.parameters_to_ignore)
        self.require_forward_param_sync = True
        self.require_backward_grad_sync = True
        self._may_share_backward = True
        # Ranks may have frozen different parameters since, or given them other data, and copies compare nothing.
        averaged = state.get("_averaged", {})
        self.attach_reducer(managed_parameters(self.module, self.parameters_to_ignore, averaged))

    # -- construction -------------------------------------------------------------------------------------------------

    def attach_reducer(self, members: Sequence[ManagedParameter]) -> None:
        """Average the gradients of `members` with a new reducer; construction and copies call it."""
        rank = rank_in(self.process_group)
        self._watch = ParameterWatch(self.module, members, self.parameters_to_ignore, rank, is_averaged)
        self._averaged = {member.name: member.layout.stride for member in members}
        frozen = [member.parameter for member in members if not member.parameter.requires_grad]
        for parameter in frozen:  # of a copy; autograd lets nobody listen to them
            parameter.requires_grad_(True)
        self.reducer = Reducer(
            members, self.process_group, self.device, self._options, self._peers,
            may_share_backward=self._may_share_backward, copied=self._copied,
        )  # fmt: skip
        self.reducer.before_backward = self._watch.check_hidden
        for parameter in frozen:
            parameter.requires_grad_(False)
        # The hooks on the parameters must not outlive the wrapper: a user who keeps the bare module trains it alone.
        # They must outlive it in what shares its attributes, as accelerate compiles regions of a copy of that kind, and
        # while an output is left whose backward may run.
        reducer, self._in_use, self._outputs_in_use = self.reducer, _InUse(), (outputs := _InUse())
        reducer.in_use = weakref.ref(outputs)
        weakref.finalize(self._in_use, reducer.wrapper_collected)
        weakref.finalize(outputs, reducer.remove_hooks)
        if self._caster is not None:
            weakref.finalize(outputs, self._caster.let_go)
        slow_waits.serve(outputs)
        self._in_graph_backwards = InGraphBackwards(self.reducer)
        self._compiled_calls = CompiledCalls(
            AveragedParameters([member.parameter for member in members], self.reducer.planning.specs),
            frozenset(self.parameters_to_ignore),
            self._options.caps,
            reducer.planning.agree_on_order,
        )
        if self._comm_hook is not None:
            state, hook = self._comm_hook
            self._comm_hook = None
            if hook is None:
                self._register_builtin_comm_hook(state)
            else:
                self.register_comm_hook(state, hook)


#: No backward has this number; one that runs whole in a graph has -1.
_OF_NO_BACKWARD = -2


class InGraphBackwards:
    """Who averages when a backward reaches a forward that was compiled to average: its graph, or the reducer.

    A graph averages what it computes, and a DDP what accumulates. They are the same where every parameter of the
    wrapper accumulates in this backward, into an empty `.grad`, from this forward alone, and no hook of the user's
    looks on. Otherwise the graph's collectives do nothing, and the reducer averages `.grad` behind the hooks, as in
    eager mode; or nobody does (`torch.autograd.grad`). A rank decides alone: the buckets are those of a graph that
    concatenates. Where the user has graphs coalesce, or fuse nothing, ranks must decide alike.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._num_forwards = 0  # since the last such backward that accumulates began
        self._number = _OF_NO_BACKWARD  # the number of that backward
        self._is_plain = True
        mine = weakref.ref(self)

        @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
        def captures_plain() -> bool:  # Dynamo calls it while it traces a captured backward, and keeps the answer
            return (it := mine()) is not None and it.is_plain()

        self._captures_plain = captures_plain

    def forward_ran(self) -> None:
        """Note a forward whose backward may be part of another one's: any but those that the reducer awaits."""
        self._num_forwards += 1

    def forward_in_graph(self, outputs: Sequence[Tensor], averages: InGraphReducer, in_use: object) -> None:
        """Note a forward whose graph averages as `averages` says; its outputs keep `in_use` alive."""
        self.forward_ran()
        averages.take_effect(True)  # unless its backward says otherwise
        self._reducer.telemetry.warned.add("local")  # what accumulates is an average, which the reducer does not know
        self._reducer.reduction.used_locally.clear()  # the graph brings all; one captured with others would differ
        since = self._reducer.num_nodes_before_forward
        self._reducer.hooks.on_backward(outputs, partial(self._reached, averages), in_use, since=since, of="graph")

    def _reached(self, averages: InGraphReducer) -> None:
        if torch.compiler.is_dynamo_compiling():
            if not self._captures_plain():
                break_graph(msg=messages.CAPTURED_WITH_MORE)  # and run as it is; an error with fullgraph=True
            self._num_forwards = 0
            return
        number, is_captured = current_backward(), in_compiled_backward()  # one that runs whole in a graph has -1
        if number != self._number or (number == -1 and self._num_forwards):
            self._number, self._is_plain = number, False
            accumulates = any(self._accumulated())
            if is_captured and not accumulates:  # a captured one after it would not ask again
                rank = self._reducer.reduction.rank
                raise self._reducer.reduction.error(messages.captured_without_gradients(rank))
            if accumulates:
                self._is_plain = self.is_plain()
                self._num_forwards = 0
                if not self._is_plain:
                    self._reducer.output_reached()
        averages.take_effect(self._is_plain)
        if is_captured and not self._is_plain:
            self._reducer.after_captured.append(partial(self._captured_is_over, averages))

    def _captured_is_over(self, averages: InGraphReducer) -> None:
        """Let the graph average again: a backward that is captured next may be plain, and asks nobody."""
        self._number = _OF_NO_BACKWARD
        averages.take_effect(True)

    def _accumulated(self) -> list[bool]:
        """Return which parameters get a gradient in this backward."""
        return brought_by_backward(self._reducer.reduction.graph.nodes, captured=True)

    def is_plain(self) -> bool:
        """Whether one graph computes all that this backward accumulates."""
        reducer = self._reducer
        return (
            self._num_forwards <= 1
            and reducer.reduction.iteration.progress is Progress.IDLE
            and all(self._accumulated())
            and all(
                member.parameter.grad is None
                and num_post_accumulate_hooks(member.parameter) == 1  # the reducer's
                and not has_tensor_hooks(member.parameter)
                for member in reducer.members
            )
        )


# -- in the place of torch's, for code that knows only torch's name ----------------------------------------------------

#: Names under which modules had our class before it was installed; None while it is not.
_own_names: set[tuple[str, str]] | None = None


def install() -> None:
    """Replace torch's class by ours wherever a module has it; calling it twice changes nothing.

    Objects that exist, and references elsewhere (a tuple of classes, a default argument), stay. `uninstall` undoes it.
    """
    global _own_names
    if _own_names is None:
        _own_names = {(module.__name__, name) for module, name in _names_of(DistributedDataParallel)}
    for module, name in _names_of(TORCH_DDP):
        setattr(module, name, DistributedDataParallel)


def uninstall() -> None:
    """Give torch's class its place back, also in modules imported since; names that our class had before keep it."""
    global _own_names
    if _own_names is None:
        return
    for module, name in _names_of(DistributedDataParallel):
        if (module.__name__, name) not in _own_names:
            setattr(module, name, TORCH_DDP)
    _own_names = None


def is_installed() -> bool:
    """Whether torch's name means our class now."""
    return _own_names is not None


def _names_of(wanted: type) -> Iterator[tuple[ModuleType, str]]:
    """Yield every module outside this package that has `wanted` among its names, with the name."""
    for full_name, module in list(sys.modules.items()):
        if full_name == "ddp_impl" or full_name.startswith("ddp_impl.") or not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if value is wanted:
                yield module, name
