#!/usr/bin/env bash
# Builds the site into build/site: pages that people wrote, and pages made from the code and from results/. Then checks
# its links, and opens some pages in Chromium, unless it is called with --without-browser.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"

python -m pip install --quiet --disable-pip-version-check --constraint ci/constraints.txt \
    mkdocs mkdocs-material mkdocstrings-python playwright
python -m workshop site build/pages
NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet
python -m workshop.site.links build/site
python -m workshop.site.browser build/site --pictures build/pictures "$@"
