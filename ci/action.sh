#!/usr/bin/env bash
# The step of action.yml that tests: runs a profile (or merges the reports of its shards), compares with the last report,
# and writes junit.xml, report.html and comment.md beside report.json. Its inputs are the variables of action.yml.
# The status is 1 when the DDP does not conform or a verdict has regressed. A GitHub workflow reads it from $GITHUB_OUTPUT,
# and the script exits with 0 there, so that later steps can upload and comment; elsewhere it is the exit code.
set -euo pipefail

REPORT="${REPORT:-report}"
status=0
if [ -n "${MERGE:-}" ]; then
    mkdir -p "$REPORT"
    # shellcheck disable=SC2086  # a list of folders
    ddp-conformance report merge $MERGE --out "$REPORT/report.json" || status=$?
    ddp-conformance report summary "$REPORT"
    grep -q '"green": true' "$REPORT/report.json" || status=1
else
    arguments=(--ddp "${DDP:-ddp_impl}" --backend "${BACKEND:-gloo}" --profile "${PROFILE:-core}" --report "$REPORT")
    [ -z "${SHARD:-}" ] || arguments+=(--shard "$SHARD")
    [ "${BASELINE:-false}" != true ] || arguments+=(--baseline)
    [ -z "${EXPECTATIONS:-}" ] || arguments+=(--expectations "$EXPECTATIONS")
    ddp-conformance run "${arguments[@]}" || status=$?
fi
[ "$status" -le 1 ] || exit "$status"  # usage error or interrupted: there is no complete report

ddp-conformance report html "$REPORT" --out "$REPORT/report.html"
ddp-conformance report junit "$REPORT" --out "$REPORT/junit.xml"
comment=("$REPORT" --out "$REPORT/comment.md")
if [ -n "${LAST:-}" ] && [ -f "$LAST/report.json" ]; then
    comment+=(--last "$LAST")
    ddp-conformance report diff "$LAST" "$REPORT" || status=1
fi
ddp-conformance report markdown "${comment[@]}"
cat "$REPORT/comment.md" >> "${GITHUB_STEP_SUMMARY:-/dev/null}"
[ -n "${GITHUB_OUTPUT:-}" ] || exit "$status"
echo "status=$status" >> "$GITHUB_OUTPUT"
