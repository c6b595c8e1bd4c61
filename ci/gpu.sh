#!/usr/bin/env bash
# Everything about GPUs in one command: smoke; profiles backend, core, gpu and full with one rank and with 2 to 4 on one GPU;
# step times with one rank; and OUT/gpu.md, which says which verdicts there were.
#
#     bash ci/gpu.sh                        # on a machine with a GPU: the backend is nccl
#     bash ci/gpu.sh --backend sim          # on the simulated device: tests this script
#     bash ci/gpu.sh --wheels wheels        # without a network: installs what that folder holds, into .venv
#     bash ci/gpu.sh -- GRAD-01 DEV-01      # passes what follows to `ddp-conformance run`
#     PROFILES="core gpu" RANKS="1" OUT=folder PAGE=file bash ci/gpu.sh
#
# A torch that is installed already is used as it is, from PYTHON (default: python3), be it another than the pinned one;
# this package is then found through PYTHONPATH. On a machine with a network and the same Python,
# `pip download -d wheels -c ci/constraints.txt . setuptools` brings the wheels.
#
#     bash ci/gpu.sh --compare nccl-legacy,nccl2    # profile backend on both: what the second breaks, and what it mends
#
# With nccl, the default of --compare is these two where the installed torch has both (from 2.14 on), else nothing.
# Reports go to OUT (default: gpu). Exits with 1 when ddp_impl or the backend does not conform, or smoke finds it broken.

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

BACKEND=nccl WHEELS="" COMPARE=""
while [ $# -gt 0 ]; do
    case "$1" in
        --backend) BACKEND="$2"; shift 2 ;;
        --compare) COMPARE="$2"; shift 2 ;;
        --wheels) WHEELS="$(cd "$2" && pwd)"; shift 2 ;;
        --) shift; break ;;
        *) echo "unknown argument $1; the top of $0 lists them" >&2; exit 2 ;;
    esac
done
OUT="${OUT:-gpu}"
PAGE="${PAGE:-$OUT/gpu.md}" PYTHON="${PYTHON:-python3}"

if [ -n "$WHEELS" ]; then
    "$PYTHON" -m venv "$ROOT/.venv"
    PYTHON="$ROOT/.venv/bin/python"
    "$PYTHON" -m pip install --quiet --no-index --find-links "$WHEELS" --editable "${ROOT}[suite]"
elif ! "$PYTHON" -c 'import torch, click, rich, msgspec, jinja2, hypothesis, trio' 2> /dev/null; then
    source "$ROOT/ci/environment.sh"
    PYTHON=python
fi
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
ddp() { "$PYTHON" -m conformance "$@"; }

mkdir -p "$OUT"
ddp doctor > "$OUT/doctor.txt" || true
ddp smoke --backend "$BACKEND" | tee "$OUT/smoke.txt"

status=0
reports=()
for profile in ${PROFILES:-backend core gpu full}; do
    for ranks in ${RANKS:-1 2,3,4}; do  # one rank by itself: what several ranks on one GPU do must not cost its verdicts
        sizes=()
        for size in ${ranks//,/ }; do sizes+=(--world-size "$size"); done
        ended=0
        ddp run --backend "$BACKEND" --profile "$profile" "${sizes[@]}" --quiet --report "$OUT/$profile-$ranks" "$@" || ended=$?
        [ "$ended" -le 1 ] || exit "$ended"  # usage error or interrupted: there is no report
        [ "$ended" -eq 0 ] || status=1
        reports+=("$OUT/$profile-$ranks")
    done
done
if [ -z "$COMPARE" ] && [ "$BACKEND" = nccl ]; then
    COMPARE="$("$PYTHON" -c '
from importlib.metadata import entry_points
names, both = entry_points(group="torch.distributed.backends").names, ("nccl-legacy", "nccl2")
print(",".join(both) if names >= {*both} else "")')"
fi
for backend in ${COMPARE//,/ }; do
    ended=0
    ddp run --backend "$backend" --profile backend --quiet --report "$OUT/of-$backend" "$@" || ended=$?
    [ "$ended" -le 1 ] || exit "$ended"
done
ddp bench --ddp ddp_impl --backend "$BACKEND" --world-size 1 --rounds "${ROUNDS:-40}" --out "$OUT/bench.json" | tee "$OUT/bench.txt"
{
    echo "# On an accelerator"
    if [[ "$BACKEND" == sim* ]]; then echo; echo "The simulated device: this shows that the script works, and nothing about NCCL."; fi
    for report in "${reports[@]}"; do printf '\n## %s\n\n' "$(basename "$report")"; ddp report markdown "$report"; done
    if [ -n "$COMPARE" ]; then
        printf '\n## %s\n\n' "From ${COMPARE/,/ to }, profile backend"
        ddp report diff "$OUT/of-${COMPARE%,*}" "$OUT/of-${COMPARE#*,}" | sed 's/^/    /' || [ $? -eq 1 ]  # it regressed
    fi
    printf '\nStep times with one rank, as ratios to those of the DDP of torch:\n\n'
    sed 's/^/    /' "$OUT/bench.txt"
} > "$PAGE"
echo "Wrote $PAGE."
exit "$status"
