"""`Composed`: the module of a training. All its values are small integers, so that every mean is exact."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from conformance.composed.training import Block, Training
from conformance.errors import instance
from conformance.models.integers import integers

WIDTH = 2
ROWS = 2
#: Weights are in -SPAN..SPAN, so that products of a few blocks are exact in float32.
SPAN = 2
#: The factor of losses: divisible by 3 four times, for means over 3 ranks of means; powers of 2 cost no bits.
UNIT = 3**4 * 2**8
#: The factor for float16, which has 11 bits.
SMALL_UNIT = 3**2
_NUM_TOKENS = 5


class DeliberateError(Exception):
    """Raised by the training's own code in an action `fail`."""


@dataclass(frozen=True, slots=True)
class Where:
    """The rank and the number of a forward; `behind` gets the rows after each block, `returned` the module's output."""

    rank: int
    forward: int
    behind: Callable[[int, Tensor], Tensor] = field(default=lambda index, rows: rows, repr=False)
    returned: Callable[[Any], None] = field(default=lambda output: None, repr=False)


@dataclass
class Named:
    """An output that is a dataclass."""

    rows: Tensor
    note: str = "rows"


@dataclass
class Unset:
    """Rows, and a field that nobody sets."""

    rows: Tensor
    later: Any = field(init=False)


@dataclass(slots=True)
class Slotted:
    """Rows in an object without a dictionary."""

    rows: Tensor


