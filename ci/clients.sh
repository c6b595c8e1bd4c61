#!/usr/bin/env bash
# Runs training scripts as people write them, with torch's DDP and with ddp_impl, and compares what they record; and
# trainings of other packages under `parity`. Takes half an hour. Installs the scripts' libraries into a separate
# environment, because nothing else needs them.
#
#     bash ci/clients.sh                          # all of fixtures/scripts
#     bash ci/clients.sh -k "gan or lightning"    # arguments go to pytest
#
# Exits with 1 when a client differs and no documented fault of torch's DDP explains it.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"

OWN="$ROOT/.cache/clients"
[ -x "$OWN/bin/python" ] || python -m venv "$OWN"
"$OWN/bin/python" -m pip install --quiet --disable-pip-version-check --constraint ci/clients-constraints.txt \
    --editable ".[clients]"
# PyPI's torchvision is built for torch with CUDA. Beside the CPU's torch its operators are missing, which none of the
# scripts calls, and it is only the file that describes them to the compiler that fails to import.
if ! "$OWN/bin/python" -c "import torchvision" 2> /dev/null; then
    : > "$("$OWN/bin/python" -c 'import importlib.util as i; print(i.find_spec("torchvision").submodule_search_locations[0])')/_meta_registrations.py"
fi
"$OWN/bin/python" -m pytest fixtures/scripts --verbose "$@"
