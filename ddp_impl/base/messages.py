"""The reducer's error messages for gradients that arrive twice, late or never: rank, parameters, remedy.

Users and libraries search for some phrases of torch's messages; ours contain these where they report the same error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

_MAX_NAMES = 20


@dataclass(frozen=True, slots=True)
class FailureReport:
    """Why a rank raised in a step. `waited`: others are the cause. `unfinished`: gradients had arrived."""

    rank: int
    step: int
    reason: str
    waited: bool = False
    unfinished: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} {self.reason}"


def enumerate_names(names: Sequence[str], limit: int | None = _MAX_NAMES) -> str:
    """Return the names in a row, shortened to `limit`."""
    if limit is None or len(names) <= limit:
        return ", ".join(names)
    return f"{', '.join(names[:limit])} and {len(names) - limit} more"


def unfinished(
    rank: int,
    missing: Sequence[tuple[int, str]],
    num_parameters: int,
    *,
    unused_allowed: bool,
    static: bool,
    verbose: bool,
) -> str:
    """Return the message for gradients that the last backward did not bring; `missing` holds (index, name)."""
    limit = None if verbose else _MAX_NAMES
    names = enumerate_names([name for _, name in missing], limit)
    indices = enumerate_names([str(index) for index, _ in missing], limit).replace(",", "")
    begin = "Expected to have finished reduction in the prior iteration before starting a new one."
    if static:
        cause = (
            "This error indicates that your training graph has changed in this iteration: parameters that the first "
            "iteration used have got no gradient, which is not compatible with static_graph set to True. Leave "
            "static_graph out, or use the same parameters in every iteration."
        )
    elif unused_allowed:
        cause = "The backward began and did not come to its end."
    else:
        cause = (
            "If these parameters do not take part in every loss, allow for it by passing the keyword argument "
            "`find_unused_parameters=True` (or `static_graph=True` if the set never changes); if they should, make "
            "sure that all `forward` function outputs participate in calculating loss."
        )
    more = (
        ""
        if verbose
        else " For all names instead of the first few, set the environment variable TORCH_DISTRIBUTED_DEBUG to either "
        "INFO or DETAIL."
    )
    return (
        f"[rank {rank}] {begin} {len(missing)} of {num_parameters} parameters got no gradient in the last backward. "
        f"{cause}\nParameters which did not receive grad for rank {rank}: {names}\n"
        f"Parameter indices which did not receive grad for rank {rank}: {indices}.{more}"
    )


def reached_no_output(rank: int) -> str:
    """Return the message for a backward that brought every gradient by a way past what forward returned."""
    return (
        f"[rank {rank}] Expected to have finished reduction in the prior iteration before starting a new one. The last "
        "backward brought every parameter its gradient and reached no tensor that forward returned, so that with "
        "static_graph=True another backward of the iteration might follow: the gradients are not averaged. Return from "
        "forward the loss, or what it is computed from, or leave static_graph out."
    )


def aborted(rank: int) -> str:
    """Return the message for a last backward that ended halfway."""
    return (
        f"[rank {rank}] the previous backward ended before its gradients were reduced: it raised an exception, or its "
        "end did not reach the reducer. So the ranks no longer agree on what comes next. Expected to have finished "
        "reduction in the prior iteration before starting a new one. Wrap the module anew, or call "
        "_update_process_group, on every rank."
    )


def not_final(rank: int, name: str) -> str:
    """Return the message for whoever uses the gradient of the parameter called `name` before `finalize_backward`."""
    return (
        f"[rank {rank}] the gradient of '{name}' is not final: require_manual_backward_finalization is True. Call "
        "finalize_backward() on every rank before a step, a clip or a look at .grad"
    )


def not_finalized(rank: int) -> str:
    """Return the message for a forward or backward before `finalize_backward`."""
    return (
        f"[rank {rank}] Expected to have finalized the prior backward before starting a new one. With "
        "require_manual_backward_finalization, every rank calls finalize_backward() after each synchronised backward."
    )


def nothing_to_finalize(rank: int, *, by_hand: bool) -> str:
    """Return the message for a `finalize_backward` that no backward has left anything to; `by_hand`: it may."""
    cause = "it ran under no_sync, is final already, has not returned, or lacks gradients"
    cause = cause if by_hand else "require_manual_backward_finalization was False"
    return f"[rank {rank}] finalize_backward() has nothing to finalize; of the last backward: {cause}."


def manual_too_late(rank: int) -> str:
    """Return the message for a choice of who finalizes while a backward is expected or not final."""
    return (
        f"[rank {rank}] require_manual_backward_finalization can be set before forward or after finalize_backward(), "
        "on every rank, and not between them."
    )


def found_nothing_unused(rank: int) -> str:
    """Return the warning for a search for unused parameters that found none."""
    return (
        f"[rank {rank}] find_unused_parameters=True, and this backward used every parameter. The option costs a search "
        "of the graph and two exchanges in each iteration: leave it out, unless later ones, or other ranks, use fewer."
    )


def order(names: Sequence[str]) -> str:
    """Return how messages call the exchange of the order of gradients."""
    return f"rank 0's order of the gradients of {enumerate_names(names)}, and whether all ranks have one"


def another_wrapper(rank: int, mine: int, of_rank_0: int) -> str:
    """Return the message for a backward that rank 0 ran of another wrapper of the group; both are numbers from 0."""
    return (
        f"[rank {rank}] this rank has run the backward of the group's wrapper {mine} (in the order of their "
        f"construction, from 0) where rank 0 ran that of wrapper {of_rank_0}: each has averaged its gradients with "
        "those of the other. Run the backwards of all wrappers in the same order on every rank."
    )


def compiled_backward(rank: int) -> str:
    """Return the message for a backward that compiled autograd runs although the reducer must know when it is over."""
    return (
        f"[rank {rank}] the reducer averages the gradients of this forward and must know when the backward is over, "
        "but compiled autograd does not report its end. Run backward without it "
        "(torch._dynamo.config.compiled_autograd = False), or let the compiled backward average by itself: set "
        'torch._dynamo.config.optimize_ddp = "python_reducer" before the forward. The reducer itself can average if '
        "the backward is compiled without fullgraph=True, and the module wrapped without what needs the end: "
        "find_unused_parameters, static_graph, delay_all_reduce_named_params, a comm hook, an optimizer in the "
        "backward, or a parameter that another DistributedDataParallel has, too."
    )


def captured_without_gradients(rank: int) -> str:
    """Return the message for a backward that compiled autograd captured, and that accumulates nothing."""
    return (
        f"[rank {rank}] the graph of this forward averages gradients, and compiled autograd has captured a backward "
        "through it that accumulates none, such as torch.autograd.grad. Run that one without compiled autograd."
    )


CAPTURED_WITH_MORE = (
    "The graph of a forward averages its gradients, and this backward accumulates more than these: .grad holds "
    "something, a hook of the user's is on a parameter, or another forward takes part. The reducer averages them if "
    "backwards are compiled without fullgraph=True."
)
_REDUCER_AVERAGES = "so the reducer averages them from hooks, as without it, and graphs are cut where buckets end"

#: What a rank says once when averages cannot be part of graphs because there are several.
IN_GRAPH_NEEDS_THE_WHOLE = (
    "DistributedDataParallel: the compiled backward was asked to average gradients "
    "(torch._dynamo.config.optimize_ddp), but only parts of the wrapped module, or functions that it calls, are "
    f"compiled, {_REDUCER_AVERAGES}. Compile the module or the wrapper as a whole to have them averaged in the graph."
)
IN_GRAPH_BREAKS_ELSEWHERE = (
    "DistributedDataParallel: the compiled backward was asked to average gradients, but on another rank the forward is "
    f"not one graph, {_REDUCER_AVERAGES}. Look at its warning."
)
#: What is added to the error of a graph that breaks when all ranks have averaged in graphs before.
IN_GRAPH_NO_MORE = (
    "DistributedDataParallel averages gradients in the compiled backward: the ranks have agreed on that while every "
    "forward was one graph. Without changing the module: leave the reduction to the reducer "
    "(torch._dynamo.config.optimize_ddp = True)."
)


def in_graph_breaks(reason: str) -> str:
    """Return the warning for a forward that is not one graph although the compiled backward was to average."""
    return (
        "DistributedDataParallel: the compiled backward was asked to average gradients, but the forward is not one "
        f"graph ({reason}), {_REDUCER_AVERAGES}. Remove the graph break, which TORCH_LOGS=graph_breaks shows, or set "
        "torch._dynamo.config.optimize_ddp = True."
    )


def used_after_all(rank: int, name: str, *, static: bool) -> str:
    """Return the message for a gradient of a parameter that the reducer had taken for unused."""
    if static:
        return (
            f"[rank {rank}] Your training graph has changed in this iteration: parameter '{name}' got no gradient in "
            "the first iteration and has got one now. static_graph=True does not fit this model."
        )
    return (
        f"[rank {rank}] the reducer took parameter '{name}' for unused, because the outputs of forward do not depend "
        "on it, and has launched its bucket or left it out; now a gradient of it arrived. Use the parameter inside "
        "forward, return everything that depends on it from forward, and checkpoint with use_reentrant=False (a "
        "reentrant checkpoint hides its graph)."
    )


def gradient_of_unused(rank: int, name: str, iteration: int) -> str:
    """Return the warning for a gradient of a parameter that an iteration, over by now, has counted as unused."""
    return (
        f"[rank {rank}] parameter '{name}' counted as unused in iteration {iteration}, and a backward has brought it "
        "a gradient since. That is this rank's own until the next synchronised backward averages it, and is never "
        "averaged if it is zeroed before. Sum the losses of an iteration and call backward once, or return from "
        "forward what the other loss depends on."
    )


def went_past_the_wrapper(rank: int, name: str, iteration: int) -> str:
    """Return the warning for a gradient of a backward that passed no output of forward, after an iteration."""
    return (
        f"[rank {rank}] after iteration {iteration} parameter '{name}' received a gradient from a backward that passed "
        "no output of this DistributedDataParallel's forward. Each rank keeps its own gradient, unless the next "
        "synchronised backward finds it in .grad: the replicas drift apart. Call the wrapper, ddp(...), instead of "
        "ddp.module(...) or a method of the module. Where local gradients are meant, run the forward under "
        "ddp.no_sync()."
    )


def ready_twice(rank: int, name: str, iteration: int, *, static: bool) -> str:
    """Return the message for a gradient that arrived after the reducer had counted all of its parameter."""
    advice = (
        "Your training graph has changed in this iteration: static_graph=True does not fit this model."
        if static
        else "Reasons are: a parameter used outside of forward; one layer in several reentrant checkpoints "
        "(use_reentrant=False or static_graph=True helps); or several backwards that share parameters while other "
        "parameters wait for theirs (sum the losses and call backward once)."
    )
    return (
        f"[rank {rank}] parameter '{name}' was marked as ready twice: its gradient was already handed to the reduction "
        f"of iteration {iteration} when another one arrived. {advice}"
    )


#: The report of a rank that raises because another rank does.
FOLLOWS = "raised because another rank did"


def others_refuse(rank: int) -> str:
    """Return the message for averages that are not handed out because of another rank; its words follow."""
    return (
        f"[rank {rank}] the gradients of this backward were not averaged: on another rank a gradient came too late or "
        "twice, or buckets left in another order. Look at its error."
    )


def frozen_here(rank: int, name: str) -> str:
    """Return the message for a parameter that is frozen on this rank only, and keeps a gradient of before."""
    return (
        f"[rank {rank}] parameter '{name}' does not require a gradient any more on this rank, but another rank "
        "computed one. What was in .grad here is not part of the average. Freeze it on every rank, set its .grad to "
        "None where it is frozen, or pass find_unused_parameters=True."
    )


def others_refused_before(rank: int) -> str:
    """Return the message for a forward after averages that another rank has refused; its words follow."""
    return (
        f"[rank {rank}] what an earlier backward left in .grad is no average: on another rank a gradient came too late "
        "or twice. This rank used all parameters, so it did not wait for its device to hear of that. Look at the other "
        "rank's error, and go back to a checkpoint from before."
    )


def raised(error: BaseException | None, traceback: TracebackType | None, phase: str, step: int) -> str:
    """Return the report of a rank that raised: the exception, and where, as far as they are known."""
    name = "an exception" if error is None else type(error).__name__
    text = f": {error}" if error is not None and str(error) else ""
    return f"raised {name} in {phase} of step {step}{_place(traceback)}{text}"


def _place(traceback: TracebackType | None) -> str:
    if traceback is None:
        return ""
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    code = traceback.tb_frame.f_code
    return f" ({code.co_filename}:{traceback.tb_lineno}, in {code.co_name})"


#: The report of a rank whose last backward brought every gradient past the outputs of forward.
PASSED_BY = "its last backward reached no tensor that forward returned"


def lacks(names: Sequence[str], step: int) -> str:
    """Return the report of a rank that misses gradients."""
    return f"got no gradient in the backward of step {step} for: {enumerate_names(names)}"


def waited(error: BaseException, what: str, phase: str, step: int) -> str:
    """Return the report of a rank whose wait failed."""
    return f"waited in vain for {what} in {phase} of step {step}: {type(error).__name__}: {error}"


def waited_in_vain(rank: int, what: str, phase: str, step: int, reports: Sequence[FailureReport] | None) -> str:
    """Return what is added to the error of a wait that failed; `reports` of other ranks, None if nobody could ask."""
    begin = f"[rank {rank}] waited in vain for {what} in {phase} of step {step}."
    told = list(map(str, reports or ()))
    if not all(report.waited for report in reports or ()):
        return "\n".join([begin, *told])
    nobody = "No other rank has said why" if reports is not None else "The group's store does not answer"
    advice = (
        f"{nobody}. A rank that was killed or crashed says nothing: look at the exit codes and the last output of the "
        "other ranks. If all of them live, they are not in the same step: they had different numbers of batches "
        "(model.join() allows that), used different parameters, left out a backward, or one was slower than the "
        "group's timeout. Or they communicate in different orders: another wrapper of this group, or your own "
        "collectives in a hook or a layer, come first on some ranks and later on others."
    )
    return "\n".join([begin, *told, advice])


def waits_long(rank: int, what: str, phase: str, step: int, seconds: float) -> str:
    """Return what is logged of a wait that has not failed."""
    return f"[rank {rank}] has waited {seconds:.0f} s for {what} in {phase} of step {step}, and goes on waiting."


def others_wait(rank: int, waiting: Mapping[int, str], silent: Sequence[int]) -> str:
    """Return the log's line about the other ranks: what each waits for, and which are `silent`."""
    told = [f"rank {other} waits for {where}" for other, where in waiting.items()]
    if silent:
        names = ", ".join(map(str, silent))
        told.append(
            f"rank {names} has not come and does not say that it waits: it is slower, skipped a batch or a backward "
            "(model.join() allows different numbers of batches), or is in another collective of this group (that of "
            "another wrapper, or your own in a hook or a layer)"
        )
    return f"[rank {rank}] meanwhile " + "; ".join(told)