class Own(Tensor):
    """A class of tensors that results of operators have, too. It copies its parameters: torch makes none of them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = _own_parameter(self.detach().clone(), self.requires_grad)
        return cast(Tensor, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _own_parameter, (self.detach().as_subclass(Tensor), self.requires_grad)


def _own_parameter(values: Tensor, requires_grad: bool) -> nn.Parameter:
    return nn.Parameter(values.as_subclass(Own), requires_grad)


class Composed(nn.Module):
    """Runs its blocks one after the other. With output `unused_tail` it has a layer `tail` that no loss uses.

    It may share its `first` layer with another module.
    """

    def __init__(self, training: Training, seed: int, first: nn.Linear | None = None) -> None:
        super().__init__()
        self.output = training.output
        self.idle = training.idle
        self.order = training.order
        self.first = nn.Linear(WIDTH, WIDTH) if first is None else first
        self.blocks = nn.ModuleList(make_block(block, self.first) for block in training.blocks)
        if self.output == "unused_tail":
            self.tail = nn.Linear(WIDTH, WIDTH)
        self.fails = ""
        with_small_weights(self, "composed", seed)
        for module, block in zip(self.blocks, training.blocks, strict=True):
            if not block.trainable:
                module.requires_grad_(False)

    def forward(self, rows: Any, *, where: Where) -> Any:
        output = self._run(rows_of(rows), where)
        where.returned(output)
        return output

    def _run(self, rows: Tensor, where: Where) -> Any:
        if is_idle(self.idle, where) and not self.fails:
            return self._returned(rows, self.idle)
        hidden: Tensor = self.first(rows)
        middle = len(self.blocks) // 2
        for place, (index, block) in enumerate(self._in_order(where.rank)):
            hidden = where.behind(index, block(hidden, where))
            if place == middle and self.fails:
                hidden = self._failing(hidden)
        return self._returned(hidden)

    def _in_order(self, rank: int) -> list[tuple[int, nn.Module]]:
        blocks = list(enumerate(self.blocks))
        first = rank % len(blocks) if self.order == "own" else 0
        return blocks[first:] + blocks[:first]

    def _failing(self, hidden: Tensor) -> Tensor:
        if self.fails == "forward":
            raise DeliberateError("in forward")
        if not hidden.requires_grad:  # after frozen layers, perhaps of some ranks: every rank's backward must fail
            hidden = hidden.detach().requires_grad_()
        # Not on the output, where a hook that raises would hide the backward from a DDP.
        hidden.register_hook(_raise)
        return hidden * 1

    def _returned(self, hidden: Tensor, idle: str = "") -> Any:
        match self.output:
            case "tuple":
                return hidden, hidden * 2
            case "dict":
                return {"rows": hidden, "nested": [hidden * 2, None]}
            case "dataclass":
                return Named(hidden)
            case "unset":
                return Unset(hidden)
            case "slots":
                return Slotted(hidden)
            case "itself":
                output: list[Any] = [hidden]
                output.append(output)
                return output
            case "unused_tail":
                return hidden, hidden if idle else self.tail(as_read_by(self.tail, hidden))
            case "parameter":
                return hidden, hidden[0] if idle else self.first.bias
        return hidden


def _raise(_: Tensor) -> None:
    raise DeliberateError("in backward")


def rows_of(output: Any) -> Tensor:
    """Return the rows in an output, for the loss."""
    if isinstance(output, Named | Unset | Slotted):
        output = output.rows
    elif isinstance(output, dict):
        output = output["rows"] + output["nested"][0]
    elif isinstance(output, tuple) and output[1].dim() == 1:
        output = output[0] + output[1]
    elif isinstance(output, Sequence):
        output = output[0]
    return instance(output, Tensor)


class Running(nn.Module):
    """Runs `layer` on the ranks and in the forwards of `block.when`, under the checkpoint that it names."""

    def __init__(self, block: Block, layer: nn.Module) -> None:
        super().__init__()
        self._block = block
        self.layer = layer

    def forward(self, hidden: Tensor, where: Where) -> Tensor:
        if not runs(self._block.when, where):
            return hidden
        if not self._block.checkpoint:
            return self.layer(hidden, where)
        return checkpoint(self.layer, hidden, where, use_reentrant=self._block.checkpoint == "reentrant")


def is_idle(idle: str, where: Where) -> bool:
    """Whether a forward uses no parameter, in a training with this `idle`."""
    if idle == "rank_0":
        return where.rank == 0 and where.forward % 2 == 0
    return idle == "by_turns" and (where.rank + where.forward) % 2 == 0


def runs(when: str, where: Where) -> bool:
    """Whether a block with this `when` runs in a forward."""
    match when:
        case "rank_0":
            return where.rank == 0
        case "not_rank_0":
            return where.rank != 0
        case "even_forwards":
            return where.forward % 2 == 0
        case "not_first":
            return where.forward > 0
        case "rank_0_later":
            return where.forward == 0 or where.rank == 0
        case "never":
            return False
    return True


def make_block(block: Block, first: nn.Linear) -> nn.Module:
    """Return the module of `block`; a shared one runs `first`, the module's first layer, again."""
    return Running(block, Again(first) if block.kind == "shared" else _LAYERS[block.kind]())


def as_read_by(layer: Any, rows: Tensor) -> Tensor:
    """Return `rows` in the dtype of the layer's weight, from which mixed precision or a buffer may differ."""
    return rows if torch.is_autocast_enabled(rows.device.type) else rows.to(layer.weight.dtype)


class Again(nn.Module):
    """Runs a layer that is used elsewhere, too."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, where: Where) -> Tensor:
        return self.layer(as_read_by(self.layer, hidden))


class Affine(nn.Module):
    """A linear layer in the dtype `dtype`, between casts."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(WIDTH, dtype=dtype))

    def forward(self, hidden: Tensor, where: Where) -> Tensor:
        result = hidden.to(self.weight.dtype) @ self.weight + self.bias
        return (result.real if result.is_complex() else result).to(hidden.dtype)


class Transposed(Affine):
    """A linear layer whose weight is stored column by column."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH).t())


class Subclass(Affine):
    """A linear layer whose weight is of a class of its own; its rows are plain tensors again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH).as_subclass(Own))

    def forward(self, hidden: Tensor, where: Where) -> Tensor:
        """Return the rows after weight and bias."""
        return super().forward(hidden, where).as_subclass(Tensor)


