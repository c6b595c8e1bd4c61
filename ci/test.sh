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
# Types are checked on one core while the tests begin.
mkdir -p .cache
{ mypy && mypy ci/trust; } > .cache/types.txt 2>&1 &
types=$!

# Of the scenarios the cheapest of each requirement, judged by the truth alone: ci/conformance.sh runs them all, with
# torch's own DDP beside ddp_impl. Four workers for two cores: many tests wait for ranks that hang, die or start. Each
# begins with a fourth of the files, whose fixtures it makes once, and takes from the others when it has done its own.
status=0
step pytest -n 4 --dist worksteal --ddp-no-native --one-per-requirement "$@" || status=$?

echo "== mypy"
wait "$types" || status=1
cat .cache/types.txt
exit "$status"
