#!/usr/bin/env bash
# Builds the site into build/site: pages that people wrote, and pages made from the code and from results/. A link that
# leads nowhere fails.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"

python -m pip install --quiet --disable-pip-version-check --constraint ci/constraints.txt \
    mkdocs mkdocs-material mkdocstrings-python
python -m workshop site build/pages
NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet
