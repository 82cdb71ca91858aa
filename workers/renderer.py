"""The renderer of a worker: its backend, and who takes over while that does not work. No I/O of its own."""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.pipeline.backend import Backend, BackendFailed
from headrace.workers.backoff import Backoff

#: Seconds before the backend is tried again. A try costs the rendering of a chunk, or the import of a large library.
_DELAYS: tuple[float, ...] = (5.0, 30.0, 120.0, 600.0)


class Renderer:
    """
    Args:
        first: makes the backend that is meant to render.
        fallback: makes the one that takes over; None if there is none.
        clock: seconds that only grow.

    Attributes:
        trouble: why the first one does not render now, or "".

    Raises:
        BackendFailed: the first one does not work and nobody can take over, or the fallback does not work either.
    """

    def __init__(
        self,
        first: Callable[[], Backend],
        fallback: Callable[[], Backend] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.trouble = ""
        self._make_first = first
        self._make_fallback = fallback
        self._clock = clock
        self._backoff = Backoff(_DELAYS)
        self._first: Backend | None = None
        self._fallback: Backend | None = None
        self._since = 0.0
        self.choose()

    def choose(self, *, fallback: bool = False) -> Backend:
        """Who is to render next: the first backend, or the fallback while that does not work, or if it is asked for.

        Raises:
            BackendFailed: as for the constructor.
        """
        if fallback and self._make_fallback is not None:
            return self._take_over()
        if self._first is None and self._backoff.due(self._clock()):
            try:
                self._first, self._since = self._make_first(), self._clock()
            except BackendFailed as error:
                self._give_up(error)
        return self._first or self._take_over()

    def failed(self, backend: Backend, error: BackendFailed) -> None:
        """The backend has raised this: it is given up for a while.

        Raises:
            BackendFailed: nobody can take over.
        """
        if backend is not self._first:
            raise error
        self._give_up(error)

    def rendered(self, backend: Backend) -> None:
        """It has rendered."""
        if backend is self._first:
            self.trouble = ""

    def close(self) -> None:
        for backend in (self._first, self._fallback):
            if backend is not None:
                backend.close()
        self._first = self._fallback = None

    def _give_up(self, error: BackendFailed) -> None:
        worked = 0.0
        if self._first is not None:
            worked = self._clock() - self._since
            self._first.close()
            self._first = None
        if self._make_fallback is None:
            raise error
        self.trouble = str(error) or type(error).__name__
        self._backoff.failed(self._clock(), worked)

    def _take_over(self) -> Backend:
        if self._fallback is None:
            assert self._make_fallback is not None
            self._fallback = self._make_fallback()
        return self._fallback
