"""`Cell`: one operation in one set of circumstances."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from conformance.programs.operations.data import COMPLEX, FLOAT8, FLOATS
from conformance.programs.operations.description import CALLED, OPERATIONS, Operation, Place, lengths
from conformance.programs.operations.memory import OF_LISTS, WHOLE, WITH_OUTPUTS, shaped

#: The reductions; PREMUL_SUM multiplies by a factor first.
REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MAX", "MIN", "BAND", "BOR", "BXOR", "PREMUL_SUM")
#: By what; each factor is exact in sums of the data, and no AVG.
FACTORS = ("4", "0.5", "-3", "tensor of -3")
BITWISE = ("BAND", "BOR", "BXOR")
#: Shapes: a vector or what the layout asks for, no dimension, two, eight; stacked: several ranks' parts in a new one;
#: one-empty: of the tensors of a coalesced call one has no elements.
FORMS = ("flat", "scalar", "plane", "deep", "stacked", "one-empty")
#: Who is called: torch's function, a method of the group or the backend, the functional collective, torch's function
#: in another thread, the debug wrapper, a compiled graph of the functional one, autograd, in a backward, and what torch
#: puts in the place of its function in a graph: a functional collective whose result is copied into the output.
PATHS = ("public", "group", "backend", "functional", "other-thread", "detail", "compiled", "backward", "remapped")
_RETURN_NEW = ("functional", "compiled", "backward")
#: How the caller uses the Work: see `lifetimes`.
LIFETIMES = (
    "sync", "wait", "wait-late", "wait-twice", "wait-timeout", "polled", "future", "future-polled", "value", "result",
    "then", "then-late", "dropped", "inputs-dropped", "thread",
)  # fmt: skip
#: Which ranks communicate: see `groups`.
GROUPS = ("world", "permuted", "without-0", "alone", "twin", "ends")
#: What else is in flight: nothing, or all_reduces of a second group, of the same group, or of another thread; alike:
#: the same operation with other data and from another root, in a second group; alike-in-flight: in the same group;
#: alike-thread: in a second group, by another thread.
NEIGHBOURS = ("none", "busy-group", "in-flight", "thread", "alike", "alike-in-flight", "alike-thread")
#: The data; operations that only copy may pass any bits. These reductions are also given subnormal numbers, or
#: infinities, NaNs and the greatest numbers, or numbers whose result is rounded.
DATA = ("numbers", "bits")
_REDUCED = {
    "subnormals": ("SUM", "MAX", "MIN"), "extremes": ("SUM", "AVG", "PRODUCT", "MAX", "MIN"),
    "roundings": ("SUM", "AVG", "PRODUCT"),
}  # fmt: skip
#: How many tensors of a call `describe` lists by their sizes.
_MOST_SIZES = 4

_OF_REDUCTIONS = {"PRODUCT": "product", "AVG": "avg", "PREMUL_SUM": "premul_sum", **dict.fromkeys(BITWISE, "bitwise")}
_OF_DTYPES = {
    **{name: name for name in ("float16", "bfloat16", "bool", "int8", "uint8", "int16", *COMPLEX)},
    **dict.fromkeys(FLOAT8, "float8"),
}
#: The reductions that complex dtypes lack.
_OF_REALS = ("MAX", "MIN", "PRODUCT", *BITWISE)


@dataclass(frozen=True, slots=True)
class Cell:
    """One operation with a value on each axis; `numel` elements are in one block, `turns` are rounds with new data.

    `peer` late: a rank of the group calls late. With `strict`, a reduce must not change the tensors of other ranks than
    the root. A coalesced operation has `tensors` tensors. A neighbour alike is the operation `beside`, or the same one.
    `kind`: see `kinds`. With `reuses` all rounds use the tensors of the first. `factor` is that of
    PREMUL_SUM.
    """

    operation: str
    dtype: str = "float32"
    op: str = ""
    numel: int = 7
    form: str = "flat"
    reads: str = "contiguous"
    writes: str = "contiguous"
    in_place: bool = False
    root: int = 0
    group: str = "world"
    path: str = "public"
    lifetime: str = "sync"
    neighbour: str = "none"
    data: str = "numbers"
    turns: int = 1
    peer: str = ""
    strict: bool = False
    tensors: int = 3
    beside: str = ""
    kind: str = ""
    reuses: bool = False
    factor: str = FACTORS[0]

    @property
    def multiplier(self) -> float:
        """The factor of PREMUL_SUM, a number or a tensor of one element."""
        return float(self.factor.rpartition(" ")[2])

    @property
    def what(self) -> Operation:
        """The description of its operation."""
        return CALLED[self.operation]

    @property
    def reduction(self) -> str:
        """The reduction; empty for an operation that only copies."""
        return (self.op or "SUM") if self.what.reduces else ""

    @property
    def returns_new(self) -> bool:
        """Whether the results are new tensors."""
        return self.path in _RETURN_NEW

    @property
    def block_shape(self) -> tuple[int, ...]:
        """The shape of one block."""
        layout = next((one for one in (self.reads, self.writes) if shaped(self.numel, one) != (self.numel,)), "")
        if self.form == "scalar":
            return ()
        if self.form == "plane" or (self.form == "flat" and layout):
            return shaped(self.numel, layout or "transposed")
        if self.form == "deep":
            return (self.numel, 1, 2, 1, 1, 2, 1, 1)
        return (self.numel,)

    @property
    def needs(self) -> frozenset[str]:
        """The capabilities that a backend needs for this."""
        names = {self.what.needs, _OF_REDUCTIONS.get(self.reduction, ""), _OF_DTYPES.get(self.dtype, "")}
        if self.beside:
            names.add(CALLED[self.beside].needs)
        if self.in_place and not self.what.in_place:
            names.add("in_place")
        if self.neighbour.endswith("thread"):
            names.add("unordered_groups")
        return frozenset(names) - {""}

    @property
    def is_possible(self) -> bool:
        """Whether the values on the axes are compatible."""
        what, reduction = self.what, self.reduction
        if what.holds:
            return self.path in ("public", "group") and self.lifetime != "inputs-dropped"
        if self.dtype in COMPLEX and reduction in _OF_REALS:
            return False
        if reduction in BITWISE and self.dtype in (*FLOATS, *FLOAT8, *COMPLEX):
            return False
        if reduction == "AVG" and self.dtype not in (*FLOATS, *COMPLEX):
            return False
        if self.factor != FACTORS[0] and reduction != "PREMUL_SUM":
            return False
        if reduction == "PREMUL_SUM" and self.dtype not in FLOATS:
            return False
        if reduction and (self.dtype in FLOAT8 or self.data == "bits"):
            return False
        if self.data in _REDUCED and (reduction not in _REDUCED[self.data] or self.dtype not in FLOATS):
            return False
        if self.reads == "expanded" and (what.in_place or what.single or what.of_pairs or self.form == "scalar"):
            return False
        if "expanded" in self.writes or (what.in_place and self.reads != self.writes):
            return False
        if any(
            layout in OF_LISTS and len(tensors(Place(0, 2))) < 2
            for layout, tensors in ((self.reads, what.inputs), (self.writes, what.outputs))
        ):
            return False
        if self.reads == WITH_OUTPUTS and (what.in_place or self.writes != "contiguous"):
            return False
        if self.form != "flat" and {self.reads, self.writes} != {"contiguous"}:
            return False
        if self.in_place and (what.in_place or what.of_pairs or what.needs == "all_to_all"):
            return False
        if self.in_place and (self.reads != "contiguous" or self.writes != "contiguous"):
            return False
        if self.form == "one-empty" and not what.coalesced:
            return False
        if self.reuses and (self.operation == "all_to_all_uneven" or self.returns_new or self.in_place):
            return False  # the first has other lengths in every round
        if self.kind and (self.dtype not in FLOATS or self.path not in ("public", "group")):
            return False
        if self.form == "scalar" and what.single and what.name != "all_gather_single":
            return False  # a tensor of several ranks' parts has a dimension
        if self.form == "stacked" and (
            what.name not in ("all_gather_single", "reduce_scatter_single") or self.in_place
        ):
            return False
        if self.path == "backward" and (what.name not in OF_BACKWARDS or self.op not in ("", "SUM")):
            return False
        if self.returns_new or self.path == "remapped":
            return (
                what.name in (FUNCTIONAL if self.returns_new else REMAPPED)
                and self.lifetime in ("sync", "inputs-dropped") and not self.in_place
                and self.neighbour == "none" and reduction != "PREMUL_SUM" and self.writes == "contiguous"
                and (self.dtype not in COMPLEX or self.path == "functional") and self.form != "stacked"
                and not (what.single and self.form == "scalar")
            )  # fmt: skip
        if self.path in ("backend", "detail") and what.name in OF_GROUPS:
            return False
        if self.path == "detail" and self.neighbour.startswith("alike"):
            return False
        return not (self.group == "alone" and what.of_pairs)

    def describe(self) -> str:
        """Return e.g. `all_reduce BOR of uint8, 7 elements, transposed, group without-0, asynchronous and dropped`."""
        parts = [self.operation]
        if not self.what.holds:
            parts = [f"{self.operation}{f' {self.reduction}' if self.reduction else ''} of {self.dtype}", self._size()]
        if self.factor != FACTORS[0]:
            parts.append(f"factor {self.factor}")
        if self.form in ("plane", "deep"):
            parts.append(f"shape {'x'.join(map(str, self.block_shape))}")
        if self.form == "stacked":
            parts.append("ranks stacked in a new dimension")
        if self.form == "one-empty":
            parts.append("one of the tensors empty")
        if self.reads != "contiguous":
            parts.append(f"{self.reads} tensor" if self.what.in_place else f"{self.reads} input")
        if self.writes != "contiguous" and not self.what.in_place:
            parts.append(f"{self.writes} output")
        if self.what.rooted:
            parts.append(f"root {self.root}")
        for name, default in (
            ("group", "world"), ("path", "public"), ("lifetime", "sync"), ("neighbour", "none"), ("data", "numbers"),
        ):  # fmt: skip
            if (value := getattr(self, name)) != default:
                parts.append(f"{name} {value}")
        if self.beside:
            parts.append(f"beside {self.beside}")
        if self.in_place:
            parts.append("in place")
        if self.kind:
            parts.append(self.kind)
        if self.strict:
            parts.append("all ranks judged")
        if self.peer:
            parts.append(f"a rank {self.peer}")
        if self.turns > 1:
            parts.append(f"{self.turns} rounds{' in the same tensors' * self.reuses}")
        return ", ".join(parts)

    def _size(self) -> str:
        """Return how many elements a tensor has, or the part of each rank in it, and the tensors of one call."""
        if self.form == "scalar":
            return "no dimension"
        numbers = [self.numel]
        if self.what.coalesced:
            numbers = [self.numel * length for length in lengths(self.tensors, has_empty=self.form == "one-empty")]
        shown = ", ".join(map(str, numbers[:_MOST_SIZES]))
        count = f"{len(numbers)} tensors of " if self.what.coalesced else ""
        more = ", ..." if len(numbers) > _MOST_SIZES else ""
        times = "0, 1 or 2 times " if self.operation == "all_to_all_uneven" else ""
        rank = " for each rank" if self.what.single else ""
        return f"{count}{times}{shown}{more} element{'s' * (numbers != [1])}{rank}"

    def to_json(self) -> dict[str, Any]:
        """Return the values that are not the default."""
        return {name: value for name, value in asdict(self).items() if name == "operation" or value != _DEFAULTS[name]}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Cell:
        """Return the cell of plain JSON data."""
        return Cell(**data)


#: The operations that torch has as functional collectives.
FUNCTIONAL = (
    "all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single", "all_to_all_single", "all_to_all_uneven",
    "all_reduce_coalesced", "all_gather_single_coalesced", "reduce_scatter_single_coalesced",
)  # fmt: skip
#: The operations whose functions torch replaces in a graph.
REMAPPED = (
    "all_reduce", "all_gather", "all_gather_single", "reduce_scatter", "reduce_scatter_single", "all_to_all_single",
    "all_to_all_uneven",
)  # fmt: skip
#: The operations that autograd calls in the backward of a functional collective.
OF_BACKWARDS = ("all_reduce", "all_gather_single", "reduce_scatter_single", "all_to_all_single", "all_to_all_uneven")
#: The methods that a process group has, and a backend has by an old name only, or lacks.
OF_GROUPS = ("all_gather_single_coalesced", "reduce_scatter_single_coalesced")
_DEFAULTS = {field.name: field.default for field in fields(Cell)}
#: What each axis may be, for the coverage of pairs.
AXES: Mapping[str, tuple[Any, ...]] = {
    "operation": tuple(OPERATIONS),
    "dtype": (*FLOATS, "int64", "int32", "int8", "uint8", "bool", *COMPLEX),
    "op": REDUCTIONS[:-1],
    "numel": (257, 0, 1, 2, 31, 40_009),
    "form": ("flat", "plane", "deep", "one-empty"),
    "reads": ("contiguous", "offset-1", WHOLE),
    "writes": ("contiguous", "offset-1", WHOLE),
    "in_place": (False, True),
    "root": (0, 1, 2),
    "group": GROUPS,
    "path": PATHS[:5],
    "lifetime": tuple(one for one in LIFETIMES if one not in ("future", "wait-late")),  # others do more than these
    "neighbour": NEIGHBOURS,
    "peer": ("", "late"),
}


def distinct(cells: Iterable[Cell]) -> tuple[Cell, ...]:
    """Return the possible ones of `cells`, each description once."""
    return tuple({cell.describe(): cell for cell in cells if cell.is_possible}.values())
