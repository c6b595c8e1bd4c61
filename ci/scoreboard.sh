#!/usr/bin/env bash
# Runs the same scenarios on several projects' DDPs and writes the table into a page, docs/scoreboard.md by default. Takes half an
# hour or more. Installs their libraries into a separate environment, because nothing else in the project needs them.
#
#     bash ci/scoreboard.sh              # the core profile at world size 2
#     PAGE=board.md bash ci/scoreboard.sh --profile core --world-size 4

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"
[ $# -gt 0 ] || set -- --profile core --world-size 2

OWN="$ROOT/.cache/scoreboard"
REPORTS="$OWN/reports"
[ -x "$OWN/bin/python" ] || python -m venv "$OWN"
install() {
    "$OWN/bin/python" -m pip install --quiet --disable-pip-version-check --constraint ci/constraints.txt "$@"
}
install setuptools --editable ".[suite]"
install --no-build-isolation --editable ".[scoreboard]"  # DeepSpeed's build imports the installed torch

boards=()
for subject in ddp_impl torch REPLICATE FSDP2_REPLICATE TORCHFT TORCHFT_PURE FAIRSCALE DEEPSPEED; do
    case "$subject" in
        ddp_impl | torch) ddp="$subject" ;;
        *) ddp="conformance.subjects.others:$subject" ;;
    esac
    # Exit code 1 means that the DDP breaks a requirement, which the table shows.
    "$OWN/bin/python" -m conformance run "$@" --ddp "$ddp" --no-native --quiet --report "$REPORTS/$subject" || [ $? -eq 1 ]
    boards+=("$REPORTS/$subject")
done
python -m workshop scoreboard "${boards[@]}" --into "${PAGE:-docs/scoreboard.md}"
