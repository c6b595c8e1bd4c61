"""What is read of a rank that has ended: the end of what it printed says why."""

from pathlib import Path

from conformance.workers.autopsy import tail
from conformance.workers.messages import Seat


def test_frames_of_cpp_do_not_push_the_message_out(tmp_path: Path) -> None:
    seat = Seat(0, 1, "gloo", directory=str(tmp_path))
    frames = [f"frame #{number}: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7f39)" for number in range(90)]
    lines = ["[rank0]: what():  Watchdog caught collective operation timeout", *frames, "", "Exception raised from run"]
    Path(seat.file("output")).write_text("\n".join(lines))
    assert tail(seat) == "[rank0]: what():  Watchdog caught collective operation timeout\n\nException raised from run"
