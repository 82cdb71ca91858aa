"""Turns steps into wanted chunks, and chunks that have arrived into batches in their order.

Plain state: no I/O, no clock, no thread; the caller asks for `want()`, copies rows, reports what came of it, and
calls `take()`. A batch counts as handed out once `handed` is empty again; the caller does that in the last step
before it gives the batch away, and gets the same batch again if it is interrupted before.

Two rules keep every client going. A chunk is wanted only once memory exists for all of its rows that this rank needs,
so it is copied out whole on arrival, whatever the order, and nobody waits while holding a slot; therefore it is
fetched just once, also when it spans several batches. And what is needed first is wanted first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.batch import Batch, Reject
from headrace.errors import HeadraceError, SampleError, TooManyRejects
from headrace.protocol import RowReject
from headrace.slots import SlotLayout
from headrace.steps import Steps

OnBadSample = Literal["skip", "replace", "mask", "raise"]

#: Other positions that are tried for one bad picture under `replace`.
REPLACEMENTS = 16

#: Chunks that a prefetched step stands for at least.
_SMALL = 2

#: Rejects in an epoch that are always tolerated, so that a small data set is not stopped by a few files.
TOLERATED = 16


@dataclass(eq=False, slots=True)
class Draft:
    """A batch in the making; arrays have a row per position.

    Attributes:
        step, positions: which batch.
        images: the finished pictures.
        labels: (rows,) or (rows, width), of the stream's dtype; indices: int64.
        valid: rows that count; keep: rows that stay in the batch.
        missing: rows that are not final yet.
        texts: the values of each row's text; empty where the listing has none.
        rejects: bad pictures among this rank's own positions, by row.
        spoiled: the last bad picture, copies included.
        batch: set by the caller once nothing is missing and the batch is made up.
    """

    step: int
    positions: range
    images: NDArray[Any]
    labels: NDArray[Any]
    indices: NDArray[np.int64]
    valid: NDArray[np.bool_]
    keep: NDArray[np.bool_]
    missing: int
    texts: list[Any] = field(default_factory=list)
    rejects: dict[int, Reject] = field(default_factory=dict)
    spoiled: Reject | None = None
    batch: Batch | None = None


class Piece(NamedTuple):
    """`size` rows from row `first` of a chunk, to row `row` on of a draft; `tries` > 0: to replace that one row."""

    draft: Draft
    row: int
    first: int
    size: int
    tries: int = 0

    @property
    def target(self) -> slice:
        return slice(self.row, self.row + self.size)


@dataclass(eq=False, slots=True)
class Want:
    """A chunk to be fetched, and where its rows go; `step` is the first batch that needs it."""

    chunk: int
    step: int
    pieces: list[Piece]

    @property
    def rows(self) -> range:
        """The run of rows that covers what is needed of the chunk."""
        first = min(piece.first for piece in self.pieces)
        return range(first, max(piece.first + piece.size for piece in self.pieces))


@dataclass(slots=True)
class Counts:
    """What became of this rank's positions in an epoch; `extra` counts rows handed out that are not valid."""

    delivered: int = 0
    rejected: int = 0
    dropped: int = 0
    extra: int = 0


