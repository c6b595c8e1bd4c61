"""Where commands look for modules: the shell's folder may be a stranger's, and Python would run what it finds there.

A folder is searched only by commands that import what the user names as `module:attr`, and after everything else, so
that nothing in it stands in for what those commands need.
"""

import sys
from collections.abc import Sequence

#: Commands that import what the user names; no other one searches the shell's folder.
IMPORTING = ("run", "explore", "replay", "smoke", "bench", "upstream", "mutants", "parity")
#: Of these, those whose arguments are modules by themselves.
NAMING_MODULES = ("parity",)


def search_working_directory(command: str, arguments: Sequence[str]) -> None:
    """Let `command` find modules in the shell's folder, last, if its `arguments` name one.

    Python's own switch against that, `-P`, `-I` or PYTHONSAFEPATH, is obeyed.
    """
    named = command in NAMING_MODULES or (command in IMPORTING and any(":" in argument for argument in arguments))
    if named and not sys.flags.safe_path and "" not in sys.path:
        sys.path.append("")
