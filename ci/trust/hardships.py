"""Runs a few scenarios in environments and under limits that are unkind, and compares with a plain run.

    python ci/trust/hardships.py [NAME ...]

Each must end with the plain run's verdicts, or with a refusal: exit code 1 or 2, no report that is green, no verdict
that blames the DDP for what the machine denies, a message and no traceback. Most limits need root, namespaces or
cgroups (version 1); what cannot be tried here is said. Exits with 1 where anything else comes out.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

SCENARIOS = ("gradients/GRAD-01/mlp-world2", "buffers/BUFFER-01/*world2*", "construction/CONS-01/*world3*")
RUN = ("ddp-conformance", "run", *SCENARIOS, "--quiet", "--report")
_TIMEOUT_S = 400
_USER = 64321  #: nobody else's

#: Makes CLOCK_REALTIME jump by an hour, forth and back, at every hundredth call.
CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
static unsigned calls;
static long jump(void) { return (__sync_fetch_and_add(&calls, 1) / 100 % 3 - 1) * 3600; }
int clock_gettime(clockid_t clock, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, at);
    if (clock == CLOCK_REALTIME) at->tv_sec += jump();
    return result;
}
"""


@dataclass(frozen=True)
class Hardship:
    """What is unkind: variables, or a shell script that ends with `exec "$@"`; `{folder}` is a private folder."""

    variables: Mapping[str, str] = field(default_factory=dict)
    script: str = 'exec "$@"'
    report: str = "{folder}/report"
    only: Mapping[str, str] | None = None


def environment(**variables: str) -> Hardship:
    """Return an environment with some more variables."""
    return Hardship(variables)


def limit(script: str, report: str = "{folder}/report") -> Hardship:
    """Return a shell's limit: what to do before the run."""
    return Hardship(script=f'{script}; exec "$@"', report=report)


def namespace(flags: str, script: str, report: str = "{folder}/report") -> Hardship:
    """Return a run in namespaces of its own, in which `script` changes something first."""
    quoted = f'{script}; exec "$@"'.replace("'", "'\\''")
    return Hardship(script=f"exec unshare {flags} bash -c '{quoted}' run \"$@\"", report=report)


def cgroup(controller: str, name: str, value: str) -> Hardship:
    """Return a run in a cgroup (version 1) with a limit; the processes in it die with the run."""
    group = f"/sys/fs/cgroup/{controller}/ddp-conformance-$$"
    script = f'mkdir {group}; echo {value} > {group}/{name}; echo $$ > {group}/cgroup.procs; "$@"; status=$?; '
    script += f"echo $$ > /sys/fs/cgroup/{controller}/cgroup.procs; rmdir {group}; exit $status"
    return Hardship(script=script)


def of_a_user(number: int) -> Hardship:
    """Return a run of a user who may have so many processes and threads: that limit does not hold for root."""
    rights = "+dac_override,+dac_read_search"
    become = f"setpriv --reuid {_USER} --clear-groups --inh-caps {rights} --ambient-caps {rights}"
    return Hardship(script=f'exec {become} bash -c \'ulimit -u {number}; exec "$@"\' run "$@"')


