#!/usr/bin/env bash
# The nightly job: runs every scenario that judges a DDP on one backend, compares with last night's report, and writes a badge and pages.
#
#     bash ci/nightly.sh                 # gloo
#     bash ci/nightly.sh nccl            # a machine with GPUs
#     LAST=folder bash ci/nightly.sh     # compares with last night's report in that folder
#     MUTANTS=1 bash ci/nightly.sh       # also runs the mutants: does the suite still detect each of them, and those
#                                        # that a machine makes of the definition and of two DDPs?
#     EXPLORE=1 bash ci/nightly.sh       # also explores trainings of that seed for ten minutes, and keeps what failed
#     DEVICES=1 bash ci/nightly.sh       # also runs profiles core, gpu and full on the simulated device
#     TESTS=1 bash ci/nightly.sh         # also runs the tests that take too long for every push: every hostile subject,
#                                        # processes stopped at every message, every gradient treated as large, ...
#     TRUST=1 bash ci/nightly.sh         # also the programs of ci/trust/: faults, limits, other orders, slow ranks
#
#     BENCH=1 bash ci/nightly.sh         # also compares step times with those of torch's DDP
#     RESULTS=results bash ci/nightly.sh # also stores the report there, for `ddp-conformance report site` and the site;
#                                        # with KEY=FILE (a private key) signed, as docs/howto/submit.md says
#
# The order of the scenarios changes every night, because verdicts must not depend on it; the date is the seed.
# NIGHT=folder receives the report (default: nightly). Exits with 1 when the DDP does not conform, when a verdict has
# regressed since last night, or when the suite misses a mutant.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"

BACKEND="${1:-gloo}"
[ $# -eq 0 ] || shift
NIGHT="${NIGHT:-nightly}"

status=0
ddp-conformance run --backend "$BACKEND" --quiet --report "$NIGHT" --order shuffled --seed "$(date +%Y%m%d)" "$@" || status=$?
[ "$status" -le 1 ] || exit "$status"  # usage error or interrupted: there is no complete report to compare

for kind in badge:badge.svg junit:junit.xml markdown:summary.md; do
    ddp-conformance report "${kind%%:*}" "$NIGHT" --out "$NIGHT/${kind#*:}"
done
[ -z "${RESULTS:-}" ] || bash ci/store.sh "$NIGHT" || status=1
if [ -n "${LAST:-}" ] && [ -f "$LAST/report.json" ]; then
    ddp-conformance report diff "$LAST" "$NIGHT" | tee "$NIGHT/diff.txt" || status=1
else
    echo "No report of last night to compare with."
fi
if [ -n "${MUTANTS:-}" ]; then
    ddp-conformance mutants --out "$NIGHT/detected.toml" --kills "$NIGHT/kills.toml" || status=1
    ddp-conformance mutants --definition --keep "$NIGHT/definition" | tee "$NIGHT/definition.txt" || status=1
    for ddp in ddp_impl fixtures.small_ddp:SUBJECT; do
        ddp-conformance mutants --generated --of "$ddp" --sample 200 --seed "$(date +%Y%m%d)" --keep "$NIGHT/of-$ddp" \
            | tee "$NIGHT/of-$ddp.txt" || status=1
    done
fi
if [ -n "${EXPLORE:-}" ]; then
    ddp-conformance explore --backend "$BACKEND" --no-native --seed "$(date +%Y%m%d)" --examples 20000 --seconds 600 \
        --failures 20 --report "$NIGHT/explored" | tee "$NIGHT/explored.txt" || status=1
fi
if [ -n "${TESTS:-}" ]; then
    pytest --nightly -m nightly -n 2 || status=1
    # The suite's models are small: every scenario once more on a reducer that treats all gradients as large.
    ddp-conformance run --ddp conformance.mutants.unchanged:TreatsAllAsLarge --no-native --quiet \
        --report "$NIGHT/all-large" || status=1
    # Other DDPs are imported by ranks, at different times; ddp_impl before there are any, unless it has another name.
    renamed="$(mktemp -d)"
    git archive HEAD ddp_impl | tar -x -C "$renamed" --transform 's/^ddp_impl/other_ddp/'
    grep -rl ddp_impl "$renamed" | xargs sed -i 's/\bddp_impl\b/other_ddp/g'
    PYTHONPATH="$renamed" ddp-conformance run --ddp other_ddp:DistributedDataParallel --no-native --quiet \
        --report "$NIGHT/renamed" || status=1
    rm -r "$renamed"
fi
if [ -n "${DEVICES:-}" ]; then
    for seed in 1 "$(date +%Y%m%d)"; do  # how the device rounds must not matter
        for profile in core gpu; do
            DDP_CONFORMANCE_SIM_SEED="$seed" ddp-conformance run --backend sim --profile "$profile" --quiet \
                --report "$NIGHT/sim-$profile-$seed" || status=1
        done
    done
    ddp-conformance run --backend sim-alone --profile full --no-native --quiet --report "$NIGHT/sim-full" || status=1
    ddp-conformance run --backend sim-late --profile gpu --no-native --quiet --report "$NIGHT/sim-late" || status=1
fi
if [ -n "${TRUST:-}" ]; then
    for program in fault_sweep.py hardships.py "slow_ranks.py --seconds 1800"; do
        # shellcheck disable=SC2086  # a program and its arguments
        python ci/trust/$program | tee -a "$NIGHT/trust.txt" || status=1
    done
    # Once more in another order on a machine that is busy with other things: no verdict may differ, either way.
    python ci/trust/load.py --times 4 ddp-conformance run --backend "$BACKEND" --quiet --report "$NIGHT/busy" \
        --order shuffled --seed 7 "$@" || true
    python ci/trust/load.py --times 30 ddp-conformance run --backend "$BACKEND" --profile quick --no-native --quiet \
        --report "$NIGHT/loaded" || status=1
    for both in "$NIGHT $NIGHT/busy" "$NIGHT/busy $NIGHT"; do
        # shellcheck disable=SC2086  # two reports
        ddp-conformance report diff $both | tee -a "$NIGHT/trust.txt" || status=1
    done
fi
if [ -n "${BENCH:-}" ]; then
    for ranks in 2 4; do
        ddp-conformance bench --ddp ddp_impl --backend "$BACKEND" --world-size "$ranks" --workload all --memory --gate \
            --plots "$NIGHT/plots$ranks" --out "$NIGHT/ratios$ranks.json" | tee "$NIGHT/bench$ranks.txt" || status=1
    done
    ddp-conformance bench --ddp ddp_impl --backend "$BACKEND" --growth --gate --plots "$NIGHT/growth" --out "$NIGHT/growth.json" |
        tee "$NIGHT/growth.txt" || status=1
fi
exit "$status"
