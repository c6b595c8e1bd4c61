"""Describes each operation: the tensors that a rank passes and gets, their content, and the capability it needs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from types import MappingProxyType

from conformance.programs.operations.data import ALL


@dataclass(frozen=True, slots=True)
class Place:
    """A rank in a group, the group's size, and the root's rank in it.

    One call of a coalesced operation has `tensors` tensors, one of them empty if it `has_empty`. Data and uneven splits
    depend on the round, `turn`.
    """

    rank: int
    size: int
    root: int = 0
    tensors: int = 3
    has_empty: bool = False
    turn: int = 0

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root."""
        return self.rank == self.root


@dataclass(frozen=True, slots=True)
class Block:
    """The data of rank `source` for rank `target`, or for `ALL` ranks; `length` times the cell's size.

    `source` may be `SUMMED`, the reduction of every rank's data for `target`, or `UNTOUCHED`, the content before.
    """

    source: int
    target: int = ALL
    length: int = 1


SUMMED = -2
UNTOUCHED = -3

#: A tensor: its blocks, one after the other along the first dimension.
Blocks = tuple[Block, ...]


@dataclass(frozen=True)
class Operation:
    """One operation. `inputs` and `outputs` return by place the tensors that a rank passes and must get.

    `in_place`: the inputs are the outputs, and a rank without an input passes an output. `single`: a tensor holds
    several ranks' blocks. `of_pairs`: a message, which is not in the order of collectives. `holds`: it returns when
    every rank has called. `needs` is the capability that a backend may lack; empty: every backend has the operation.
    """

    name: str
    inputs: Callable[[Place], tuple[Blocks, ...]]
    outputs: Callable[[Place], tuple[Blocks, ...]]
    needs: str = ""
    reduces: bool = False
    rooted: bool = False
    in_place: bool = False
    single: bool = False
    of_pairs: bool = False
    coalesced: bool = False
    holds: bool = False

    def needs_rank(self, place: Place, rank: int) -> bool:
        """Whether the rank at `place` cannot finish before `rank` calls, because it gets data of `rank`."""
        if self.holds:
            return True
        blocks = [block for blocks in self.outputs(place) for block in blocks]
        return any(block.length > 0 and block.source in (SUMMED, rank) for block in blocks)

    def root_needing(self, rank: int) -> int:
        """Return a root with which some rank needs `rank`: `rank` itself if the root sends, else 0."""
        return rank if self.rooted and self.needs_rank(Place(0, 2, root=1), 1) else 0


#: Returns a rank's tensors.
_Tensors = Callable[[Place], tuple[Blocks, ...]]


def uneven(source: int, target: int, turn: int) -> int:
    """Return the uneven split, in the cell's size, that `source` sends to `target`; some are zero."""
    return (2 * source + target + turn) % 3


def _one(block: Callable[[Place], Block]) -> _Tensors:
    return lambda place: ((block(place),),)


def _each(block: Callable[[Place, int], Block]) -> _Tensors:
    return lambda place: tuple((block(place, other),) for other in range(place.size))


def _pair(block: Callable[[Place], Block]) -> _Tensors:
    return lambda place: ((block(place),),) if place.size > 1 else ()


def _joined(parts: _Tensors) -> _Tensors:
    return lambda place: (tuple(block for part in parts(place) for block in part),)


def _at_root(parts: _Tensors, others: _Tensors = lambda place: ()) -> _Tensors:
    return lambda place: parts(place) if place.is_root else others(place)


def _several(parts: _Tensors) -> _Tensors:
    """Return several tensors instead of one, of different lengths."""

    def lengthened(place: Place) -> tuple[Blocks, ...]:
        (blocks,) = parts(place)
        return tuple(
            tuple(Block(block.source, block.target, length) for block in blocks)
            for length in lengths(place.tensors, has_empty=place.has_empty)
        )

    return lengthened


