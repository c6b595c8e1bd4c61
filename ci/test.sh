#!/usr/bin/env bash
# The project's own tests: style, types, tests. Makes its environment first. Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"

step() {
    echo "== $*"
    "$@"
}

step ruff check .
step ruff format --check .
step mypy
# Scenarios are judged by the truth alone: torch's own DDP runs beside ddp_impl in ci/conformance.sh.
step pytest -n 2 --ddp-no-native "$@"
