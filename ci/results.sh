#!/usr/bin/env bash
# Checks the stored reports of a pull request: what is new in results/, and that what was there stays as it was.
#
#     bash ci/results.sh           # compared with origin/main
#     bash ci/results.sh COMMIT
#
# A change that adds reports may change nothing else: else it could change what checks them.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"

base="$(git merge-base "${1:-origin/main}" HEAD)"
others="$(git diff --name-only "$base" HEAD -- ':!results')"
if [ -z "$(git diff --name-only "$base" HEAD -- 'results/*/*')" ]; then
    echo "Nothing below results/ has changed."
elif [ -n "$others" ]; then
    echo "A change of results/ must change nothing else, but this one changes" $others >&2
    exit 1
fi
before="$(mktemp -d)"
trap 'rm -rf "$before"' EXIT
mkdir "$before/results"
[ -z "$(git ls-tree "$base" results)" ] || git archive "$base" results | tar -x -C "$before"
ddp-conformance report check results --since "$before/results"
