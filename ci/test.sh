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
step shellcheck --severity=warning ci/*.sh
# Types are checked on one core while the tests begin. Before that Python compiles the modules and makes the scenarios,
# and keeps both: else each of the workers would do so at once.
mkdir -p .cache
{ mypy && mypy ci/trust; } > .cache/types.txt 2>&1 &
types=$!
echo "== ddp-conformance list"
ddp-conformance list > /dev/null

# Of the scenarios profile quick, which kills nearly all that profile full kills, judged by the truth alone:
# ci/conformance.sh runs profile full, with torch's own DDP beside ddp_impl, and the nightly all profiles. Four workers
# for two cores: many tests wait for ranks that hang, die or start. Each begins with a fourth of the files, whose
# fixtures it makes once, and takes from the others when it has done its own. Plugins are named: of a distribution whose
# plugin pytest finds by itself, here the whole suite, it rewrites the asserts of every module, in each worker.
plugins=(--disable-plugin-autoload -p xdist.plugin -p pytest_timeout -p _hypothesis_pytestplugin -p conformance.pytest_plugin)
status=0
step pytest "${plugins[@]}" -n 4 --dist worksteal --ddp-no-native --ddp-profile quick "$@" || status=$?

echo "== mypy"
wait "$types" || status=1
cat .cache/types.txt
exit "$status"
