"""Shows that a change moves no truth: a SHA-256 of every expected fact of every scenario, stored and compared.

    python ci/truth_digests.py write FILE [TEXT]     # on the commit before
    python ci/truth_digests.py compare FILE [TEXT]   # on the commit after; lists what differs, and exits with 1

TEXT selects scenarios whose id contains it. No rank is needed. A tensor counts with dtype, shape, layout and bytes, a
matcher with what it matches and its text, so that code may move and be renamed.
"""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conformance.programs.registry import get_program
from conformance.scenario import Scenario
from conformance.suite import load_scenarios
from conformance.truth.expected import AnyOf, Close, Matcher


def parts(value: Any) -> Iterator[bytes]:
    """Yield what tells `value`, an expected fact, from every other."""
    yield type(value).__name__.encode()
    if isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)} {value.layout}".encode()
        if value.is_sparse:
            coalesced = value.coalesce()
            yield from parts(coalesced.indices())
            yield from parts(coalesced.values())
        elif value.numel():
            yield value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, AnyOf):
        yield from parts(list(value.choices))
    elif isinstance(value, Close):
        yield from parts([value.value, value.rtol, value.atol])
    elif isinstance(value, Matcher):
        yield str(value).encode()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield repr(key).encode()
            yield from parts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from parts(item)
    else:
        yield repr(value).encode()


def digest(value: Any) -> str:
    """Return the SHA-256 of `value`; each part counts with its length."""
    sha = hashlib.sha256()
    for part in parts(value):
        sha.update(len(part).to_bytes(8, "big") + part)
    return sha.hexdigest()


def digests_of(scenario: Scenario) -> Iterator[tuple[str, str]]:
    """Yield the name of every expected fact of a scenario, with its scenario and rank, and the fact's digest."""
    expectation = get_program(scenario.program).expectation
    if expectation is None:
        return
    try:
        expected = expectation(scenario)
    except Exception as error:  # a run says HARNESS_ERROR
        yield f"{scenario.id} raised", digest(repr(error))
        return
    for rank, facts in expected.items():
        for name, value in facts.items():
            yield f"{scenario.id} {rank} {name!r}", digest(value)


def all_digests(text: str) -> dict[str, str]:
    """Return the digests of all scenarios whose id contains `text`."""
    chosen = [scenario for scenario in load_scenarios() if text in scenario.id]
    found: dict[str, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, scenario in enumerate(chosen, 1):
            found.update(digests_of(scenario))
            if number % 500 == 0:
                print(f"{number} of {len(chosen)} scenarios", file=sys.stderr)
    return found


def main(mode: str, path: str, text: str = "") -> int:
    """Write digests to `path` or compare them with those in it; return the exit code."""
    now = all_digests(text)
    if mode == "write":
        Path(path).write_text("".join(f"{value} {name}\n" for name, value in sorted(now.items())), encoding="utf-8")
        print(f"{len(now)} digests in {path}")
        return 0
    lines = [line.split(" ", 1) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    before = {name: value for value, name in lines if text in name.split(" ", 1)[0]}
    differing = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    for name in differing:
        what = "is new" if name not in before else "is gone" if name not in now else "differs"
        print(f"{name} {what}")
    print(f"{len(now)} digests, {len(differing)} of them not as in {path}")
    return 1 if differing else 0


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4) or sys.argv[1] not in ("write", "compare"):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
