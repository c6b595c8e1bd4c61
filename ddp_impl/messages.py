"""What the reducer says when gradients come twice, late or never: which rank, which parameters, what to do.

Users and libraries search for some phrases of torch's messages; where ours speak of the same thing they contain them.
"""

from __future__ import annotations

from collections.abc import Sequence

_MAX_NAMES = 20


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
    """Say that gradients of the last backward are missing; `missing` holds (index, name)."""
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


def aborted(rank: int) -> str:
    """Say that an exception left the last backward halfway."""
    return (
        f"[rank {rank}] the previous backward raised an exception before its gradients were reduced, so the ranks no "
        "longer agree on what comes next. Expected to have finished reduction in the prior iteration before starting a "
        "new one. Wrap the module anew, or call _update_process_group, on every rank."
    )


def compiled_backward(rank: int) -> str:
    """Say that compiled autograd has taken a backward whose gradients the reducer was to average."""
    return (
        f"[rank {rank}] gradients of this forward are averaged by hooks that need to know when the backward is over, "
        "and compiled autograd does not tell. Run backward without it (torch._dynamo.config.compiled_autograd = "
        'False), or set torch._dynamo.config.optimize_ddp = "python_reducer" before the forward, so that the compiled '
        "backward averages by itself."
    )


def used_after_all(rank: int, name: str, *, static: bool) -> str:
    """Say that a parameter that was taken for unused got a gradient."""
    if static:
        return (
            f"[rank {rank}] Your training graph has changed in this iteration: parameter '{name}' got no gradient in "
            "the first iteration and has got one now. static_graph=True does not fit this model."
        )
    return (
        f"[rank {rank}] parameter '{name}' was taken for unused, because the outputs of forward do not lead to it, and "
        "yet a gradient arrived. Use the parameter inside forward, return everything that depends on it from forward, "
        "and checkpoint with use_reentrant=False (a reentrant checkpoint hides its graph)."
    )


def ready_twice(rank: int, name: str, iteration: int, *, static: bool) -> str:
    """Say that a gradient arrived after it had been handed to the reduction."""
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
