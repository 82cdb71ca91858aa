"""One chunk, from address to pixels: the function that the whole service is a cache of.

Workers call it, and so does everything that looks at pictures without a daemon.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DatasetError
from headrace.pipeline.backend import Backend
from headrace.pipeline.dataset import open_source
from headrace.pipeline.index import Index
from headrace.pipeline.order import order
from headrace.pipeline.probe import BadPicture, Picture, probe
from headrace.pipeline.reading import Source
from headrace.pipeline.spec import Stream
from headrace.pipeline.transforms import plan, unfit
from headrace.protocol import RowReject
from headrace.slots import SlotView, Status

#: Pictures whose bytes are held at once, whatever the chunk's size, and their bytes if there are several.
_BLOCK = 32
_BLOCK_BYTES = 64 << 20
#: Seconds to wait before each further try of a read that failed.
_RETRIES = (0.1, 0.5)


@dataclass(slots=True)
class Rendered:
    """What came of a chunk beside its pixels: bad pictures, seconds per stage, bytes read."""

    rejects: list[RowReject] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    nbytes: int = 0


class ChunkRenderer:
    """Renders chunks of one stream.

    Args:
        stream, index: what and from where.
        backend: who turns bytes into pixels; stays the caller's.
        source: reads samples; by default what the stream's data set says.
        wholes: flags as of `headrace.pipeline.wholes`, shared with others that render this stream; by default nobody's.
    """

    def __init__(
        self,
        stream: Stream,
        index: Index,
        backend: Backend,
        source: Source | None = None,
        wholes: NDArray[np.uint8] | None = None,
    ) -> None:
        self.stream = stream
        self.index = index
        self.backend = backend
        self._source = source or open_source(stream.dataset, index, stream.decode)
        self._wholes = np.zeros(len(index), np.uint8) if wholes is None else wholes

    @property
    def chunks(self) -> int:
        """Of an epoch."""
        return -(-len(self.index) // self.stream.chunk)

    def rows(self, chunk: int) -> int:
        """Of this chunk: the last one of an epoch may be short."""
        return min(self.stream.chunk, len(self.index) - chunk * self.stream.chunk)

    def render(
        self,
        epoch: int,
        chunk: int,
        view: SlotView,
        rows: Collection[int] | None = None,
        convicted: Mapping[int, str] | None = None,
    ) -> Rendered:
        """Fill the slot: indices, labels and texts of every row, pixels and status of `rows` (None: all).

        A row whose content is bad is black, has the status REJECTED and stands in the result.
        While a row is worked on its status is RENDERING; whoever survives this process reads there whom to suspect.

        Args:
            convicted: sample index → reason, rejected unseen.

        Raises:
            DatasetError: a sample cannot be read, or has changed; says which.
        """
        result = Rendered()
        first, count = chunk * self.stream.chunk, self.rows(chunk)
        begin = time.perf_counter()
        indices = order(self.stream.seed, epoch, len(self.index), first, count, shuffle=self.stream.shuffle)
        view.indices[:count] = indices
        self.index.fill_labels(indices, view.labels[:count])
        self._write_texts(indices, view)
        result.seconds["plan"] += time.perf_counter() - begin
        todo = sorted(range(count) if rows is None else rows)
        view.status[todo] = Status.PENDING
        for block in self._blocks(todo, view):
            self._block(epoch, first, block, view, convicted or {}, result)
        return result

    def _write_texts(self, indices: NDArray[np.int64], view: SlotView) -> None:
        if not view.text.size:
            view.ends[:] = 0
            return
        end = 0
        for row, index in enumerate(indices.tolist()):
            text = self.index.text_row(index)
            view.text[end : end + len(text)] = np.frombuffer(text, np.uint8)
            end += len(text)
            view.ends[row] = end
        view.ends[len(indices) :] = end

    def _blocks(self, rows: list[int], view: SlotView) -> Iterator[list[int]]:
        block: list[int] = []
        nbytes = 0
        for row in rows:
            size = int(self.index.sizes[view.indices[row]])
            if block and (len(block) == _BLOCK or nbytes + size > _BLOCK_BYTES):
                yield block
                block, nbytes = [], 0
            block.append(row)
            nbytes += size
        if block:
            yield block

    def _block(
        self, epoch: int, first: int, rows: list[int], view: SlotView, convicted: Mapping[int, str], result: Rendered
    ) -> None:
        clock = _Clock(result.seconds)
        pictures: dict[int, Picture] = {}
        for row in rows:
            index = int(view.indices[row])
            try:
                if index in convicted:
                    raise BadPicture("worker", convicted[index])
                data = self._read(index)
                result.nbytes += len(data)
                clock.lap("read")
                view.status[row] = Status.RENDERING
                picture = probe(data, self.stream.decode)
                if why := unfit(self.stream.transforms, picture.height, picture.width):
                    raise BadPicture("probe", why)
                picture.whole = bool(self._wholes[index])
                pictures[row] = picture
                view.status[row] = Status.READ
            except BadPicture as bad:
                self._reject(view, row, bad, result)
            clock.lap("probe")
        if not pictures:
            return

        # Draws belong to positions, so parameters are planned for the whole run and the rows picked out of it.
        low, high = rows[0], rows[-1] + 1
        sizes = np.ones((2, high - low), np.int64)
        for row, picture in pictures.items():
            sizes[:, row - low] = picture.height, picture.width
        params = plan(self.stream.transforms, self.stream.seed, epoch, first + low, sizes[0], sizes[1])
        good = list(pictures)
        if len(good) < high - low:
            params = params.take(np.array(good) - low)
        clock.lap("plan")

        rendering: list[int] = []

        def started(pictures: Sequence[int]) -> None:
            view.status[rendering] = Status.OK
            rendering[:] = (good[i] for i in pictures)
            view.status[rendering] = Status.RENDERING

        verdicts = self.backend.render(list(pictures.values()), params, [view.images[row] for row in good], started)
        for row, verdict in zip(good, verdicts, strict=True):
            if verdict is None:
                view.status[row] = Status.OK
                if pictures[row].whole:
                    self._wholes[view.indices[row]] = 1
            else:
                self._reject(view, row, verdict, result)
        clock.lap("render")

    def _read(self, index: int) -> bytes:
        for delay in (*_RETRIES, None):
            try:
                return self._source.read(index)
            except OSError as error:
                if delay is None:
                    raise DatasetError(
                        f"sample {index}, {self.index.shown_full(index)}: cannot be read, "
                        f"{len(_RETRIES) + 1} times tried: {error.strerror or error}"
                        f" (errno {error.errno}: {os.strerror(error.errno) if error.errno else 'none'})"
                    ) from error
                time.sleep(delay)
            except DatasetError as changed:  # said by a source, which knows paths
                raise DatasetError(f"sample {index}, {changed}") from None
        raise AssertionError

    def _reject(self, view: SlotView, row: int, bad: BadPicture, result: Rendered) -> None:
        index = int(view.indices[row])
        view.images[row] = 0
        view.status[row] = Status.REJECTED
        result.rejects.append(RowReject(row, index, self.index.shown_full(index), bad.stage, bad.reason[:500]))


class _Clock:
    """Adds the time since the last lap to a stage."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self._seconds[stage] += now - self._last
        self._last = now
