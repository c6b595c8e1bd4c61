"""A clock for tests of what is measured by one, so that they are exact on a machine of any load."""


class Clock:
    """Stands for the module `time`; goes on only while somebody sleeps.

    It begins at a round number: sums of halves and quarters are exact then, and of a real clock only mostly.
    """

    def __init__(self) -> None:
        self.at = 100.0

    def monotonic(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds
