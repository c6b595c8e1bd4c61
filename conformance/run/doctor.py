"""What this machine can run, found out by trying, each finding with what to do about it."""

import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from conformance import spec
from conformance.run.environment import accelerators, available_cores, package_version

MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 11)
#: Which profiles were judged with which torch, and when.
JUDGED = Path(spec.__file__).with_name("torch_versions.toml")


@dataclass(frozen=True, slots=True)
class Check:
    """What a check found: without `needed` ones no run works, without others some chapters; `hint` says what to do."""

    name: str
    passed: bool
    detail: str
    hint: str = ""
    needed: bool = True


def run_checks() -> Iterator[Check]:
    """Yield the result of each check; a check that raises has failed."""
    for check in CHECKS:
        try:
            yield check()
        except Exception as error:
            yield Check(check.__name__.strip("_"), False, f"{type(error).__name__}: {error}")


def _python() -> Check:
    wanted = ".".join(map(str, MIN_PYTHON))
    detail = f"{platform.python_version()} on {platform.platform()}"
    return Check("python", sys.version_info >= MIN_PYTHON, detail, f"install Python {wanted} or newer")


def _torch() -> Check:
    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    wanted = ".".join(map(str, MIN_TORCH))
    detail = f"{torch.__version__}; {judged_with(torch.__version__)}"
    return Check("torch", version >= MIN_TORCH, detail, f"install torch {wanted} or newer")


def judged_with(torch_version: str) -> str:
    """Return which profiles ran with this torch, and when, or that none did, and with which versions some did."""
    judged: dict[str, str] = tomllib.loads(JUDGED.read_text(encoding="utf-8"))
    release = torch_version.partition("+")[0]
    ran = [
        f"{what}{python and f' (Python {python})'}" for name, what in judged.items()
        for version, _, python in [name.partition("@")] if version == release
    ]  # fmt: skip
    if ran:
        return f"this suite ran {', '.join(ran)}"
    return f"this suite was not run with it, but with {', '.join(dict.fromkeys(n.partition('@')[0] for n in judged))}"


def _tool() -> Check:
    return Check("ddp-conformance", True, package_version("ddp-conformance"))


def _cores() -> Check:
    cores = available_cores()
    hint = "ranks take turns on one core: correct, but slow, and deadlines may be reached"
    return Check("cores", cores >= 2, str(cores), hint, needed=False)


def _temporary_folder() -> Check:
    with tempfile.TemporaryDirectory(prefix="ddp-conformance-") as folder:
        (Path(folder) / "probe").write_text("written")
        free_gib = shutil.disk_usage(folder).free / 2**30
    hint = "set TMPDIR to a folder with space: rendezvous files and ranks' output go there"
    return Check("temporary folder", free_gib > 0.1, f"{tempfile.gettempdir()}, {free_gib:.1f} GiB free", hint)


def _shared_memory() -> Check:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Check("shared memory", False, "no /dev/shm", "mount a tmpfs there", needed=False)
    free_gib = shutil.disk_usage(folder).free / 2**30
    passed = os.access(folder, os.W_OK) and free_gib >= 0.5
    hint = "NCCL and torch.compile's workers use it; in a container pass --shm-size=1g"
    return Check("shared memory", passed, f"/dev/shm, {free_gib:.1f} GiB free", hint, needed=False)


def _compiler() -> Check:
    names = [os.environ.get("CXX", ""), "g++", "clang++"]
    found = next((path for name in names if name and (path := shutil.which(name))), "")
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    detail = f"{found or 'no C++ compiler'}, {'Python.h' if headers.exists() else 'no Python.h'}"
    hint = "torch.compile on a CPU needs a C++ compiler (g++) and Python's headers (python3-dev)"
    return Check("compiler", bool(found) and headers.exists(), detail, hint, needed=False)


def _accelerators() -> Check:
    from conformance.backends.nccl import NCCL
    from conformance.backends.sim_device.build import why_unavailable

    found = accelerators()
    usable = ["gloo", *(["nccl"] if not NCCL.unavailable() else []), *(["sim"] if not why_unavailable() else [])]
    detail = f"{', '.join(found) or 'none'}; backends: {', '.join(usable)}"
    hint = "without one, --backend sim simulates it; a vendor's device shows once its package is imported"
    return Check("accelerators", bool(found), detail, hint, needed=False)


def _plugins() -> Check:
    """Load what installed packages bring; one that fails is named, and the others are loaded all the same."""
    from conformance import plugins
    from conformance.backends.backend import BUILT_IN
    from conformance.errors import ConformanceError
    from conformance.subjects.subject import KNOWN
    from conformance.workers.finder import find_backend, find_subject

    sound, broken = [], []
    for group, load, taken in ((plugins.BACKENDS, find_backend, BUILT_IN), (plugins.SUBJECTS, find_subject, KNOWN)):
        for plugin in plugins.installed(group):
            try:
                if plugin.name in taken:
                    raise ConformanceError(f"{plugin.name!r} is the name of a built-in one, which is taken instead")
                load(plugin.name)
            except ConformanceError as error:
                broken.append(f"{plugin.name} (of {plugin.package}): {error}")
            else:
                sound.append(f"{plugin.name} (of {plugin.package})")
    hint = "the named packages must mend their entry points; everything else works without them"
    return Check("plugins", not broken, "; ".join([*broken, *sound]) or "none installed", hint, needed=False)


def _two_ranks() -> Check:
    from conformance.backends.backend import get_backend
    from conformance.scenario import Scenario
    from conformance.subjects.subject import KNOWN
    from conformance.workers.controller import Controller

    scenario = Scenario("probe", ("PROBE",), "train", "mlp", world_size=2)
    started = time.monotonic()
    with Controller(get_backend("gloo")) as controller:
        cold = controller.run(scenario, KNOWN["torch"])
        started_s = time.monotonic() - started
        again = time.monotonic()
        controller.run(scenario, KNOWN["torch"])
        warm_ms = (time.monotonic() - again) * 1000
    lost = [str(seen.raised or seen.fate) for seen in cold.values() if seen.fate.kind != "returned"]
    detail = "; ".join(lost) or f"two steps of torch's DDP; started in {started_s:.1f} s, again in {warm_ms:.0f} ms"
    hint = "gloo needs the loopback interface (127.0.0.1) and a temporary folder that both ranks can write"
    return Check("two ranks over gloo", not lost, detail, hint)


CHECKS: tuple[Callable[[], Check], ...] = (
    _python, _tool, _torch, _cores, _temporary_folder, _shared_memory, _compiler, _accelerators, _plugins, _two_ranks,
)  # fmt: skip
