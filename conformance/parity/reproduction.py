"""Writes a program of at most 30 lines that shows a difference with nothing but torch."""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from conformance.parity.record import Run
from conformance.parity.training import Training, takes

_PROGRAM = """\
# {sentence}
# `python {name}` prints a line for each step of each process. All ranks should print what one process prints.
import contextlib, os, random, sys, tempfile
sys.path[:0] = {folders}
import torch, torch.distributed as dist, torch.multiprocessing as mp, torch.utils._pytree as pytree
{imports}
norm = lambda ts: sum(float(getattr(t, "_local_tensor", t).detach().norm()) ** 2 for t in ts if t is not None) ** 0.5
def train(rank, ranks, file, lines):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", init_method=f"file://{{file}}{{ranks}}", rank=rank, world_size=ranks)
    torch.set_num_threads(1), torch.set_default_dtype({dtype}), torch.manual_seed(0), random.seed(0)
    if ranks == 1: dist.all_gather = lambda outputs, tensor, *_, **__: outputs[0].copy_(tensor)  # keeps the gradient
    gradients = lambda o: norm(p.grad for group in o.param_groups for p in group["params"])
    said = lambda o, *_: lines.append((rank, f"lr {{o.param_groups[0]['lr']:.6g}}, gradients {{gradients(o):.8g}}"))
    sys.modules[torch.optim.Optimizer.__module__].register_optimizer_step_pre_hook(said)
    bare = lambda m: m.__dict__.update(module=m, no_sync=contextlib.nullcontext) or m  # what steps ask of a wrapper
    made = {made}
    for step in range({steps}):
        torch.manual_seed(step), random.seed(step)
        batch = pytree.tree_map(lambda x: x.to({dtype}) if torch.is_tensor(x) and x.is_floating_point() else x, {batch})
        loss = train_step(*made, batch)
        moved = norm(p for m in made if isinstance(m, torch.nn.Module) for p in m.parameters())
        lines.append((rank, f"step {{step + 1}} ends: loss {{loss}}, parameters {{moved:.8g}}"))
if __name__ == "__main__":
    for ranks in (1, {ranks}):
        mp.start_processes(train, (ranks, tempfile.mktemp(), out := mp.Manager().list()), ranks, start_method="{how}")
        print(*(f"rank {{r}} of {{ranks}}: {{text}}" for r, text in sorted(out, key=lambda x: x[0])), sep="\\n")
"""


def write_program(
    training: Training, wrap: Callable[..., Any], ranks: int, sentence: str, base: Run, folder: Path
) -> str:
    """Write the program to `folder`; return a sentence that names the file, or says why there is none."""
    named = {"make": training.make, "make_batch": training.make_batch, "train_step": training.train_step, "wrap": wrap}
    imports: dict[str, list[str]] = {}
    for role, function in named.items():
        module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
        found = getattr(sys.modules.get(module), name, None)
        if found is not function or module == "__main__":
            return f"(No program was written: {role} is not at the top of a module, so that a file cannot import it.)"
        imports.setdefault(module, []).append(f"{name} as {role}")
    folders = {_import_folder(module, sys.modules[module]) for module in imports} - {""}
    dtype = str(training.dtype or "torch.get_default_dtype()")
    part = f"x.tensor_split({training.shares})[rank * {training.shares} // ranks]"
    share = f"lambda x: {part} if torch.is_tensor(x) and x.dim() else x"
    batch = f"make_batch(step) if ranks == 1 else pytree.tree_map({share}, make_batch(step))"
    lines = [f"from {module} import {', '.join(names)}" for module, names in imports.items()]
    if base.dropouts:
        lines.append("torch.nn.functional.dropout = lambda x, *_, **__: x")
    wrapped = f"(lambda m: (bare if ranks == 1 else wrap)(m.to({dtype})))"
    if not takes(training.make, "wrap"):
        made = f"(lambda m: (m, torch.optim.SGD(m.parameters(), lr=0.1)))({wrapped}(make()))"
    else:
        made = f"(lambda made: made if isinstance(made, tuple) else (made,))(make({wrapped}))"
    path = folder / "parity_difference.py"
    text = _PROGRAM.format(
        sentence=sentence.splitlines()[0][:200], name=path.name, imports="\n".join(lines), folders=sorted(folders),
        dtype=dtype, ranks=ranks, steps=training.steps, made=made,
        how="spawn" if torch.cuda.is_available() else "fork",  # CUDA forbids forks; who forks need not import again
        batch="make_batch(step, rank, ranks)" if takes(training.make_batch, "rank") else batch,
    )  # fmt: skip
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:  # what differs matters more
        return f"(No program was written to {path}: {error.strerror}.)"
    return f"A program that shows it without this suite: python {path}"


def _import_folder(name: str, module: object) -> str:
    """Return the folder from which a module was imported, empty for an installed one."""
    file = inspect.getsourcefile(module)  # type: ignore[arg-type]
    folder = Path(file or "").resolve().parents[name.count(".") + (Path(file or "").name == "__init__.py")]
    return "" if "site-packages" in folder.parts or folder == Path(inspect.__file__).parent else str(folder)