def lengths(tensors: int, *, has_empty: bool = False) -> tuple[int, ...]:
    """Return the lengths, in the cell's size, of the tensors in one call."""
    return tuple(islice(cycle((1, 0, 3, 2) if has_empty else (1, 3, 2)), tensors))


_mine = _one(lambda place: Block(place.rank))
_for_each = _each(lambda place, target: Block(place.rank, target))
_from_each = _each(lambda _, source: Block(source))
_for_me_from_each = _each(lambda place, source: Block(source, place.rank))
_summed = _one(lambda _: Block(SUMMED))
_summed_for_me = _one(lambda place: Block(SUMMED, place.rank))
_uneven_sent = _each(lambda place, target: Block(place.rank, target, uneven(place.rank, target, place.turn)))
_uneven_received = _each(lambda place, source: Block(source, place.rank, uneven(source, place.rank, place.turn)))
_to_next = _pair(lambda place: Block(place.rank, (place.rank + 1) % place.size))
_from_previous = _pair(lambda place: Block((place.rank - 1) % place.size, place.rank))

_ALL = (
    Operation("all_reduce", _mine, _summed, reduces=True, in_place=True),
    Operation("broadcast", _at_root(_mine), _one(lambda place: Block(place.root)), rooted=True, in_place=True),
    Operation(
        "reduce", _mine, _at_root(_summed, _one(lambda _: Block(UNTOUCHED))), "reduce", reduces=True, rooted=True,
        in_place=True,
    ),
    Operation("all_gather", _mine, _from_each),
    Operation("all_gather_single", _mine, _joined(_from_each), "all_gather_into_tensor", single=True),
    Operation("reduce_scatter", _for_each, _summed_for_me, "reduce_scatter", reduces=True),
    Operation(
        "reduce_scatter_single", _joined(_for_each), _summed_for_me, "reduce_scatter", reduces=True, single=True
    ),
    Operation("gather", _mine, _at_root(_from_each), "gather_scatter", rooted=True),
    Operation(
        "scatter", _at_root(_for_each), _one(lambda place: Block(place.root, place.rank)), "gather_scatter",
        rooted=True,
    ),
    Operation("all_to_all", _for_each, _for_me_from_each, "all_to_all"),
    Operation("all_to_all_single", _joined(_for_each), _joined(_for_me_from_each), "all_to_all", single=True),
    Operation("all_to_all_uneven", _joined(_uneven_sent), _joined(_uneven_received), "all_to_all", single=True),
    Operation("send_recv", _to_next, _from_previous, "send_recv", of_pairs=True),
    Operation(
        "all_reduce_coalesced", _several(_mine), _several(_summed), "coalesced", reduces=True, in_place=True,
        coalesced=True,
    ),
    Operation(
        "all_gather_single_coalesced", _several(_mine), _several(_joined(_from_each)), "single_coalesced",
        single=True, coalesced=True,
    ),
    Operation(
        "reduce_scatter_single_coalesced", _several(_joined(_for_each)), _several(_summed_for_me),
        "single_coalesced", reduces=True, single=True, coalesced=True,
    ),
)  # fmt: skip

_BARRIER = Operation("barrier", lambda _: (), lambda _: (), holds=True)
_GATHER_SINGLE = Operation(
    "gather_single", _mine, _at_root(_joined(_from_each)), "gather_single", rooted=True, single=True
)

#: Every operation on tensors by its name, that of torch's public function if there is one; `CALLED` has barrier, too,
#: and what not every supported torch has.
OPERATIONS: Mapping[str, Operation] = MappingProxyType({operation.name: operation for operation in _ALL})
REDUCING = tuple(name for name, operation in OPERATIONS.items() if operation.reduces)
COPYING = tuple(name for name in OPERATIONS if name not in REDUCING)
CALLED: Mapping[str, Operation] = MappingProxyType(
    {**OPERATIONS, **{one.name: one for one in (_BARRIER, _GATHER_SINGLE)}}
)
