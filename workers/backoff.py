"""When something that failed is tried again: later each time, until it has worked for a while. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

#: Seconds for which something must have worked to count as mended.
STEADY = 60.0


class Backoff:
    """
    Args:
        delays: seconds before the next try after the first failure, the second …; the last one from there on.
    """

    def __init__(self, delays: Sequence[float]) -> None:
        self._delays = delays
        self.failures = 0  # in a row
        self.next = 0.0

    def failed(self, now: float, worked: float = 0.0) -> float:
        """It has failed, after it had worked for so many seconds; the seconds until it is to be tried again."""
        self.failures = 1 if worked >= STEADY else self.failures + 1
        delay = self._delays[min(self.failures, len(self._delays)) - 1]
        self.next = now + delay
        return delay

    def due(self, now: float) -> bool:
        return now >= self.next
