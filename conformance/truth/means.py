"""What ranks bring to a mean and take from it, and the mean of a parameter's gradients: exact, or an error."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.errors import certain
from conformance.models.exact import exact_mean

#: The gradients that ranks take, by the names of their parameters; where a comm hook reduces, one rank's own gradients,
#: which show the layout.
Means = dict[str, Tensor]


@dataclass(frozen=True)
class Brought:
    """What a rank brings: its gradients, and what it has used since the last mean."""

    gradients: Mapping[str, Tensor]
    used: frozenset[str]


#: What a rank without data brings.
NOTHING = Brought({}, frozenset())


def mean_of(gradients: Sequence[Tensor], divisor: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return the sum of `gradients`, of at most `divisor` ranks, divided by `divisor`; ranks without one count as zero.

    Real gradients are rounded to `dtype` first, if it is given; the mean has the dtype of the gradients. It is sparse
    if all are, with the rows of any of them. Where one is not finite, the mean is not either. Raises `InexactError`
    where the sum depends on its order.
    """
    certain(len(gradients) <= divisor, f"gradients of {len(gradients)} ranks are divided by {divisor}")
    own = gradients[0].dtype
    wire = dtype if dtype is not None and own.is_floating_point else own
    dense = [(each.to_dense() if each.is_sparse else each).to(wire) for each in gradients]
    nothing = [torch.zeros_like(dense[0])] * (divisor - len(dense))
    mean = _mean([*dense, *nothing]).to(own)
    return sparse_like(mean, gradients) if all(each.is_sparse for each in gradients) else mean


def _mean(gradients: Sequence[Tensor]) -> Tensor:
    finite = torch.stack([each.isfinite() for each in gradients]).all(0)
    if bool(finite.all()):
        return exact_mean(gradients)
    exact = exact_mean([each.where(finite, torch.zeros_like(each)) for each in gradients])
    return exact.where(finite, sum(gradients[1:], start=gradients[0]) / len(gradients))


def sparse_like(mean: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    """Return `mean` at those rows that are present in any of the sparse `gradients`."""
    rows = torch.cat([gradient.coalesce().indices() for gradient in gradients], dim=1).unique(dim=1)
    return torch.sparse_coo_tensor(rows, mean[tuple(rows)], mean.shape, is_coalesced=True, check_invariants=True)
