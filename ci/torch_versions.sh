#!/usr/bin/env bash
# Judges ddp_impl, and torch's DDP beside it, on several versions of torch; stores what it finds in
# ci/torch_versions, and makes docs/torch_versions.md of all that is stored there.
#
#     bash ci/torch_versions.sh 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0          # names, smoke and core
#     PROFILES="core backend compiled parallel gpu upstream" bash ci/torch_versions.sh 2.15.0
#     PROFILES=full OPTIONS=--no-native bash ci/torch_versions.sh 2.15.0    # ddp_impl alone, in half the time
#     PROFILES=mutants bash ci/torch_versions.sh 2.15.0                     # of what CI's torch lacks: are they noticed?
#     PROFILES=quick bash ci/torch_versions.sh 2.15.0@3.13                  # on python3.13
#     PIP_CONFIG_FILE=/dev/null bash ci/torch_versions.sh 2.15.0            # where pip is configured for other versions
#
# VERSIONS=folder (default: .cache/torch_versions) keeps an environment and the reports of each version: a run that was
# killed or interrupted goes on where it was (`timeout 400 bash ci/torch_versions.sh ...`, again and again), and what is
# there is not run again. A version that cannot be installed is noted and left out. Some are CUDA builds of gigabytes.
# Exits with 1 when a version could not be installed or ddp_impl fails.

set -uo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT" || exit 2
[ $# -gt 0 ] || { echo "Name versions of torch: bash ci/torch_versions.sh 2.13.0 2.15.0" >&2; exit 2; }
FOLDER="${VERSIONS:-$ROOT/.cache/torch_versions}"
PYTHON="${PYTHON:-python3}"
export PYTHONPATH="$ROOT"  # versions share the checkout, which is installed in none

# torch's versions want different setuptools; all else is what CI has.
install() {
    local venv="$1" version="${2%@*}" python="$PYTHON"
    [ "$version" = "$2" ] || python="python${2#*@}"
    "$python" -m venv --clear "$venv" &&
        grep -vE '^(torch|setuptools)==' ci/constraints.txt > "$venv/constraints.txt" &&
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
            --constraint "$venv/constraints.txt" "torch==$version" --requirement <("$PYTHON" -c "
import tomllib
print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['suite'], sep='\n')") &&
        touch "$venv/ready"
}

judge() {
    local python="$1" folder="$2" profile="$3" ended=0 arguments
    read -ra arguments <<< "--profile $3 ${OPTIONS:-}"
    [ "$profile" != gpu ] || arguments+=(--backend sim)
    case "$profile" in
        smoke) "$python" -m conformance smoke --ddp ddp_impl > "$folder/smoke.txt" || ended=$? ;;
        mutants) "$python" -m conformance mutants --newer > "$folder/mutants.txt" || ended=$? ;;
        upstream) "$python" -m conformance upstream --report "$folder/upstream.json" > "$folder/upstream.txt" || ended=$? ;;
        *)
            [ -z "$(find "$folder/$profile" -name 'report.jo*' -o -name report.json 2> /dev/null)" ] || arguments+=(--resume)
            "$python" -m conformance run --quiet --report "$folder/$profile" "${arguments[@]}" > "$folder/$profile.txt" || ended=$?
            ;;
    esac
    [ "$ended" != 130 ] || exit 130  # interrupted: the next run of this script goes on
    echo "$ended" > "$folder/$profile.status"
}

status=0
for version in "$@"; do
    folder="$FOLDER/$version"
    mkdir -p "$folder"
    if [ ! -f "$folder/venv/ready" ] && ! install "$folder/venv" "$version" > "$folder/install.txt" 2>&1; then
        echo "torch $version cannot be installed: $(tail -n 1 "$folder/install.txt")" >&2
        status=1
        continue
    fi
    python="$folder/venv/bin/python"
    "$python" -m ddp_impl.torch_internals > "$folder/names.txt" || status=1
    for profile in ${PROFILES:-smoke core}; do
        [ -f "$folder/$profile.status" ] || judge "$python" "$folder" "$profile"
        [ "$(cat "$folder/$profile.status")" = 0 ] || { echo "torch $version, $profile: see $folder" >&2; status=1; }
    done
done
[ -z "${python:-}" ] || "$python" -m workshop versions "$FOLDER" || status=1
exit "$status"
