"""A mutant made of a function has its bug for its own objects alone, and refuses to stand for what is not there."""

# ruff: noqa: N802 - functions that become classes

import ast
import contextlib
import copy
import inspect
import pickle
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from conformance.errors import OwnMistake
from conformance.mutants.patches import Call, as_part, replaces
from conformance.mutants.spoilt import spoils, spoils_work
from ddp_impl import DistributedDataParallel as Ours
from ddp_impl import MixedPrecision
from ddp_impl.autograd.hooks import AutogradHooks
from ddp_impl.buckets.bucket import Bucket
from ddp_impl.module.mixed_precision import Casts, PrecisionCaster
from ddp_impl.reducer.reducer import Reducer
from ddp_impl.reducer.reduction import Reduction

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"


@replaces(Reduction, "hand_out")
def Doubles(reduction: Reduction, hand_out: Call, bucket: Bucket, buffer: Tensor, used: Any) -> None:
    """BUG: averages are doubled."""
    hand_out(bucket, buffer.mul_(2), used)


@as_part
class DoublesInTwoPlaces(Reduction):
    """BUG: averages are quadrupled."""

    def collect(self, bucket: Bucket) -> Tensor:
        return super().collect(bucket).mul_(2)

    def hand_out(self, bucket: Bucket, buffer: Tensor, used: Any) -> None:
        super().hand_out(bucket, buffer.mul_(2), used)


@replaces(DoublesInTwoPlaces, "forward")
def DoublesOutputs(ddp: Ours, forward: Call, *inputs: Any) -> Any:
    """BUG: averages are multiplied by eight, because outputs are doubled, too."""
    return 2 * forward(*inputs)


