"""What a device renders at once, and when a chunk is done: parts of chunks come in, iterations go out. No I/O.

An iteration is one call of a backend. It takes whatever parts of one stream are ready, the oldest first, up to a bound;
so while the device keeps up iterations are small and soon begun, and else they grow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.pipeline.render import Part, Rendered
from headrace.workers.messages import Render


@dataclass(eq=False, slots=True)
class Chunk:
    """A task at hand.

    Attributes:
        task: what was asked for.
        result: of the parts that are done.
        error: why the rest of it could not be read.
    """

    task: Render
    result: Rendered = field(default_factory=Rendered)
    error: Exception | None = None
    _open: int = 0  # parts that are read and not rendered
    _read: bool = False  # no more of them will come

    @property
    def done(self) -> bool:
        """Whether nobody writes to its slot any more."""
        return self._read and not self._open


@dataclass(eq=False, slots=True)
class Iteration:
    """Parts that are rendered at once, and the chunk of each."""

    parts: list[Part] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)


class Iterations:
    """
    Args:
        pictures: of an iteration, at most.
        pixels: of these, decoded as a whole, if they are of several parts.
    """

    def __init__(self, pictures: int, pixels: int) -> None:
        self._pictures = pictures
        self._pixels = pixels
        self._ready: deque[tuple[Chunk, Part]] = deque()
        self._at_hand = 0

    @property
    def idle(self) -> bool:
        """Whether every chunk that was begun is done."""
        return not self._at_hand

    def begin(self, task: Render) -> Chunk:
        """A task has come."""
        self._at_hand += 1
        return Chunk(task)

    def add(self, chunk: Chunk, part: Part) -> None:
        """A part of the chunk was read."""
        chunk._open += 1
        self._ready.append((chunk, part))

    def end(self, chunk: Chunk, error: Exception | None = None) -> int:
        """No more parts of the chunk will come. After an error what was read is not rendered; only what a backend has
        already got keeps the chunk from being done.

        Returns:
            Of how many parts that is said.
        """
        given_up = 0
        chunk._read, chunk.error = True, error
        if error is not None:
            others = deque(entry for entry in self._ready if entry[0] is not chunk)
            given_up = len(self._ready) - len(others)
            self._ready = others
            chunk._open -= given_up
        self._settle(chunk)
        return given_up

    def take(self) -> Iteration | None:
        """What is to be rendered next, or None if nothing is ready."""
        taken, left = Iteration(), deque[tuple[Chunk, Part]]()
        pictures = pixels = 0
        for chunk, part in self._ready:
            more, wider = pictures + len(part.rows), pixels + part.pixels
            fits = more <= self._pictures and wider <= self._pixels
            if not taken.parts or (fits and part.reader is taken.parts[0].reader):
                taken.chunks.append(chunk)
                taken.parts.append(part)
                pictures, pixels = more, wider
            else:
                left.append((chunk, part))
        self._ready = left
        return taken if taken.parts else None

    def rendered(self, iteration: Iteration) -> Sequence[Chunk]:
        """The iteration is over; the chunks that are done by that."""
        for chunk, part in zip(iteration.chunks, iteration.parts, strict=True):
            chunk._open -= 1
            chunk.result.add(part.result)
        over = list(dict.fromkeys(iteration.chunks))
        for chunk in over:
            self._settle(chunk)
        return [chunk for chunk in over if chunk.done]

    def _settle(self, chunk: Chunk) -> None:
        self._at_hand -= chunk.done
