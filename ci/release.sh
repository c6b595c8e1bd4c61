#!/usr/bin/env bash
# Checks that a tag can be released, and prints its release notes: the section of CHANGELOG.md.
#
#     bash ci/release.sh v0.2.0
#
# Exits with 1 where the tag is not the version of pyproject.toml, or the changelog has no dated section for it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tag="${1:?the tag, such as v0.2.0}"
version="$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)"
if [ "$tag" != "v$version" ]; then
    echo "tag $tag does not name the version of pyproject.toml, $version: tag v$version, or change the version" >&2
    exit 1
fi
if ! grep -qE "^## $version \([0-9]{4}-[0-9]{2}-[0-9]{2}\)$" CHANGELOG.md; then
    echo "CHANGELOG.md has no heading '## $version (YYYY-MM-DD)': write the date of the release there" >&2
    exit 1
fi
awk -v heading="## $version " 'index($0, heading) == 1 { on = 1; next } /^## / { on = 0 } on' CHANGELOG.md
