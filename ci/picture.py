"""Draws the end of a real run, of a DDP that forgets to divide by the number of ranks, for README.md.

python ci/picture.py    # writes docs/run.svg; takes some ten seconds
"""

import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

TARGET = Path(__file__).parents[1] / "docs" / "run.svg"
SHOWN = "ddp-conformance run GRAD-01 -k mlp-world2 --ddp my_pkg:MyDDP"
MINE = "from conformance.chapters.gradients.mutants import NoDivision as MyDDP\n"
COLUMNS = 108
#: A font from another site would be a request for every reader; the viewer's own will do.
_REMOTE_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def printed() -> list[str]:
    """Return what the run prints."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "my_pkg.py").write_text(MINE, encoding="utf-8")
        command = [sys.executable, "-m", "conformance", *SHOWN.split()[1:]]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 1:
            sys.exit(f"expected that the run finds the bug and ends with 1, got {done.returncode}:\n{done.stderr}")
        return done.stdout.splitlines()


def drawn(lines: list[str]) -> str:
    """Return the lines as a picture of a terminal."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {SHOWN}", style="bold"))
    for line in lines:
        style = "red" if re.match(r"FAIL|.*: \d+ FAIL", line) else "cyan" if line.startswith("Replay") else ""
        console.print(Text(line, style=style), soft_wrap=False)
    return _REMOTE_FONTS.sub("", console.export_svg(title="ddp-conformance", unique_id="run"))


def main() -> None:
    """Write the picture."""
    lines = printed()
    TARGET.write_text(drawn(lines) + "\n", encoding="utf-8")
    print(f"{TARGET}: {len(lines)} lines")


if __name__ == "__main__":
    main()
