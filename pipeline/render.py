"""One chunk, from address to pixels: the function that the whole service is a cache of.

Workers call it, and so does everything that looks at pictures without a daemon.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DatasetError
from headrace.pipeline import wholes as flags
from headrace.pipeline.backend import Backend
from headrace.pipeline.dataset import open_source
from headrace.pipeline.index import Index
from headrace.pipeline.order import order
from headrace.pipeline.probe import BadPicture, Picture, probe, recall
from headrace.pipeline.reading import Source
from headrace.pipeline.spec import Stream
from headrace.pipeline.transforms import Params, plan, unfit
from headrace.protocol import RowReject
from headrace.slots import SlotView, Status
from headrace.stages import Clock, Stages

#: What is rendered at once, if it is several pictures: how many, their bytes, and their pixels once decoded.
PART_PICTURES = 32
_PART_BYTES = 64 << 20
PART_PIXELS = 64 << 20
#: Seconds to wait before each further try of a read that failed.
_RETRIES = (0.1, 0.5)


@dataclass(slots=True)
class Rendered:
    """What came of a chunk beside its pixels: bad pictures, and what each stage took."""

    rejects: list[RowReject] = field(default_factory=list)
    stages: Stages = field(default_factory=Stages)

    def add(self, other: Rendered) -> None:
        self.rejects += other.rejects
        self.stages.merge(other.stages)


@dataclass(eq=False, slots=True)
class Part:
    """Rows of a chunk that have been read and looked at: what is left is the backend's to do.

    Attributes:
        reader: whose stream it is of.
        view: the slot.
        rows: of the chunk, one for each picture; those whose content was found bad before are not among them.
        pictures, params: what is to be rendered.
        pixels: of the pictures, decoded as a whole.
        result: what came of the part, so far and in the end.
    """

    reader: ChunkReader
    view: SlotView
    rows: list[int] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    params: Params | None = None
    pixels: int = 0
    result: Rendered = field(default_factory=Rendered)


class ChunkReader:
    """Reads chunks of one stream and plans how they are rendered. Good for several threads at once.

    Args:
        stream, index: what and from where.
        source: reads samples; by default what the stream's data set says.
        wholes: flags as of `headrace.pipeline.wholes`, shared with others that render this stream; by default nobody's.
    """

    def __init__(
        self, stream: Stream, index: Index, source: Source | None = None, wholes: NDArray[np.uint8] | None = None
    ) -> None:
        self.stream = stream
        self.index = index
        self._source = source or open_source(stream.dataset, index, stream.decode)
        self._wholes = np.zeros(len(index), np.uint8) if wholes is None else wholes

    @property
    def chunks(self) -> int:
        """Of an epoch."""
        return -(-len(self.index) // self.stream.chunk)

    def rows(self, chunk: int) -> int:
        """Of this chunk: the last one of an epoch may be short."""
        return min(self.stream.chunk, len(self.index) - chunk * self.stream.chunk)

    def prepare(
        self,
        epoch: int,
        chunk: int,
        view: SlotView,
        rows: Collection[int] | None = None,
        convicted: Mapping[int, str] | None = None,
    ) -> Iterator[Part]:
        """Fill in indices, labels and texts of every row, then read `rows` (None: all), part by part.

        A row whose content is bad is black, has the status REJECTED and stands in the part's result. The others have
        the status READ. While a row is looked at its status is RENDERING.

        Args:
            convicted: sample index → reason, rejected unseen.

        Raises:
            DatasetError: a sample cannot be read, or has changed; says which.
        """
        part = Part(self, view)
        clock = Clock(part.result.stages)
        first, count = chunk * self.stream.chunk, self.rows(chunk)
        indices = order(self.stream.seed, epoch, len(self.index), first, count, shuffle=self.stream.shuffle)
        view.indices[:count] = indices
        self.index.fill_labels(indices, view.labels[:count])
        self._write_texts(indices, view)
        todo = sorted(range(count) if rows is None else rows)
        view.status[todo] = Status.PENDING
        clock.lap("plan", 0)

        nbytes = 0
        for row in todo:
            index = int(indices[row])
            nbytes += (size := int(self.index.sizes[index]))
            if part.pictures and (len(part.pictures) == PART_PICTURES or nbytes > _PART_BYTES):
                yield self._planned(part, epoch, first, clock)
                part, nbytes = Part(self, view), size
                clock = Clock(part.result.stages)
            picture = self._look(part, row, index, clock, convicted or {})
            if picture is None:
                continue
            pixels = picture.height * picture.width
            if part.pictures and part.pixels + pixels > PART_PIXELS:
                yield self._planned(part, epoch, first, clock)
                part, nbytes = Part(self, view), size
                clock = Clock(part.result.stages)
            part.rows.append(row)
            part.pictures.append(picture)
            part.pixels += pixels
        yield self._planned(part, epoch, first, clock)

    def _look(self, part: Part, row: int, index: int, clock: Clock, convicted: Mapping[int, str]) -> Picture | None:
        view = part.view
        try:
            if index in convicted:
                raise BadPicture("worker", convicted[index])
            data = self._read(index)
            clock.lap("read", nbytes=len(data))
            view.status[row] = Status.RENDERING
            known = int(self._wholes[index])
            if known:
                picture = recall(data, known & flags.ORIENTATION, self.stream.decode)
                picture.whole = bool(known & flags.PARTS)
            else:
                picture = probe(data, self.stream.decode)
            if why := unfit(self.stream.transforms, picture.height, picture.width):
                raise BadPicture("probe", why)
            view.status[row] = Status.READ
        except BadPicture as bad:
            self._reject(part, row, bad)
            picture = None
        clock.lap("plan")
        return picture

    def _planned(self, part: Part, epoch: int, first: int, clock: Clock) -> Part:
        if not part.rows:
            return part
        # Draws belong to positions, so parameters are planned for the whole run and the rows picked out of it.
        low, high = part.rows[0], part.rows[-1] + 1
        at = np.array(part.rows) - low
        sizes = np.ones((2, high - low), np.int64)
        sizes[:, at] = np.array([(picture.height, picture.width) for picture in part.pictures]).T
        params = plan(self.stream.transforms, self.stream.seed, epoch, first + low, sizes[0], sizes[1])
        part.params = params if len(at) == high - low else params.take(at)
        clock.lap("plan", 0)
        return part

    def finish(self, part: Part, i: int, verdict: BadPicture | None) -> None:
        """Picture `i` of the part is in its row, or is a bad one."""
        row = part.rows[i]
        if verdict is not None:
            self._reject(part, row, verdict)
            return
        part.view.status[row] = Status.OK
        picture = part.pictures[i]
        if picture.good:
            self._wholes[part.view.indices[row]] |= picture.orientation | flags.PARTS * picture.whole

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

    def _reject(self, part: Part, row: int, bad: BadPicture) -> None:
        index = int(part.view.indices[row])
        part.view.images[row] = 0
        part.view.status[row] = Status.REJECTED
        reject = RowReject(row, index, self.index.shown_full(index), bad.stage, bad.reason[:500])
        part.result.rejects.append(reject)


def render(backend: Backend, parts: Sequence[Part]) -> None:
    """Render parts of one stream in one call of the backend: pixels, statuses, and what is bad, in each part's result.

    While a picture is worked on, the status of its row is RENDERING; whoever survives this process reads there whom to
    suspect.

    Raises:
        BackendFailed: as the backend does.
    """
    places = [(part, i) for part in parts for i in range(len(part.rows))]
    planned = [part.params for part in parts if part.params is not None]
    if not places:
        return
    # The backend works for all of them at once; what that takes stands in the first one's result.
    clock = Clock(parts[0].result.stages)
    rendering: list[tuple[Part, int]] = []

    def mark(status: Status) -> None:
        for part, i in rendering:
            part.view.status[part.rows[i]] = status

    def begin(pictures: Sequence[int]) -> None:
        mark(Status.OK)
        rendering[:] = [places[i] for i in pictures]
        mark(Status.RENDERING)

    pictures = [picture for part in parts for picture in part.pictures]
    out = [part.view.images[row] for part in parts for row in part.rows]
    verdicts = backend.render(pictures, Params.joined(planned), out, begin, clock.lap)
    for (part, i), verdict in zip(places, verdicts, strict=True):
        part.reader.finish(part, i, verdict)
    clock.lap("write", 0)
    for part in parts:
        part.pictures.clear()


class ChunkRenderer(ChunkReader):
    """Renders chunks of one stream, one at a time.

    Args:
        stream, index, source, wholes: as in `ChunkReader`.
        backend: who turns bytes into pixels; stays the caller's.
    """

    def __init__(
        self,
        stream: Stream,
        index: Index,
        backend: Backend,
        source: Source | None = None,
        wholes: NDArray[np.uint8] | None = None,
    ) -> None:
        super().__init__(stream, index, source, wholes)
        self.backend = backend

    def render(
        self,
        epoch: int,
        chunk: int,
        view: SlotView,
        rows: Collection[int] | None = None,
        convicted: Mapping[int, str] | None = None,
    ) -> Rendered:
        """Fill the slot: as `prepare`, and the pixels and status of `rows`.

        Raises:
            DatasetError: as `prepare`.
            BackendFailed: as the backend does.
        """
        result = Rendered()
        for part in self.prepare(epoch, chunk, view, rows, convicted):
            render(self.backend, [part])
            result.add(part.result)
        return result
