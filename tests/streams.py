"""A double of a device's stream: work is queued, and runs when somebody waits for the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Stream:
    """Runs what was queued in its order, as late as it may: when an event behind it is waited for."""

    def __init__(self) -> None:
        self._queued: deque[Callable[[], object]] = deque()
        self._begun = 0

    def __len__(self) -> int:
        """Count the work that has not run."""
        return len(self._queued)

    def queue(self, work: Callable[[], object]) -> None:
        """Queue work, as a kernel launch does."""
        self._queued.append(work)

    def record(self) -> StreamEvent:
        """Return an event that is reached when everything queued so far has run."""
        return StreamEvent(self, self._begun + len(self._queued))

    def run(self, until: int | None = None) -> None:
        """Run what is queued, or the first ``until`` ever queued."""
        while self._queued and (until is None or self._begun < until):
            self._begun += 1
            self._queued.popleft()()


class StreamEvent:
    """A point of a stream."""

    def __init__(self, stream: Stream, until: int) -> None:
        self._stream = stream
        self._until = until

    def synchronize(self) -> None:
        """Return when the stream has come here."""
        self._stream.run(self._until)
