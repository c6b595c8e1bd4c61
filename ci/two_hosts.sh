#!/usr/bin/env bash
# Simulates two hosts of two ranks each with two network namespaces and a link between them, and runs the named chapters
# (default: gradients) on the four ranks with torchrun. CUT=1 cuts the link when the run first prints its progress.
#
#     sudo bash ci/two_hosts.sh                              # chapter gradients
#     sudo bash ci/two_hosts.sh accumulation --world-size 4  # arguments of `ddp-conformance run`
#     sudo CUT=1 bash ci/two_hosts.sh training --world-size 4  # reports a hang that names both sides, and ends
#
# Needs Linux, root, and `ip`. REPORT=folder receives the report.

set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -n "${VIRTUAL_ENV:-}" ] || source ci/environment.sh
REPORT="${REPORT:-report}"
[ $# -gt 0 ] || set -- gradients

NAME="ddpc$$"           # names this run's namespaces; several runs may share a machine
NETWORK="10.77.$(($$ % 250))"
FIRST="${NAME}a" SECOND="${NAME}b"

clean_up() {
    trap - EXIT
    kill "${SECOND_PID:-}" 2> /dev/null || true
    wait 2> /dev/null || true
    ip netns del "$FIRST" 2> /dev/null || true
    ip netns del "$SECOND" 2> /dev/null || true
}
trap clean_up EXIT

ip netns add "$FIRST"
ip netns add "$SECOND"
ip link add "${NAME}0" netns "$FIRST" type veth peer name "${NAME}1" netns "$SECOND"
ip -n "$FIRST" addr add "$NETWORK.1/24" dev "${NAME}0"
ip -n "$SECOND" addr add "$NETWORK.2/24" dev "${NAME}1"
for namespace in "$FIRST" "$SECOND"; do
    ip -n "$namespace" link set lo up
done
ip -n "$FIRST" link set "${NAME}0" up
ip -n "$SECOND" link set "${NAME}1" up

# host NAMESPACE HOSTNAME NODE ARGUMENTS...: starts torchrun in the namespace, under that host name.
host() {
    local namespace="$1" hostname="$2" node="$3"
    shift 3
    ip netns exec "$namespace" unshare --uts bash -c 'hostname "$0"; exec "$@"' "$hostname" \
        python -m torch.distributed.run --nnodes 2 --node-rank "$node" --nproc-per-node 2 \
        --master-addr "$NETWORK.1" --master-port 29500 \
        -m conformance run --attach --report "$REPORT" "$@"
}

# Passes the output of host-a on, and cuts the link when host-a first prints the run's progress.
watch() {
    local line
    while IFS= read -r line; do
        printf '%s\n' "$line"
        if [ -n "${CUT:-}" ] && [[ "$line" == *" scenarios, "*" elapsed"* ]]; then
            CUT=
            ip -n "$SECOND" link set "${NAME}1" down
            echo "Cut the link."
        fi
    done
    if [ -n "${CUT:-}" ]; then
        echo "The run ended before it printed its progress, so the link was not cut; choose a longer run."
        return 1
    fi
}

status=0
host "$SECOND" host-b 1 "$@" &
SECOND_PID=$!
host "$FIRST" host-a 0 "$@" 2>&1 | watch || status=$?
second_status=0
wait "$SECOND_PID" || second_status=$?
echo "host-a exited with $status, host-b with $second_status."
exit "$status"
