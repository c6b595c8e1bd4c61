#!/usr/bin/env bash
# A night's run: everything on one backend, the difference from last night, a badge, and a page to look at.
#
#     bash ci/nightly.sh                 # gloo
#     bash ci/nightly.sh nccl            # a machine with GPUs
#     LAST=folder bash ci/nightly.sh     # last night's report folder; without it there is nothing to compare
#     MUTANTS=1 bash ci/nightly.sh       # also: does the suite still notice the DDPs that are wrong on purpose?
#
# Scenarios run in an order that is new every night, with the date as its seed: verdicts must not depend on it.
# NIGHT=folder is where this night's report goes (default: nightly). Ends with 1 when the DDP does not conform or when
# something has regressed since last night.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"

BACKEND="${1:-gloo}"
[ $# -eq 0 ] || shift
NIGHT="${NIGHT:-nightly}"

status=0
ddp-conformance run --backend "$BACKEND" --quiet --report "$NIGHT" --order shuffled --seed "$(date +%Y%m%d)" "$@" || status=$?
[ "$status" -le 1 ] || exit "$status"  # a mistake in the question, or interrupted: there is nothing to compare

for kind in badge:badge.svg junit:junit.xml markdown:summary.md; do
    ddp-conformance report "${kind%%:*}" "$NIGHT" --out "$NIGHT/${kind#*:}"
done
if [ -n "${LAST:-}" ] && [ -f "$LAST/report.json" ]; then
    ddp-conformance report diff "$LAST" "$NIGHT" | tee "$NIGHT/diff.txt" || status=1
else
    echo "No report of last night to compare with."
fi
if [ -n "${MUTANTS:-}" ]; then
    ddp-conformance mutants --out "$NIGHT/detection.md" || status=1
fi
exit "$status"
