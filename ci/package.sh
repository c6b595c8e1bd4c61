#!/usr/bin/env bash
# Builds wheel and sdist, and walks both in empty environments:
#
#     bash ci/package.sh
#     REPOSITORY=https://github.com/who/what bash ci/package.sh    # with the URLs of the repository in the metadata
#
# Leaves them in dist/. Environments lie in .cache/package/ and are created anew each time. Prints sizes.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"

WALK="$ROOT/.cache/package"
TREE="$WALK/tree"
rm -rf "$WALK" dist
mkdir -p "$TREE"
git ls-files -z | xargs -0 tar --create --file - | tar --extract --file - --directory "$TREE"  # and nothing that lies about
[ -z "${REPOSITORY:-}" ] || python ci/release_metadata.py "$TREE" "$REPOSITORY"
python -m build --outdir dist "$TREE" > "$WALK/build.txt" 2>&1 || { cat "$WALK/build.txt" >&2; exit 1; }
wheel="$(echo dist/*.whl)" sdist="$(echo dist/*.tar.gz)"

environment() { # environment NAME REQUIREMENT...: an empty one with these packages
    local name="$1"
    shift
    python -m venv "$WALK/$name"
    "$WALK/$name/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
        --constraint ci/constraints.txt "$@"
}

kilobytes() { du -k --apparent-size -s "$@" | awk '{ sum += $1 } END { print sum " kB" }'; }

says() { # says CODE PATTERN COMMAND...: the command ends with the exit code, and its output has the pattern
    local code="$1" pattern="$2" status=0
    shift 2
    "$@" > "$WALK/said.txt" 2>&1 || status=$?
    grep -q -- "$pattern" "$WALK/said.txt" || { echo "expected '$pattern' from $*; it said:" >&2; cat "$WALK/said.txt" >&2; exit 1; }
    [ "$status" -eq "$code" ] || { echo "expected exit code $code of $*, got $status:" >&2; cat "$WALK/said.txt" >&2; exit 1; }
}

cat > "$WALK/train.py" << 'PYTHON'
import os
import sys

import torch
import torch.distributed as dist
from ddp_impl import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
weights = [torch.empty(2, 4) for _ in range(2)]
dist.all_gather(weights, model.module.weight.detach())
assert torch.equal(*weights), weights
assert not {"click", "rich", "msgspec", "trio", "conformance"} & set(sys.modules)
if dist.get_rank() == 0:
    print("two ranks trained the same parameters")
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # torch may abort a process that ends right behind its last collective, with any DDP
PYTHON

environment alone "$wheel"
cd "$WALK"  # so that Python finds what is installed, and not the checkout
says 0 "two ranks trained the same parameters" \
    "$WALK/alone/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 train.py
says 2 "pip install 'ddp-conformance\[suite\]'" "$WALK/alone/bin/ddp-conformance" run
echo "wheel alone: ddp_impl trains on 2 ranks with torch alone; ddp-conformance names its extra"
"$WALK/alone/bin/python" -m pip list --disable-pip-version-check --format freeze | sort > alone.txt

for what in wheel sdist; do
    cd "$ROOT" && environment "$what" "${!what}[suite]" && cd "$WALK"
    says 0 "Every rung holds" "$WALK/$what/bin/ddp-conformance" smoke --backend gloo
    says 0 "^ddp_impl keeps " "$WALK/$what/bin/ddp-conformance" run GRAD-01 --world-size 2 --no-native --report "$what-report"
    "$WALK/$what/bin/python" -c 'import conformance.test_chapters'
    echo "$what with the extra suite: smoke, run GRAD-01 and the pytest module work"
done
# A certificate's hash of the suite is the same for a checkout and an installed copy.
hash='from conformance.run.sources import hash_of_package as h; print(h("conformance"), h("ddp_impl"))'
for installed in "$WALK/wheel" "$WALK/sdist"; do
    cmp <(cd "$TREE" && "$installed/bin/python" -c "$hash") <(cd "$WALK" && "$installed/bin/python" -P -c "$hash")
done

cd "$ROOT"
echo "$(kilobytes "$wheel") wheel, $(kilobytes "$sdist") sdist"
site="$(echo "$WALK"/wheel/lib/python3*/site-packages)"
echo "$(kilobytes "$site/ddp_impl") ddp_impl installed, $(kilobytes "$site/conformance") conformance installed"
echo "$(wc -l < "$WALK/alone.txt") packages with torch alone, $("$WALK/wheel/bin/python" -m pip list --disable-pip-version-check --format freeze | wc -l) with the suite"
