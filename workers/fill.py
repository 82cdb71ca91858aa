"""What is left to do of one chunk when workers die over it, and which of its rows is to blame. No I/O.

A dead worker tells little: it may have been killed by the machine (memory, an operator, a test) while it rendered a
perfectly good picture. So the rows it had begun become *suspects*; the others are rendered first, then each suspect
alone; and only a row that was being rendered alone when its worker died, twice, is *convicted*.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from headrace.protocol import RowReject

#: Deaths while a row was rendered alone that convict it.
STRIKES = 2
#: Deaths over one chunk with no row begun, after which the chunk fails: it is the chunk, or the machine.
UNEXPLAINED = 5


class GaveUp(Exception):
    """Workers die over this chunk and no row is to blame."""


class Fill:
    """
    Args:
        rows: of the chunk that are wanted.
    """

    def __init__(self, rows: Iterable[int]) -> None:
        self.rejects: list[RowReject] = []
        self._todo = set(rows)
        self._strikes: dict[int, int] = {}
        self._unexplained = 0

    @property
    def done(self) -> bool:
        return not self._todo

    @property
    def suspects(self) -> set[int]:
        return self._todo & self._strikes.keys()

    def part(self) -> tuple[int, ...]:
        """The rows that the next worker is to render."""
        clear = self._todo - self._strikes.keys()
        return tuple(sorted(clear)) or (min(self._todo),)

    def rendered(self, part: Collection[int], rejects: list[RowReject]) -> None:
        """A worker has answered for the part."""
        self._todo -= set(part)
        self.rejects += rejects

    def died(self, part: Collection[int], begun: Collection[int]) -> int | None:
        """The worker is dead and reaped; `begun` are the rows that it had begun and not finished.

        Returns:
            The row that is convicted by this. It is no suspect any more: the next part holds it again, and the
            renderer is expected to reject it unseen.

        Raises:
            GaveUp: too many deaths with no row begun.
        """
        begun = set(begun) & set(part)
        if not begun:
            self._unexplained += 1
            if self._unexplained >= UNEXPLAINED:
                raise GaveUp(f"{self._unexplained} workers died over it before they had begun a picture")
            return None
        alone = len(part) == 1
        for row in begun:
            self._strikes[row] = self._strikes.get(row, 0) + alone
        convicted = next((row for row in begun if self._strikes[row] >= STRIKES), None)
        if convicted is not None:
            del self._strikes[convicted]
        return convicted