ENVIRONMENTS = {
    "PYTHONOPTIMIZE=1": environment(PYTHONOPTIMIZE="1"),
    "PYTHONOPTIMIZE=2": environment(PYTHONOPTIMIZE="2"),
    "PYTHONWARNINGS=error": environment(PYTHONWARNINGS="error"),
    "PYTHONHASHSEED=7": environment(PYTHONHASHSEED="7"),
    "PYTHONDEVMODE=1": environment(PYTHONDEVMODE="1"),
    "PYTHONMALLOC=debug": environment(PYTHONMALLOC="debug"),
    "LC_ALL=C without UTF-8": environment(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"),
    "LANG=tr_TR.UTF-8": environment(LANG="tr_TR.UTF-8", LC_ALL="tr_TR.UTF-8"),
    "TZ=Asia/Kathmandu": environment(TZ="Asia/Kathmandu"),
    "TORCH_DISTRIBUTED_DEBUG=DETAIL": environment(TORCH_DISTRIBUTED_DEBUG="DETAIL"),
    "TORCH_SHOW_CPP_STACKTRACES=1": environment(TORCH_SHOW_CPP_STACKTRACES="1"),
    "TORCH_LOGS=distributed": environment(TORCH_LOGS="+distributed"),
    "OMP_NUM_THREADS=16": environment(OMP_NUM_THREADS="16", MKL_NUM_THREADS="16", OPENBLAS_NUM_THREADS="16"),
    "MKL_CBWR=COMPATIBLE": environment(MKL_CBWR="COMPATIBLE"),
    "ATEN_CPU_CAPABILITY=default": environment(ATEN_CPU_CAPABILITY="default"),
    "GLOO_SOCKET_IFNAME=none": environment(GLOO_SOCKET_IFNAME="none"),
    "a launcher's variables": environment(
        RANK="3", LOCAL_RANK="1", WORLD_SIZE="8", LOCAL_WORLD_SIZE="2", MASTER_ADDR="192.0.2.1", MASTER_PORT="1"
    ),
    "CUDA_VISIBLE_DEVICES=": environment(CUDA_VISIBLE_DEVICES=""),
    "HOME=/nonexistent": environment(HOME="/nonexistent", XDG_CACHE_HOME="/nonexistent"),
    "TMPDIR with blanks": Hardship(script='export TMPDIR="{folder}/a b\u00fc"; mkdir "$TMPDIR"; exec "$@"'),
    "COLUMNS=1": environment(COLUMNS="1", TERM="dumb", NO_COLOR="1"),
    "no variables but PATH": Hardship(only={"PATH": os.environ["PATH"]}),
}

LIMITS = {
    "32 open files": limit("ulimit -n 32"),
    "128 open files": limit("ulimit -n 128"),
    **{f"{number} processes": cgroup("pids", "pids.max", str(number)) for number in (8, 12, 14, 16, 20, 24)},
    "3 processes": cgroup("pids", "pids.max", "3"),
    **{f"{number} processes of a user": of_a_user(number) for number in (8, 16, 24, 32, 200)},
    "400 MiB of memory": cgroup("memory", "memory.limit_in_bytes", "400M"),
    "2 GiB of address space": limit("ulimit -v 2097152"),
    "256 KiB of stack": limit("ulimit -s 256"),
    "files of 4 KiB": limit("ulimit -f 4"),
    "a full disk at the report": namespace(
        "-m", "mkdir {folder}/small; mount -t tmpfs -o size=16k none {folder}/small", "{folder}/small"
    ),
    "a full disk at TMPDIR": namespace(
        "-m", "mkdir {folder}/small; mount -t tmpfs -o size=16k none {folder}/small; export TMPDIR={folder}/small"
    ),
    "a read-only TMPDIR": namespace(
        "-m", "mkdir {folder}/small; mount -t tmpfs -o ro none {folder}/small; export TMPDIR={folder}/small"
    ),
    "no /dev/shm": namespace("-m", "umount /dev/shm; mount -t tmpfs -o ro none /dev/shm"),
    "an unresolvable hostname": namespace(
        "-m --uts", "hostname no.such.host.invalid; mount --bind /dev/null /etc/hosts"
    ),
    "no network, not even loopback": namespace("-n", "true"),
    "IPv6 only": namespace("-n", "ip link set lo up; ip addr del 127.0.0.1/8 dev lo"),
    "a clock that jumps": limit(
        "printf '%s' \"$CLOCK\" > {folder}/clock.c; gcc -shared -fPIC -o {folder}/clock.so {folder}/clock.c -ldl;"
        " export LD_PRELOAD={folder}/clock.so"
    ),
    "ten seconds of processor time": limit("ulimit -t 10"),
    "standard output is full": limit("exec > /dev/full"),
    "no standard streams": limit("exec <&- >&- 2>&-"),
    "a read-only working directory": namespace(
        "-m", "mkdir {folder}/ro; mount -t tmpfs -o ro none {folder}/ro; cd {folder}/ro"
    ),
}  # fmt: skip


def verdicts(report: Path) -> dict[str, tuple[str, str]]:
    """Return both columns of a report; nothing where there is none."""
    try:
        read = json.loads((report / "report.json").read_text())
    except (OSError, ValueError):
        return {}
    return {one["id"]: (one["subject"]["verdict"], one["native"]["verdict"]) for one in read["scenarios"]}


def blamed(came: Mapping[str, tuple[str, str]], plain: Mapping[str, tuple[str, str]]) -> bool:
    """Whether some scenario failed in a column in which it passes without the hardship: a false accusation."""
    return any(
        after not in (before, "HARNESS_ERROR")
        for name, both in came.items()
        for before, after in zip(plain[name], both, strict=True)
    )


def is_explained(said: str, came: Mapping[str, tuple[str, str]], name: str) -> bool:
    """Whether a run that was refused says why: something, where there are streams, and no traceback."""
    return bool(came or "\nTraceback" not in f"\n{said}") and bool(said.strip() or "streams" in name)


def run(hardship: Hardship, folder: Path) -> tuple[int, str, dict[str, tuple[str, str]]]:
    """Return exit code, output and verdicts of a run under the hardship."""
    report = Path(hardship.report.format(folder=folder))
    script = hardship.script.replace("{folder}", str(folder))
    if report.name == "small":  # in a mount that ends with the run: what it holds is copied from within
        copied = f'"$@"; status=$?; cp "{report}/report.json" "{folder}"; exit $status'
        script, kept = script.replace('exec "$@"', copied), folder
    else:
        kept = report
    variables = (
        dict(hardship.only if hardship.only is not None else os.environ) | dict(hardship.variables) | {"CLOCK": CLOCK}
    )
    try:
        done = subprocess.run(
            ["bash", "-c", script, "run", *RUN, str(report)], env=variables, capture_output=True, timeout=_TIMEOUT_S,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return -1, f"did not end within {_TIMEOUT_S} s", {}
    return done.returncode, (done.stdout + done.stderr).decode(errors="replace"), verdicts(kept)


def main() -> None:
    """Run the hardships that the arguments name, all by default, and print a table."""
    with tempfile.TemporaryDirectory() as folder:
        code, said, plain = run(Hardship(), Path(folder))
    if code != 0 or not plain:
        sys.exit(f"the plain run ended with {code}: {said}")
    wrong = 0
    for name, hardship in {**ENVIRONMENTS, **LIMITS}.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        with tempfile.TemporaryDirectory() as folder:
            code, said, came = run(hardship, Path(folder))
        last = (said.strip().splitlines() or [""])[-1][:160]
        if came == plain:
            outcome = "the same verdicts" if code == 0 else f"the same verdicts, exit code {code}"
        elif code > 0 and not blamed(came, plain) and is_explained(said, came, name):
            outcome = "refused" if not came else f"not green: {sorted(set(came.values()))}"
        else:
            outcome, wrong = "WRONG", wrong + 1
        print(f"{name:32} {outcome:24} {code:4}  {'' if came == plain else last}", flush=True)
        if outcome == "WRONG":
            print(said[-3000:], flush=True)
    print(f"{wrong} wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