def place(rank: int, what: str, phase: str, step: int) -> str:
    """Return what is added to an error of a collective, and how messages speak of it."""
    return f"[rank {rank}] {what} in {phase} of step {step}"


def lost(rank: int, what: str, phase: str, step: int) -> str:
    """Return the message for whatever follows a collective that failed on this rank."""
    return (
        f"{place(rank, what, phase, step)} has failed, so the ranks no longer agree on what comes next, and what that "
        "step left in .grad, parameters and buffers may be this rank's own. Expected to have finished reduction in the "
        "prior iteration before starting a new one. Wrap the module anew, or call _update_process_group, on every rank."
    )


def broke_off_here(rank: int) -> str:
    """Return the message for a backward that raised on this rank and not on all others."""
    return (
        f"[rank {rank}] its backward raised on this rank and not on every other: those may wait for its buckets. Wrap "
        "the module anew, or call _update_process_group, on every rank."
    )


def lost_by_another(why: str) -> str:
    """Return the message for a wrapper that shares its group with one that failed; `why`: its error."""
    return (
        f"Another DistributedDataParallel of this process group cannot go on, and ranks may be out of step in it: {why}"
    )


def planned(rank: int, what: str, buckets: Sequence[tuple[int, Sequence[str]]], *, verbose: bool) -> str:
    """Return the log's line about buckets, given as (bytes, names); `verbose` leaves no name out."""
    lines = [f"[rank {rank}] DistributedDataParallel {what}; gradients are reduced in {len(buckets)} buckets:"]
    for index, (num_bytes, names) in enumerate(buckets):
        lines.append(f"  bucket {index}, {num_bytes} bytes: {enumerate_names(names, None if verbose else _MAX_NAMES)}")
    return "\n".join(lines)


def times(rank: int, iteration: int, averages_ns: Mapping[str, int]) -> str:
    """Return the log's line about averages of times over the iterations that were sampled so far."""
    told = ", ".join(f"{name}={duration}" for name, duration in averages_ns.items())
    return f"[rank {rank}] DistributedDataParallel after iteration {iteration}, in ns: {told}"


def bucket(index: int, num_buckets: int, names: Sequence[str]) -> str:
    """Return how messages call a bucket."""
    return f"bucket {index} of {num_buckets} ({enumerate_names(names)})"


def usage(names: Sequence[str]) -> str:
    """Return how messages call the exchange of which parameters ranks used."""
    return f"the other ranks' word on which parameters they used ({enumerate_names(names)})"