class Branch(nn.Module):
    """Two layers, of which ranks and forwards take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.choices = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, hidden: Tensor, where: Where) -> Tensor:
        layer = self.choices[(where.rank + where.forward) % 2]
        return layer(as_read_by(layer, hidden))


class Counted(nn.Module):
    """A layer with a buffer that sums its inputs in training mode, different on every rank."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.shift = nn.Parameter(torch.empty(WIDTH))

    def forward(self, hidden: Tensor, where: Where) -> Tensor:
        if self.training:
            self.seen.add_(hidden.detach().sum(0).remainder(7))
        return hidden * (self.seen.remainder(2) + 1) + self.shift


class Composite(Counted):
    """The same with a buffer that is made of two tensors."""

    seen: Any

    def __init__(self) -> None:
        super().__init__()
        self.seen = TwoTensor(torch.zeros(WIDTH), torch.zeros(WIDTH))

    def forward(self, hidden: Tensor, where: Where) -> Tensor:
        """Count in both; the rows depend on both."""
        if self.training:
            for part in (self.seen.a, self.seen.b):
                part.add_(hidden.detach().sum(0).remainder(7))
        return hidden * ((self.seen.a + self.seen.b).remainder(2) + 1) + self.shift


class Sparse(nn.Module):
    """Adds the rows of an embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(_NUM_TOKENS, WIDTH, sparse=True)

    def forward(self, hidden: Tensor, where: Where) -> Tensor:
        first = where.rank + 2 * where.forward
        tokens = torch.tensor([first % _NUM_TOKENS, (first + 1) % _NUM_TOKENS], device=hidden.device)
        return hidden + self.table(tokens)


class Gain(nn.Module):
    """Multiplies by a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(()))

    def forward(self, hidden: Tensor, where: Where) -> Tensor:
        return hidden * self.gain


class Empty(nn.Module):
    """Has a parameter without elements beside a usual one."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))
        self.shift = nn.Parameter(torch.empty(WIDTH))

    def forward(self, hidden: Tensor, where: Where) -> Tensor:
        return hidden + self.shift + self.nothing.sum()


class Half(nn.Module):
    """Shifts by a parameter in float16, whose gradients are small, because float16 has no room for others."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.empty(WIDTH, dtype=torch.float16))

    def forward(self, hidden: Tensor, where: Where) -> Tensor:
        shift = self.shift.to(hidden.dtype, copy=True)  # a hook on the parameter itself would accumulate
        if shift.requires_grad:
            shift.register_hook(_small)
        return hidden + shift


def _small(gradient: Tensor) -> Tensor:
    return gradient.sign() * SMALL_UNIT


_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": Affine,
    "branch": Branch,
    "counted": Counted,
    "sparse": Sparse,
    "float64": lambda: Affine(torch.float64),
    "complex": lambda: Affine(torch.complex64),
    "transposed": Transposed,
    "gain": Gain,
    "empty": Empty,
    "float16": Half,
    "subclass": Subclass,
    "composite": Composite,
}


def with_small_weights(module: nn.Module, *key: object) -> nn.Module:
    """Fill all parameters of `module` with -2, -1, 1, 2, the same for the same `key`."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            values = integers(*parameter.shape, key=("composed", name, *key), largest=SPAN, dtype=parameter.dtype)
            parameter.copy_(values)
    return module


def step_by_whole_numbers(parameters: Iterable[nn.Parameter]) -> None:
    """Change every weight by its gradient within -SPAN..SPAN: an exact optimizer."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is None:
                continue
            gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            values = parameter.detach()
            if values.is_complex():
                values, gradient = torch.view_as_real(values), torch.view_as_real(gradient.resolve_conj())
            moved = values + SPAN + gradient.nan_to_num(0, 0, 0).remainder(2 * SPAN + 1)
            values.copy_(moved.remainder(2 * SPAN + 1) - SPAN)
