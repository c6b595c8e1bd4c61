#!/usr/bin/env bash
# The main job: judges ddp_impl, with torch's own DDP in the next column, and says where the report lies.
# Makes its environment first. Arguments go to `ddp-conformance run`, for example `--ddp my_package:MyDDP`; a profile
# among them takes the place of `full`, say `--profile compiled`, whose modules take longer to compile than to train.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"

ddp-conformance run --report report --profile full "$@"
