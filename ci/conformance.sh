#!/usr/bin/env bash
# The main job: judges ddp_impl, with torch's own DDP in the next column, and says where the report lies.
# Makes its environment first. Arguments go to `ddp-conformance run`, for example `--ddp my_package:MyDDP`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"

ddp-conformance run --report report "$@"