@replaces(AutogradHooks, "counting")
def DoublesWhatComes(hooks: AutogradHooks, counting: Call, index: int) -> Callable[[Tensor], None]:
    """BUG: gradients are doubled when they come."""
    count = counting(index)

    def came(parameter: Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad *= 2
        count(parameter)

    return came


@replaces(TorchDDP, "forward")
def DoublesOutputsOfTorch(ddp: TorchDDP, forward: Call, *inputs: Any) -> Any:
    """BUG: outputs are doubled."""
    return 2 * forward(*inputs)


@replaces(PrecisionCaster, "cast_inputs")
def CastsNoInputs(caster: PrecisionCaster, cast_inputs: Call, value: Any) -> Any:
    """BUG: inputs are not cast."""
    return value


@replaces(Casts, "read")
def CastsNothing(casts: Casts, read: Call, parameter: nn.Parameter) -> Tensor:
    """BUG: parameters are not cast."""
    return parameter


@replaces(Ours, "no_sync")
@contextlib.contextmanager
def SynchronisesAlways(ddp: Ours, no_sync: Call) -> Iterator[None]:
    """BUG: `no_sync` does nothing."""
    yield


@replaces(Ours, "named_module_buffers")
def HasOneBuffer(ddp: Ours, named_module_buffers: Call) -> dict[str, Tensor]:
    """BUG: all buffers but the first are left out."""
    return dict(list(named_module_buffers().items())[:1])


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def gradient(wrapper: nn.Module) -> float:
    wrapper(torch.ones(1, 1)).sum().backward()
    (weight,) = wrapper.parameters()
    value, weight.grad = float(weight.grad), None  # type: ignore[arg-type]
    return value


def linear() -> nn.Module:
    return nn.Linear(1, 1, bias=False)


@pytest.mark.parametrize(
    ("mutant", "base", "expected"),
    [
        (Doubles, Ours, 2),
        (DoublesInTwoPlaces, Ours, 4),
        (DoublesOutputs, Ours, 8),
        (DoublesWhatComes, Ours, 2),
        (DoublesOutputsOfTorch, TorchDDP, 2),
    ],
)
def test_the_wrappers_beside_a_mutant_and_behind_it_have_no_bug(
    mutant: type[nn.Module], base: type[nn.Module], expected: int
) -> None:
    before, wrong = base(linear()), mutant(linear())
    beside = base(linear())
    assert [gradient(each) for each in (before, wrong, beside, wrong, before)] == [1, expected, 1, expected, 1]
    del wrong
    assert gradient(base(linear())) == 1


@pytest.mark.parametrize("mutant", [Doubles, DoublesInTwoPlaces])
def test_a_copy_of_a_mutant_has_its_bug(mutant: type[nn.Module]) -> None:
    wrapper = mutant(linear())
    expected = gradient(wrapper)
    for copied in (copy.deepcopy(wrapper), pickle.loads(pickle.dumps(wrapper))):
        assert type(copied) is mutant
        assert gradient(copied) == expected


@pytest.mark.parametrize("mutant", [CastsNoInputs, CastsNothing])
def test_a_part_that_only_mixed_precision_has_is_replaced_where_it_is(mutant: type[nn.Module]) -> None:
    low = MixedPrecision(param_dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="dtype"):
        mutant(linear(), mixed_precision=low)(torch.ones(1, 1))
    assert Ours(linear(), mixed_precision=low)(torch.ones(1, 1)).dtype is torch.bfloat16
    assert gradient(mutant(linear())) == 1


def test_a_context_manager_and_a_property_are_replaced_like_a_method() -> None:
    wrapper = SynchronisesAlways(linear())
    with wrapper.no_sync():
        assert wrapper.require_backward_grad_sync
    assert list(HasOneBuffer(nn.BatchNorm1d(1)).named_module_buffers) == ["running_mean"]
    assert len(Ours(nn.BatchNorm1d(1)).named_module_buffers) == 3


def test_a_mutant_is_called_and_described_like_its_function() -> None:
    assert issubclass(Doubles, Ours)
    assert (Doubles.__name__, Doubles.__module__) == ("Doubles", __name__)
    assert Doubles.__doc__ == "BUG: averages are doubled."
    assert DoublesOutputs.forward.__doc__ == Ours.forward.__doc__


def test_the_mutant_that_contributors_are_shown_has_its_bug() -> None:
    code = re.search(r"\n( +@replaces.*?)\n\n", CONTRIBUTING.read_text(), re.DOTALL)
    assert code is not None
    shown: dict[str, Any] = {"replaces": replaces, "Reduction": Reduction, "Call": Call, "Bucket": Bucket}
    exec(textwrap.dedent(code[1]), shown)
    assert gradient(shown["BreaksIt"](linear())) == 0.5  # divided by two, with one rank


@pytest.mark.parametrize("owner", [Ours, Reducer])
def test_what_stands_for_a_method_that_is_not_there_is_refused(owner: type[Any]) -> None:
    with pytest.raises(AttributeError, match="_hand_out_before"):
        replaces(owner, "_hand_out_before")(lambda ddp, call: None)


def test_what_spoils_no_method_of_a_backend_is_refused() -> None:
    with pytest.raises(OwnMistake, match="a backend has no allredcue"):
        spoils("allredcue")(lambda group, call: None)
    with pytest.raises(AttributeError, match="wiat"):
        spoils_work("wiat", "allreduce")


ROOT = Path(__file__).parents[2]
MUTANTS = sorted(path for path in (ROOT / "conformance").rglob("mutants.py") if "ddp_impl" in path.read_text())


def nodes(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


@cache
def private_names() -> frozenset[str]:
    """Return what `ddp_impl` alone calls with one underscore before it: no name of torch's class."""
    known = {node.attr for node in nodes(inspect.getsource(TorchDDP)) if isinstance(node, ast.Attribute)}
    found = set[str]()
    for path in set((ROOT / "ddp_impl").rglob("*.py")) - set((ROOT / "ddp_impl" / "tests").iterdir()):
        for node in nodes(path.read_text()):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
                found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return frozenset(name for name in found - known - set(dir(TorchDDP)) if re.match("_[^_]", name))


def patched_names(source: str) -> Iterator[str]:
    """Yield what mutants replace by name, define in a class with a base, or assign to an object of another."""
    for node in nodes(source):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("replaces", "patch", "patch.object")):
            texts = [one.value for one in node.args if isinstance(one, ast.Constant)]
            yield from (text.rpartition(".")[2] for text in texts if isinstance(text, str))
        elif isinstance(node, ast.ClassDef) and node.bases:
            yield from (each.name for each in node.body if isinstance(each, ast.FunctionDef))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) != "self":
            yield node.attr


@pytest.mark.parametrize("path", MUTANTS, ids=lambda path: path.parent.name)
def test_mutants_patch_no_private_name_of_ddp_impl(path: Path) -> None:
    assert sorted(private_names().intersection(patched_names(path.read_text()))) == []


@pytest.mark.parametrize(
    "source",
    [
        '@replaces(Reducer, "_perform")\ndef Wrong(): ...',
        'mock.patch("ddp_impl.reducer.reducer._nothing")',
        "class Wrong(Reducer):\n    def _perform(self): ...",
        "reducer._local = None",
    ],
)
def test_a_private_name_that_is_patched_is_found(source: str) -> None:
    assert private_names().intersection(patched_names(source))
