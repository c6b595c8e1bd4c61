"""`python -m conformance` is `ddp-conformance`, for launchers that start Python modules.

The distribution installs `ddp_impl` with torch alone; the suite's own dependencies are its extra `suite`. Who types the
command without them is told so.
"""

import importlib.util
import os
import sys

#: One module of each dependency that the command imports before it can say anything.
NEEDED = ("click", "msgspec", "rich")


def start() -> None:
    """Run the command; exit with 2 where the extra `suite` is not installed."""
    _open_standard_streams()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(_told(missing))
    from conformance.cli import main

    main(prog_name="ddp-conformance")


def _open_standard_streams() -> None:
    """Open what the shell has closed (`>&-`): else the next file that is opened takes its place, and is written to."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(handle)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def _told(missing: list[str]) -> int:
    print(
        f"ddp-conformance: the suite needs packages that are not installed: {', '.join(missing)}.\n"
        "Install them with: pip install 'ddp-conformance[suite]'",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    # `python -m` searches the shell's folder first, which may be a stranger's; whatever is imported from here on must
    # not come from there, unless this package does.
    if not sys.flags.safe_path and sys.path[0] != os.path.dirname(os.path.dirname(__file__)):
        del sys.path[0]
    start()