def ahead(prefetch: int, chunk: int, stride: int, busy: int = 1) -> int:
    """Batches from the one that is due on whose chunks are asked for.

    Args:
        stride: positions of a step, those of all ranks.
        busy: chunks that can be worked at at once. So many are asked for by all ranks together, behind the batches that
            are kept ready: with fewer some workers had nothing to do while a trainer waits.
    """
    if not prefetch:
        return 1
    return max(prefetch + -(-busy * chunk // stride), prefetch * -(-_SMALL * chunk // stride))


def ready(prefetch: int, chunk: int, stride: int, batch_size: int, busy: int = 1) -> int:
    """Batches that may miss nothing and not be taken yet, of an epoch and the next one together: those, and in either
    epoch what lies as a whole in the last chunk that they need."""
    return ahead(prefetch, chunk, stride, busy) + (2 * -(-chunk // stride) if batch_size < chunk else 0)


class Assembly:
    """The rest of one epoch for one rank.

    Args:
        epoch, start: where it is taken up.
        steps: the cut into batches.
        layout: of a chunk: its positions, and what a label is.
        prefetch: batches kept ready; one more is being assembled. A step of fewer positions than two chunks counts
            as a part of a batch: or else one chunk at a time would be asked for, and one worker would be busy.
        busy: as in `ahead`.
        on_bad_sample, max_bad: the policy.
        allocate: gives the finished images' memory of a batch, a row per position.
        uniforms: 16 uniform numbers of a position, from the table "replace".
        counts: of the epoch so far, kept up to date here.
    """

    def __init__(
        self,
        *,
        epoch: int,
        start: int,
        steps: Steps,
        layout: SlotLayout,
        prefetch: int,
        on_bad_sample: OnBadSample,
        max_bad: float,
        allocate: Callable[[int], NDArray[Any]],
        uniforms: Callable[[int], NDArray[np.float64]],
        counts: Counts,
        busy: int = 1,
    ) -> None:
        self.epoch = epoch
        self.start = start
        self.steps = steps
        self.count = steps.count(start)
        self.taken = 0
        #: The batch that was taken last, until it is handed out.
        self.handed: Batch | None = None
        #: Set when nobody will take from this any more.
        self.ended = False
        self.counts = counts
        self._layout = layout
        self._chunk = chunk = layout.chunk
        self._ahead = ahead(prefetch, chunk, steps.stride, busy)
        self._on_bad_sample = on_bad_sample
        self._max_bad = max_bad
        self._limit = max(TOLERATED, max_bad * steps.positions(0))
        self._allocate = allocate
        self._uniforms = uniforms
        self._opened = 0
        self._drafts: dict[int, Draft] = {}
        self._queue: list[Want] = []
        self._queued: dict[int, Want] = {}
        self._failed: dict[Want, HeadraceError] = {}
        self._retry: list[Want] = []
        self._spoiled: Reject | None = None
        if self.done:
            counts.dropped += steps.dropped(start)

    # -- what to fetch --------------------------------------------------------------------------------------

    def want(self, before: int = 0) -> Want | None:
        """The next chunk to ask for, or None until a batch is taken or a chunk arrives.

        Args:
            before: batches of the epoch before that were not taken yet; they count among those that are kept ready.

        Raises:
            MemoryError: there is none for another batch; nothing has changed.
        """
        for step in [step for step in self._drafts if step < self.taken]:
            del self._drafts[step]
        horizon = self.taken + self._ahead - before
        while self._opened < min(self.count, horizon):
            self._open()
        # A batch beyond the horizon was opened for one chunk's sake; its other chunks have time.
        want = min(self._queue, key=attrgetter("step"), default=None)
        if want is None or want.step >= horizon:
            return None
        span = range(want.chunk * self._chunk, (want.chunk + 1) * self._chunk)
        while self._opened < self.count and self.steps.block(self.start, self._opened).start in span:
            self._open()
        self._queue.remove(want)
        if self._queued.get(want.chunk) is want:
            del self._queued[want.chunk]
        return want

    def discard(self) -> None:
        """Drop every batch that was not taken. They are assembled anew if chunks are asked for again."""
        self._opened = self.taken
        self._drafts.clear()
        self._queue.clear()
        self._queued.clear()
        self._failed.clear()
        self._retry.clear()

    def again(self, wants: Iterable[Want]) -> None:
        """These requests came to nothing: the chunks are wanted again."""
        self._queue.extend(wants)

    def _add(self, position: int, draft: Draft, row: int, size: int, tries: int = 0) -> None:
        """Rows `row` on of the draft come from the chunk of `position`."""
        chunk, first = divmod(position, self._chunk)
        want = self._queued.get(chunk)
        if want is None:
            want = self._queued[chunk] = Want(chunk, draft.step, [])
            self._queue.append(want)
        want.step = min(want.step, draft.step)
        want.pieces.append(Piece(draft, row, first, size, tries))

    def _open(self) -> None:
        positions = self.steps.block(self.start, self._opened)
        rows, samples = len(positions), self.steps.samples
        draft = Draft(
            step=self._opened,
            positions=positions,
            images=self._allocate(rows),
            labels=np.empty((rows, *self._layout.label_shape[1:]), self._layout.label_dtype),
            indices=np.empty(rows, np.int64),
            valid=np.arange(positions.start, positions.stop) < samples,
            keep=np.ones(rows, np.bool_),
            missing=rows,
            texts=[None] * rows if self._layout.text else [],
        )
        self._drafts[self._opened] = draft
        self._opened += 1
        row = 0
        while row < rows:
            position = positions[row] % samples
            run = min(rows - row, self._chunk - position % self._chunk, samples - position)
            self._add(position, draft, row, run)
            row += run

    # -- what has come --------------------------------------------------------------------------------------

    def arrived(self, want: Want, bad: dict[int, RowReject]) -> list[Draft]:
        """The rows of a chunk were copied.

        Args:
            bad: its rejects by row. Such a row was copied as the black picture it is, but not where it was to
                replace another one.

        Returns:
            the drafts that miss nothing any more.
        """
        for piece in want.pieces:
            if piece.tries:
                self._replaced(piece, bad=piece.first in bad)
                continue
            piece.draft.missing -= piece.size
            for row in sorted(bad):
                if piece.first <= row < piece.first + piece.size:
                    self._reject(piece.draft, piece.row + row - piece.first, bad[row])
        complete = dict.fromkeys(piece.draft for piece in want.pieces if piece.draft.missing == 0)
        for draft in complete:
            if not draft.keep.any():
                draft.keep[0] = True  # no empty batch: this one row is as under `mask`
        return list(complete)

    def failed(self, want: Want, error: HeadraceError) -> None:
        """The chunk cannot be had: said by `take` once its first batch is due. The next `take` tries all such again."""
        self._failed[want] = error

    def _reject(self, draft: Draft, row: int, bad: RowReject) -> None:
        position = draft.positions[row]
        draft.spoiled = reject = Reject(bad.index, position, bad.path, bad.stage, bad.reason)
        draft.valid[row] = False
        if position < self.steps.samples:  # a copy was already counted where it is no copy
            draft.rejects[row] = reject
        if self._on_bad_sample == "skip":
            draft.keep[row] = False
        elif self._on_bad_sample == "replace" and not self._hopeless(draft):
            draft.missing += 1
            self._replace(draft, row, 1)

    def _replace(self, draft: Draft, row: int, tries: int) -> None:
        samples = self.steps.samples
        position = int(self._uniforms(draft.positions[row] % samples)[tries - 1] * samples)
        self._add(position, draft, row, 1, tries)

    def _replaced(self, piece: Piece, *, bad: bool) -> None:
        if bad and piece.tries < REPLACEMENTS and not self._hopeless(piece.draft):
            self._replace(piece.draft, piece.row, piece.tries + 1)
        else:
            piece.draft.missing -= 1

    def _hopeless(self, draft: Draft) -> bool:
        """Whether this batch will never be handed out, however its rows are replaced."""
        known = sum(len(d.rejects) for d in self._drafts.values() if self.taken <= d.step <= draft.step)
        return self.counts.rejected + known > self._limit

    # -- what to hand out -----------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether every batch was handed out."""
        return self.taken >= self.count and self.handed is None

    @property
    def state(self) -> tuple[int, int]:
        """`(epoch, position)` of the next batch to be handed out."""
        return self.steps.after(self.epoch, self.start, self.taken - (self.handed is not None))

    def waiting(self, want: Want) -> bool:
        """Whether the batch that is due needs this chunk."""
        return any(piece.draft.step == self.taken for piece in want.pieces)

    def take(self) -> Batch | None:
        """The batch that is due; None while it is not ready. After an error the same batch is due, and so it is until
        `handed` is empty.

        Raises:
            SampleError: it holds a bad picture and the policy is `raise`.
            TooManyRejects: `max_bad` is exceeded with it, or it is the last and no row of the epoch was valid.
            HeadraceError: a chunk of it could not be had.
        """
        if self.handed is not None:
            return self.handed
        self._queue += self._retry
        self._retry.clear()
        draft = self._drafts.get(self.taken)
        if draft is None:
            return None
        for want, error in self._failed.items():
            if self.waiting(want):
                # Asked for at once they would fail again before whoever is told now has mended what is wrong with all.
                self._retry += self._failed
                self._failed.clear()
                raise error
        self._check_rejects(draft)
        if draft.batch is None:
            return None
        spoiled = draft.spoiled or self._spoiled
        self._check_valid(draft, spoiled)
        counts = self.counts
        valid = int(draft.valid[draft.keep].sum())
        extra = int(draft.keep.sum()) - valid
        rejected = len(draft.rejects)
        dropped = self.steps.dropped(self.start) if self.taken + 1 == self.count else 0
        # No calls from here on: a signal's handler, which may raise, runs between calls and finds all or nothing done.
        counts.delivered += valid
        counts.extra += extra
        counts.rejected += rejected
        counts.dropped += dropped
        self._spoiled = spoiled
        self.handed = draft.batch
        self.taken += 1
        return draft.batch

    def _check_rejects(self, draft: Draft) -> None:
        rejected = self.counts.rejected + len(draft.rejects)
        if rejected > self._limit:
            last = f"; the latest is {draft.rejects[max(draft.rejects)]}" if draft.rejects else ""
            raise TooManyRejects(
                f"{rejected} bad pictures in epoch {self.epoch}, more than {TOLERATED} and more than max_bad="
                f"{self._max_bad} of the {self.steps.positions(0)} positions of rank {self.steps.rank}{last}. Other "
                "ranks may be waiting for it. The log and batch.rejects name them: mend the files, or raise max_bad"
            )
        if self._on_bad_sample == "raise" and draft.rejects and draft.batch is not None:
            reject = draft.rejects[min(draft.rejects)]
            raise SampleError(f"on_bad_sample is raise, and a picture is bad: {reject}", reject)

    def _check_valid(self, draft: Draft, spoiled: Reject | None) -> None:
        last = self.taken + 1 == self.count
        if last and spoiled is not None and not self.counts.delivered and not draft.valid[draft.keep].any():
            bad = draft.rejects[min(draft.rejects)] if draft.rejects else spoiled
            raise TooManyRejects(f"epoch {self.epoch} has no valid picture for rank {self.steps.rank}: {bad}")
