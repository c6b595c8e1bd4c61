"""A file of `ddp_impl` imports lower tiers only; one file alone talks to torch.distributed's collectives."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ddp_impl

ROOT = Path(ddp_impl.__file__).parent
TIERS = {
    "messages": 0,
    "errors": 0, "reducer_state": 0, "arrivals": 0, "bucket_plan": 0, "auto_buckets": 0, "options": 0, "telemetry": 0,
    "bucket": 1, "unused_parameters": 1, "mixed_precision": 1, "parameter_swap": 1, "gradients": 1,
    "tensor_parallel": 1, "gradient_homes": 1, "nested_tensors": 1,
    "collectives": 2,
    "comm_hooks": 3, "buffers": 3, "replicas": 3, "optimizer_in_backward": 3, "wrapped_module": 3, "parameter_usage": 3,
    "arguments": 3, "sync_batch_norm": 3,
    "autograd_hooks": 3, "bucket_reduction": 4, "reducer": 5,
    "join": 6, "logging_data": 6, "torch_surface": 6,
    "distributed": 7,
    "installation": 8, "replicated_view": 8, "__main__": 9, "__init__": 9, "startup": 9,
}  # fmt: skip
WITHOUT_TORCH = {"errors", "messages", "arrivals", "reducer_state", "bucket_plan", "auto_buckets", "telemetry"}
#: Functions of torch.distributed that ask without communicating.
QUESTIONS = {"get_backend", "get_rank", "get_world_size", "is_initialized"}


def modules() -> list[Path]:
    return [path for path in sorted(ROOT.rglob("*.py")) if "tests" not in path.parts]


def tier_of(name: str) -> int | None:
    return 1 if name == "compile" else TIERS.get(name)


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    only_for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in only_for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            if node.module in ("ddp_impl", "ddp_impl.compile"):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    own_tier = tier_of(own)
    assert own_tier is not None, f"{own} has no tier: place it in TIERS"
    for name in imports(path):
        if name.startswith("ddp_impl."):
            other = name.split(".")[1]
            other_tier = tier_of(other)
            if other == own or other_tier is None:
                continue
            assert other_tier < own_tier or (other_tier == own_tier and own_tier in (0, 1, 3)), (
                f"{own} (tier {own_tier}) imports {other} (tier {other_tier})"
            )
        if own in WITHOUT_TORCH:
            assert name.split(".")[0] != "torch", f"{own} must not import torch"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_collectives_are_called_in_one_file(path: Path) -> None:
    if path.name == "collectives.py" or "compile" in path.parts:
        return
    calls = {
        f"{node.func.value.id}.{node.func.attr}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
    }
    assert {call for call in calls if call.startswith("dist.")} <= {f"dist.{name}" for name in QUESTIONS}
