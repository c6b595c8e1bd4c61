#!/usr/bin/env bash
# Stores reports in results/, signed. The site makes its pages about behaviours, pairs and devices from what lies there.
#
#     KEY=key.pem bash ci/store.sh                  # runs every scenario that judges a DDP, torch's beside it: hours
#     KEY=key.pem bash ci/store.sh report nightly   # stores these reports and runs nothing
#     RESULTS=folder KEY=key.pem bash ci/store.sh   # stores elsewhere than in results/; without a KEY, unsigned
#
# Runs leave their reports in report/BACKEND-PROFILE. Exits with 1 when a report is not accepted, or a DDP does not
# conform; a report of one that does not is stored as well.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"

status=0
if [ $# -eq 0 ]; then
    for run in "gloo full" "gloo compiled" "gloo parallel" "sim gpu"; do
        backend="${run% *}" profile="${run#* }" code=0
        ddp-conformance run --backend "$backend" --profile "$profile" --quiet --report "report/$backend-$profile" || code=$?
        [ "$code" -le 1 ] || exit "$code" # usage error or interrupted: there is no complete report to store
        [ "$code" -eq 0 ] || status=1
        set -- "$@" "report/$backend-$profile"
    done
fi
for report in "$@"; do
    sent="$(mktemp -d)" # a signature is of a folder with nothing else in it
    cp "$report/report.json" "$sent"
    [ -z "${KEY:-}" ] || ddp-conformance sign "$sent" --key "$KEY"
    # shellcheck disable=SC2046  # an option, or none
    ddp-conformance report accept "$sent" --into "${RESULTS:-results}" $([ -n "${KEY:-}" ] || echo --unsigned) || status=1
    rm -r "$sent"
done
exit "$status"
