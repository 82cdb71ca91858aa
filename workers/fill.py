"""What is left to do of one chunk when workers die over it, which of its rows is to blame, and who has rendered it. No
I/O.

A dead worker tells little: it may have been killed by the machine (memory, an operator, a test) while it rendered a
perfectly good picture. So the rows it had begun become *suspects*; the others are rendered first, then each suspect
alone. One over which a worker died alone is rendered by the fallback next, where workers have one, since a picture may
kill one library and be fine with another; one that is known for that goes to the fallback at once. Only a row that
was being rendered alone when its worker died, twice, is *convicted*.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from headrace.protocol import RowReject

#: Deaths while a row was rendered alone that convict it.
STRIKES = 2
#: Deaths over one chunk with no row begun, after which the chunk fails: it is the chunk, or the machine.
UNEXPLAINED = 5


class GaveUp(Exception):
    """Workers die over this chunk and no row is to blame."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a worker is to render next of a chunk.

    Attributes:
        rows: of the chunk.
        alone: it is a suspect: nothing else may be at the worker meanwhile.
        fallback: a worker died of it alone, here or before: the fallback is to try.
    """

    rows: tuple[int, ...]
    alone: bool = False
    fallback: bool = False


class Fill:
    """
    Args:
        rows: of the chunk that are wanted.
    """

    def __init__(self, rows: Iterable[int]) -> None:
        self.rejects: list[RowReject] = []
        self._todo = set(rows)
        self._strikes: dict[int, int] = {}
        self._for_fallback: set[int] = set()
        self._unexplained = 0
        self._render_ids: set[str] = set()

    @property
    def done(self) -> bool:
        return not self._todo

    @property
    def suspects(self) -> set[int]:
        return self._todo & self._strikes.keys()

    @property
    def render_id(self) -> str:
        """Of all who have rendered a part, in alphabetical order, with " + " between them."""
        return " + ".join(sorted(self._render_ids))

    def leave_to_fallback(self, rows: Iterable[int]) -> None:
        """Workers have died of these alone, and not under the fallback."""
        self._for_fallback = self._todo & set(rows)
        self._strikes |= dict.fromkeys(self._for_fallback, 0)

    def part(self) -> Part:
        """What the next worker is to render."""
        clear = self._todo - self._strikes.keys()
        if clear:
            return Part(tuple(sorted(clear)))
        row = min(self._todo)
        return Part((row,), alone=True, fallback=self._strikes[row] > 0 or row in self._for_fallback)

    def rendered(self, rows: Collection[int], rejects: list[RowReject], render_id: str) -> None:
        """A worker has answered for these rows."""
        self._todo -= set(rows)
        self.rejects += rejects
        if len(rejects) < len(rows) or (self.done and not self._render_ids):
            self._render_ids.add(render_id)  # who only rejected has left nothing that would look different

    def died(self, rows: Collection[int], begun: Collection[int], *, alone: bool = True) -> int | None:
        """The worker is dead and reaped; `begun` are the rows that it had begun and not finished.

        Args:
            alone: these rows are all that it was working on.

        Returns:
            The row that is convicted by this. It is no suspect any more: the next part holds it again, and the
            renderer is expected to reject it unseen.

        Raises:
            GaveUp: too many deaths with no row begun.
        """
        begun = set(begun) & set(rows)
        if not begun:
            if not alone:
                return None  # it was working on something else
            self._unexplained += 1
            if self._unexplained >= UNEXPLAINED:
                raise GaveUp(f"{self._unexplained} workers died over it before they had begun a picture")
            return None
        strike = alone and len(rows) == 1
        for row in begun:
            self._strikes[row] = self._strikes.get(row, 0) + strike
        convicted = next((row for row in begun if self._strikes[row] >= STRIKES), None)
        if convicted is not None:
            del self._strikes[convicted]
        return convicted
