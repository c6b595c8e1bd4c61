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
# Types are checked on one core while the tests begin.
mkdir -p .cache
{ mypy && mypy ci/trust; } > .cache/types.txt 2>&1 &
types=$!

# Of the scenarios profile quick, which kills nearly all that profile full kills, judged by the truth alone:
# ci/conformance.sh runs profile full, with torch's own DDP beside ddp_impl, and the nightly all profiles. Three workers
# for two cores: many tests wait for ranks that hang, die or start. Each begins with a third of the files, whose
# fixtures it makes once, and takes from the others when it has done its own. Plugins are named: of a distribution whose
# plugin pytest finds by itself, here the whole suite, it rewrites the asserts of every module, in each worker.
plugins=(--disable-plugin-autoload -p xdist.plugin -p pytest_timeout -p _hypothesis_pytestplugin -p conformance.pytest_plugin)
# First pytest compiles all modules and makes the scenarios, and keeps both: else each of the workers would do so at once.
echo "== pytest --collect-only"
pytest "${plugins[@]}" --collect-only -qq --ddp-profile quick > /dev/null || true  # the tests report what is wrong
status=0
step pytest "${plugins[@]}" -n 3 --dist worksteal --ddp-no-native --ddp-profile quick "$@" || status=$?

echo "== mypy"
wait "$types" || status=1
cat .cache/types.txt
exit "$status"
