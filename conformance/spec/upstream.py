"""Which of our requirements ask for what upstream's shared tests of c10d backends do, and what its flags mean here."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

PATH = Path(__file__).with_suffix(".toml")

#: What upstream's tests ask of every backend, whatever its flags; here a backend declares it.
ASKED_OF_ALL = frozenset(
    {
        "all_gather_into_tensor", "all_to_all", "avg", "coalesced", "gather_scatter", "product", "reduce",
        "reduce_scatter", "send_recv",
    }
)  # fmt: skip
#: Flags of upstream's `BackendConfig`, and what to declare here where they are true. Nothing is
#: declared for what all are asked (dropped Works, WORK-13; what Works tell, WORK-22), and for what is not judged here.
FLAGS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "supports_bitwise_reductions": frozenset({"bitwise"}),
        "supports_coalescing": frozenset({"single_coalesced"}),
        "supports_gather_single": frozenset(),
        "supports_dropped_p2p_work": frozenset(),
        "supports_cuda_graph_barrier": frozenset(),
        "supports_collectives_timing": frozenset(),
        "supports_work_sequence_number": frozenset(),
    }
)
#: Fields that list dtypes; each of these is a capability of its own here, and those of 8 bits together are `float8`.
DTYPES = ("dtypes", "float8_dtypes", "complex_dtypes")
_DECLARED_DTYPES = frozenset({"float16", "bfloat16", "bool", "int8", "uint8", "int16", "complex64", "complex128"})


@dataclass(frozen=True, slots=True)
class UpstreamTest:
    """A test of upstream's, such as `test_c10d_p2p::test_send_recv`, and the requirements that ask for what it does.

    `flag` is the field of `BackendConfig` without which it, or a part of it, is skipped; `missing` is what no
    requirement asks for.
    """

    name: str
    requirements: tuple[str, ...]
    flag: str = ""
    missing: str = ""


@cache
def upstream_tests() -> tuple[UpstreamTest, ...]:
    """Return upstream's shared tests in the order of their files."""
    found = tomllib.loads(PATH.read_text(encoding="utf-8"))["test"]
    return tuple(UpstreamTest(**{**one, "requirements": tuple(one["requirements"])}) for one in found)


def declared_by(config: object) -> frozenset[str]:
    """Return the capabilities to declare of a backend for which upstream's tests have this `BackendConfig`.

    Any object with some of its fields will do; dtypes may be torch's or names. Upstream knows nothing of tags, any
    source, timeouts and the like: those are to be added by hand.
    """
    found = set(ASKED_OF_ALL)
    for flag, capabilities in FLAGS.items():
        if getattr(config, flag, False):
            found |= capabilities
    for field in DTYPES:
        for dtype in getattr(config, field, ()):
            name = str(dtype).removeprefix("torch.")
            found |= {"float8"} if name.startswith("float8") else {name} & _DECLARED_DTYPES
    return frozenset(found)
