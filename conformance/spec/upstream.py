"""Maps upstream's shared tests of c10d backends to our requirements, and their flags to our capabilities."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

PATH = Path(__file__).with_suffix(".toml")

#: The capabilities that upstream's tests require of every backend; here a backend declares them.
ASKED_OF_ALL = frozenset(
    {
        "all_gather_into_tensor", "all_to_all", "avg", "coalesced", "gather_scatter", "product", "reduce",
        "reduce_scatter", "send_recv",
    }
)  # fmt: skip
#: Flags of upstream's `BackendConfig` -> capabilities to declare. None for what is asked of every backend (dropped
#: Works, WORK-13; the status of Works, WORK-22), and for what is not judged here.
FLAGS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "supports_bitwise_reductions": frozenset({"bitwise"}),
        "supports_coalescing": frozenset({"single_coalesced"}),
        "supports_gather_single": frozenset({"gather_single"}),
        "supports_dropped_p2p_work": frozenset(),
        "supports_cuda_graph_barrier": frozenset(),
        "supports_collectives_timing": frozenset(),
        "supports_work_sequence_number": frozenset(),
    }
)
#: Fields that list dtypes; each dtype is a capability here, all of 8 bits together `float8`.
DTYPES = ("dtypes", "float8_dtypes", "complex_dtypes")
_DECLARED_DTYPES = frozenset({"float16", "bfloat16", "bool", "int8", "uint8", "int16", "complex64", "complex128"})


@dataclass(frozen=True, slots=True)
class UpstreamTest:
    """A test of upstream's, such as `test_c10d_p2p::test_send_recv`, and our requirements of the same behaviour.

    It, or a part of it, needs the `flag` of `BackendConfig`; no requirement covers `missing`.
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
    """Return the capabilities of a backend with upstream's `BackendConfig`, or any object with some of its fields.

    Dtypes may be torch's or names. Add capabilities that upstream lacks, such as tags and timeouts, by hand.
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
