"""The test suites that the torch wheel ships, and which of their tests concern DDP."""

import contextlib
import importlib
import unittest
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

from conformance.errors import instance
from conformance.upstream.gates import opened_gates, wants_other_world_size

_INTERNAL = "torch.testing._internal"
_DDP_NAMES = frozenset({"DistributedDataParallel", "DDP"})


@dataclass(frozen=True, slots=True)
class Suite:
    """A class of tests in `module`: `tests` holds them, `bases` make of it a test case that ranks can run.

    torch's classes of tests are completed by whoever runs them. With `has_group` the launcher initialises the default
    process group before a test, otherwise the tests do it. With `world_size` 0 the tests take any.
    """

    name: str
    module: str
    tests: str
    bases: tuple[str, ...]
    has_group: bool
    world_size: int = 0

    def load(self) -> bool:
        """Import the module without skip decorators; at import it reads the world size from the environment.

        Returns whether that succeeded: not each build of torch has what a suite needs, RPC for example.
        """
        with opened_gates(), contextlib.suppress(ImportError):
            importlib.import_module(self.module)
            return True
        return False

    def test_case(self) -> type[unittest.TestCase]:
        """Return the class of which ranks make one instance per test; the module must have been loaded."""
        return type(self.name, (_SmallerImages, self.tests_class(), *map(_resolve, self.bases)), {})

    def tests_class(self) -> type:
        """Return torch's class as it is."""
        return instance(_resolve(f"{self.module}:{self.tests}"), type)


class _SmallerImages:
    """Crops images that a GPU convolves at once and a CPU core in minutes."""

    def _run_uneven_inputs_test(self, test_case: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(test_case.inp, "ndim", 0) == 4:
            test_case = test_case._replace(inp=test_case.inp[..., :32, :32])
        super()._run_uneven_inputs_test(test_case, *args, **kwargs)  # type: ignore[misc]


SUITES = (
    Suite(
        "distributed_test",
        f"{_INTERNAL}.distributed.distributed_test",
        "DistributedTest._DistTestBase",
        (f"{_INTERNAL}.distributed.distributed_test:TestDistBackend",),
        has_group=True,
    ),
    *(
        Suite(
            name,
            f"{_INTERNAL}.distributed.ddp_under_dist_autograd_test",
            tests,
            (
                f"{_INTERNAL}.distributed.rpc.tensorpipe_rpc_agent_test_fixture:TensorPipeRpcAgentTestFixture",
                f"{_INTERNAL}.common_distributed:MultiProcessTestCase",
            ),
            has_group=False,
            world_size=world_size,
        )
        for name, tests, world_size in (
            ("dist_autograd", "DdpUnderDistAutogradTest", 6),
            ("dist_autograd_comparison", "DdpComparisonTest", 4),
            ("dist_autograd_comparison_cuda", "CudaDdpComparisonTest", 4),
        )
    ),
)


def get_suite(name: str) -> Suite:
    """Return the suite called `name`."""
    return next(suite for suite in SUITES if suite.name == name)


def ddp_tests(suite: Suite) -> Iterator[str]:
    """Yield the tests whose code, or code that it calls, mentions DDP, and that can run at this world size.

    Found in their compiled code, so that a newer torch's tests are found without a list of ours.
    """
    module, tests = importlib.import_module(suite.module), suite.tests_class()
    for name in sorted(dir(tests)):
        test = getattr(tests, name)
        is_candidate = name.startswith("test") and callable(test) and not wants_other_world_size(test)
        if is_candidate and _mentions_ddp(_code_of(test), tests, module, set()):
            yield name


def _mentions_ddp(codes: list[CodeType], tests: type, module: ModuleType, seen: set[CodeType]) -> bool:
    for code in codes:
        if code in seen:
            continue
        seen.add(code)
        nested = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        called = [_code_of(found) for name in code.co_names if (found := _look_up(name, tests, module)) is not None]
        if _DDP_NAMES.intersection(code.co_names) or any(
            _mentions_ddp(more, tests, module, seen) for more in (nested, *called)
        ):
            return True
    return False


def _look_up(name: str, tests: type, module: ModuleType) -> Any:
    found = getattr(tests, name, None) or getattr(module, name, None)
    return found if getattr(found, "__module__", None) == module.__name__ else None


def _code_of(found: Any) -> list[CodeType]:
    """Return the code of a function beneath its decorators, or of the functions of a class."""
    if isinstance(found, type):
        return [code for member in vars(found).values() for code in _code_of(member) if callable(member)]
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    return [found.__code__] if isinstance(found, FunctionType) else []


def _resolve(path: str) -> Any:
    module, _, attribute = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found
