"""What `headrace verify` has judged, what is to be judged next, and what was found. Plain state."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence

import numpy as np

#: What was found in a chunk: (row, stage, reason) each.
Found = list[tuple[int, str, str]]

#: The stage of a file without a verdict: it cannot be read, or has changed. No reject has it.
ERROR = "error"


class Tally:
    """Chunks are judged in the order of the listing. One that fails, because *a* sample cannot be read, says nothing of
    the others: each of its rows is then judged alone.

    Args:
        samples: of the listing.
        chunk: samples that are judged together.
    """

    def __init__(self, samples: int, chunk: int) -> None:
        self.samples = samples
        self.chunk = chunk
        self.chunks = -(-samples // chunk)
        self.judged = 0
        self.stages: Counter[str] = Counter()
        self._done = np.zeros(self.chunks, bool)
        self._found: dict[int, Found] = {}
        self._next = 0
        self._alone: deque[tuple[int, tuple[int, ...]]] = deque()
        self._partly: dict[int, tuple[int, Found]] = {}  # chunk judged row by row → rows left, found so far

    def rows(self, chunk: int) -> int:
        return min(self.chunk, self.samples - chunk * self.chunk)

    def take(self) -> tuple[int, tuple[int, ...] | None] | None:
        """The next chunk to be judged, and the rows of it (None: all); None if nothing is left to be taken."""
        if self._alone:
            return self._alone.popleft()
        while self._next < self.chunks:
            chunk, self._next = self._next, self._next + 1
            if not self._done[chunk]:
                return chunk, None
        return None

    def settle(self, chunk: int, only: Sequence[int] | None, found: Found) -> Found | None:
        """The rows are judged.

        Returns:
            What was found in the whole chunk, once all of it is judged.
        """
        count = self.rows(chunk) if only is None else len(only)
        self.judged += count
        self.stages.update(stage for _, stage, _ in found)
        left, before = self._partly.pop(chunk, (self.rows(chunk), []))
        found = sorted(before + found)
        if left > count:
            self._partly[chunk] = left - count, found
            return None
        self._done[chunk] = True
        if found:
            self._found[chunk] = found
        return found

    def fail(self, chunk: int, only: Sequence[int] | None, reason: str) -> Found | None:
        """A row of these could not be judged. Returns as `settle`."""
        rows = range(self.rows(chunk)) if only is None else only
        if len(rows) == 1:
            return self.settle(chunk, rows, [(rows[0], ERROR, reason)])
        self._alone += ((chunk, (row,)) for row in rows)
        return None

    def overrule(self, index: int, stage: str, reason: str) -> None:
        """Reject a sample that is judged, whatever was found."""
        chunk, row = divmod(index, self.chunk)
        before = self._found.get(chunk, [])
        self.stages.subtract(old for at, old, _ in before if at == row)
        self.stages[stage] += 1
        self._found[chunk] = sorted([*(one for one in before if one[0] != row), (row, stage, reason)])

    def found(self) -> Iterator[tuple[int, str, str]]:
        """(index, stage, reason) in the order of the listing."""
        for chunk in sorted(self._found):
            for row, stage, reason in self._found[chunk]:
                yield chunk * self.chunk + row, stage, reason
