"""Options that a certified run refuses."""

from pathlib import Path

from conformance.errors import ReportError
from conformance.run.order import LISTED
from conformance.spec.quick import QUICK
from conformance.suite import Selection


def refuse_to_certify(
    profile: str,
    selection: Selection,
    shard: str,
    order: str,
    known_failures: Path | None,
    baseline: bool,
    no_native: bool,
    fail_fast: bool,
) -> None:
    """Raise `ReportError` for every option that would make a certified run another one than everybody's."""
    if profile == QUICK:
        raise ReportError("profile quick is a part of full, at which nothing conforms; certify core or full")
    if not profile:
        raise ReportError("--certified needs a --profile: a certificate says at which level a DDP conforms")
    narrowed = {
        str(selection): selection != Selection(),
        "--shard": bool(shard),
        "--order": order != LISTED.name,
        "--expectations": known_failures is not None,
        "--baseline": baseline,
        "--no-native": no_native,
        "--fail-fast": fail_fast,
    }
    if given := [option for option, is_given in narrowed.items() if is_given]:
        raise ReportError(f"--certified runs a whole profile with nothing excused; leave out {', '.join(given)}")
