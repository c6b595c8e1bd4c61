"""The modules of program `company`: layers with branches beside them that are used on demand."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 2
DEPTH = 3
#: Bytes of a layer and its branch: with this cap each pair is a bucket.
PAIR_BYTES = 2 * 4 * (WIDTH * WIDTH + WIDTH)

#: For each layer whether the branch beside it is used; None where the layer is not, either.
Uses = Sequence[bool | None]
#: What the user does with the rows behind layer k of a tower.
Within = Callable[[int, Tensor], Tensor]


class _Hidden(torch.autograd.Function):
    """A function of one's own: what lies behind it, no search through the graph finds out."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Sealed:
    """Rows that only a call hands out: no DDP looks for tensors behind what may be called."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def __call__(self) -> Tensor:
        """Return the rows."""
        return self._rows


class Tower(nn.Module):
    """DEPTH layers, each with a branch beside it."""

    def __init__(self, depth: int, shared: Mapping[str, nn.Module] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(depth)])
        self.branches = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(depth)])
        for place, module in (shared or {}).items():
            self.set_submodule(place, module)
        self.hides = False
        self.checkpoints = False
        self.seals = False

    def forward(self, rows: Tensor, uses: Uses, within: Within) -> Any:
        """Return rows of WIDTH; branch k is used if `uses[k]`, and `within` has the rows behind each layer.

        The rows are `Sealed` if the tower `seals` them.
        """
        for index, (layer, branch) in enumerate(zip(self.layers, self.branches, strict=True)):
            if uses[index] is None:
                rows = within(index, rows)
                continue
            one = partial(_run_pair, layer, branch if uses[index] else None)
            found: Any = checkpoint(one, rows, use_reentrant=False) if self.checkpoints else one(rows)
            rows = within(index, _Hidden.apply(found) if self.hides else found)
        return Sealed(rows) if self.seals else rows


def _run_pair(layer: nn.Module, branch: nn.Module | None, rows: Tensor) -> Any:
    output = layer(rows)
    return output if branch is None else output + branch(rows)


class Around(nn.Module):
    """A tower behind another one, which may be wrapped already."""

    def __init__(self, inner: nn.Module, tower: Tower) -> None:
        super().__init__()
        self.inner = inner
        self.tower = tower

    def forward(self, rows: Tensor, uses: Sequence[Uses], within: Within) -> Tensor:
        output: Tensor = self.tower(self.inner(rows, uses[0], within), uses[1], within)
        return output
