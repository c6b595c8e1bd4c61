#!/usr/bin/env bash
# The main job: tests ddp_impl, runs torch's own DDP beside it, and prints the report's path.
# Creates its environment first. Passes its arguments to `ddp-conformance run`, for example `--ddp my_pkg:MyDDP`. The
# profile is `full` unless the arguments name another one, such as `--profile compiled`, which full leaves out because its
# modules take longer to compile than to train.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"

ddp-conformance run --report report --profile full "$@"
