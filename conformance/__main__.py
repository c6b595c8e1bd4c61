"""`python -m conformance` is `ddp-conformance`, for launchers that start Python modules."""

from conformance.cli import main

main(prog_name="ddp-conformance")
