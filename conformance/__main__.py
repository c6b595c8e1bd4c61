"""`python -m conformance` is `ddp-conformance`, for launchers that start Python modules.

The distribution installs `ddp_impl` with torch alone; without the extra `suite` the command reports missing packages.
"""

import gc
import importlib.util
import os
import sys

#: A module of each dependency that the command imports first.
NEEDED = ("click", "msgspec", "rich")


def start() -> None:
    """Run the command; exit with 2 where the extra `suite` is not installed."""
    _open_standard_streams()
    gc.set_threshold(50_000)  # torch is a million objects that stay: by default the collector walks through them often
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(_report(missing))
    from conformance.cli import main

    main(prog_name="ddp-conformance")


def _open_standard_streams() -> None:
    """Open descriptors that the shell has closed (`>&-`): the next open file would take their place."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(handle)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def _report(missing: list[str]) -> int:
    print(
        f"ddp-conformance: the suite needs packages that are not installed: {', '.join(missing)}.\n"
        "Install them with: pip install 'ddp-conformance[suite]'",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    # `python -m` searches the current folder first, which may be a stranger's: import nothing from there, unless this
    # package is there.
    if not sys.flags.safe_path and sys.path[0] != os.path.dirname(os.path.dirname(__file__)):
        del sys.path[0]
    start()
