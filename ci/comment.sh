#!/usr/bin/env bash
# Puts $REPORT/comment.md below pull request $PULL of $GITHUB_REPOSITORY: one comment of ours for each job, $OF, which a
# later run changes. It is known by its first line and by its author; comments of others, of other tools too, stay.
# A pull request from a fork has a token that may not write: the comment is in the job's summary then.
set -euo pipefail

comments="repos/$GITHUB_REPOSITORY/issues/$PULL/comments"
MARKER="<!-- ddp-conformance: ${OF//[^A-Za-z0-9_.:, -]/ } -->"
export MARKER ME
body="$(mktemp)"
trap 'rm -f "$body"' EXIT
{ echo "$MARKER"; cat "$REPORT/comment.md"; } > "$body"

write() {
    local id
    ME="$(gh api graphql -f query='{viewer{login}}' --jq .data.viewer.login)" || return
    id="$(gh api --paginate "$comments" \
        --jq '.[] | select(.user.login == env.ME and (.body | startswith(env.MARKER))) | .id')" || return
    if [ -n "$id" ]; then
        gh api --method PATCH "repos/$GITHUB_REPOSITORY/issues/comments/${id%%$'\n'*}" -F "body=@$body" > /dev/null
    else
        gh api --method POST "$comments" -F "body=@$body" > /dev/null
    fi
}

write || echo "::notice::No comment: the token may not write, as in a pull request from a fork. See the job's summary."
