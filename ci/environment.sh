# shellcheck shell=bash
# Creates .venv in the project with the pinned packages and puts it first in PATH; does nothing else if .venv is current.
# The other scripts of this folder source it; it also runs alone. PYTHON=... names the interpreter for .venv.

set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"

find_python() {
    local candidate PATH="${PATH//"$VENV/bin:"/}" # not the one in .venv, when one of these scripts has called another
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.11 python3.12 python3.13 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "ddp-conformance needs Python 3.11 or newer; found $(python3 --version 2>&1 || true)." >&2
    echo "Install one, or name an installed one: PYTHON=/path/to/python3.11 bash $0" >&2
    return 1
}

# Prints everything that the environment depends on; a change makes make_environment create it again.
recipe() {
    echo "$ROOT $1"
    "$1" --version
    cat "$ROOT/ci/constraints.txt" "$ROOT/pyproject.toml"
}

make_environment() {
    local python
    python="$(find_python)"
    if [ -x "$VENV/bin/python" ] && recipe "$python" | cmp -s - "$VENV/recipe"; then
        return
    fi
    echo "Creating $VENV with $("$python" --version) ..."
    "$python" -m venv --clear "$VENV"
    # Not compiled here: most modules of torch are never imported, and Python compiles and keeps those that are.
    "$VENV/bin/python" -m pip install --quiet --quiet --disable-pip-version-check --no-compile \
        --constraint "$ROOT/ci/constraints.txt" --editable "${ROOT}[dev]"
    recipe "$python" > "$VENV/recipe"  # last, so that an incomplete environment has no recipe and is created again
}

lock_environment() { # two scripts started at once must not create the same environment
    if command -v flock > /dev/null; then
        mkdir -p "$ROOT/.cache"
        exec 9> "$ROOT/.cache/environment.lock"
        flock 9
    fi
}

lock_environment
make_environment
exec 9>&-

export PATH="$VENV/bin:$PATH" VIRTUAL_ENV="$VENV"
unset PYTHONHOME PYTHONDONTWRITEBYTECODE  # the tests start hundreds of interpreters, which share compiled modules
