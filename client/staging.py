"""The way to a device: rows wait in page-locked memory until their batch is whole, go over in one copy and are finished
there.

The memory is the client's own, so a slot's lease ends with the copy into it, as on the host. A piece holds

    offset 0    rows    int64 [kept]            which rows are handed out
    then        labels  of the stream's dtype [kept] or [kept, width]
                levels  uint8 [rows, height, width, 3]

each on a border of 256 bytes, and comes back once nothing refers to it (`memory`). What is on its way is referred to in
here, until the device has said that the work is done: a batch may be dropped meanwhile. At most two are on their way;
the next is not submitted before the older one has arrived, which has a deadline.

Slots are not page-locked themselves, to be copied from directly: that would save this copy, and cost a lock on memory
that is mapped read-only, which not every driver gives, and leases that last as long as the device likes. Nobody has
measured which is better.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace import kernel
from headrace.assembly import Draft
from headrace.batch import Batch
from headrace.device import Device, Event
from headrace.errors import DeadlineError
from headrace.memory import BatchMemory
from headrace.mix import WORKING, Mixing, mix
from headrace.output import Output
from headrace.pixels import Made
from headrace.slots import SlotLayout

log = logging.getLogger(__name__)

_ALIGN = 256

#: Batches that are on their way at once: while one is copied and finished, the next one waits behind it.
_UNDER_WAY = 2

#: Seconds between two looks at an event: the first pause, and the longest.
_LOOK = (50e-6, 2e-3)

#: Seconds that the last batches on their way are waited for in the end.
_END = 2.0

#: Memory that a device may still read when nobody waits for it any more: never to be used again.
_lost: list[Any] = []


class DevicePixels:
    """
    Args:
        device: where batches go.
        output: dtype, layout, mean and std.
        layout: of a chunk: size of a picture, and what a label is.
        batch_size: rows of a full batch.
        mixing: how rows are mixed; None: they are not.
        timeout: seconds after which a device that has not taken a batch is given up.
        stopped: whether the Loader was closed, in which case nothing is waited for.

    Attributes:
        finisher: what finishes, `triton` or `torch`.
        batch_bytes: of the device's memory, for one full batch as it is handed out.
        staged_bytes: likewise, for the levels and labels of one that is on its way.
    """

    def __init__(
        self,
        device: Device,
        output: Output,
        layout: SlotLayout,
        *,
        batch_size: int,
        mixing: Mixing | None,
        timeout: float,
        stopped: Callable[[], bool],
    ) -> None:
        import torch

        self._torch = torch
        self._device = device
        self._output = output
        self._layout = layout
        self._mixing = mixing
        self._timeout = timeout
        self._stopped = stopped
        self._dtype = getattr(torch, output.dtype)
        self._picture = layout.height * layout.width * 3
        self._label = np.dtype(layout.label_dtype).itemsize * max(1, layout.label_width)
        self._labels_at = _aligned(8 * batch_size)
        self._levels_at = self._labels_at + _aligned(self._label * batch_size)
        self.staged_bytes = self._levels_at + batch_size * self._picture
        mixed = 0 if mixing is None else 4 * mixing.classes
        self.batch_bytes = batch_size * (self._picture * self._dtype.itemsize + max(self._label, mixed))
        self._memory = BatchMemory(self.staged_bytes, idle=None, fresh=device.lock)  # locking is slow
        self._under_way: deque[tuple[Event, NDArray[np.uint8]]] = deque()
        self.finisher, self._finish = kernel.choose(output, layout.height, layout.width, device.target)

    @property
    def locked_bytes(self) -> int:
        """Page-locked memory of the host that is held now."""
        return self._memory.pieces * self.staged_bytes

    def stats(self, batches: int) -> dict[str, Any]:
        """What `Loader.stats` tells.

        Args:
            batches: that are made up and not handed out, at most.
        """
        return {
            "name": self._device.name,
            "finisher": self.finisher,
            "memory": batches * self.batch_bytes + self.staged_bytes + self._working(),
            "page_locked": self.locked_bytes,
        }

    def allocate(self, rows: int) -> NDArray[Any]:
        self._reap()
        return self._levels(self._memory.take(), rows)

    def finish(self, levels: NDArray[np.uint8], out: NDArray[Any]) -> None:
        np.copyto(out, levels)

    def make_way(self) -> bool:
        pause, deadline = _LOOK[0], time.monotonic() + self._timeout
        self._reap()
        full = len(self._under_way) >= _UNDER_WAY
        while len(self._under_way) >= _UNDER_WAY:
            if time.monotonic() > deadline or self._stopped():
                raise DeadlineError(f"{self._device.name} has not taken a batch for {self._timeout:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _LOOK[1])
            self._reap()
        return full

    def make(self, draft: Draft, kept: NDArray[np.int64] | None, valid: NDArray[np.bool_], epoch: int) -> Made:
        """
        Raises:
            MemoryError: the device has none left.
        """
        base = draft.images.base
        assert isinstance(base, np.ndarray) and base.size == self.staged_bytes
        rows, first = len(draft.images), draft.positions.start
        count = rows if kept is None else len(kept)
        labels = draft.labels if kept is None else draft.labels[kept]
        if kept is not None:
            base[: 8 * count].view(np.int64)[:] = kept
        # As bytes: labels of a vector each are of several dimensions.
        base[self._labels_at : self._labels_at + labels.nbytes] = (
            np.ascontiguousarray(labels).reshape(-1).view(np.uint8)
        )
        height, width = self._layout.height, self._layout.width
        planes = self._output.layout == "NCHW"
        images = self._device.empty((count, 3, height, width) if planes else (count, height, width, 3), self._dtype)
        shape, dtype = labels.shape, getattr(self._torch, str(labels.dtype))
        if self._mixing is None:
            numbers = self._device.empty(shape, dtype)
        else:
            numbers = self._device.empty((count, self._mixing.classes), self._torch.float32)

        def work(staged: Any) -> None:
            table = None if kept is None else staged[: 8 * count].view(self._torch.int64)
            found = staged[self._labels_at : self._labels_at + count * self._label].view(dtype).reshape(shape)
            self._finish(staged[self._levels_at :].view(rows, height, width, 3), table, images)
            if self._mixing is not None:
                found = mix(images, found, valid, self._mixing, epoch=epoch, first=first)
            numbers.copy_(found)

        event = self._device.submit(base[: self._levels_at + rows * self._picture], work)
        self._under_way.append((event, base))
        handed = images.permute(0, 3, 1, 2) if self._output.layout == "channels_last" else images
        return Made(handed, numbers, event)

    def hand_over(self, batch: Batch) -> None:
        tensors = [batch.images] if isinstance(batch.labels, list) else [batch.images, batch.labels]
        self._device.hand_over(batch.arrival, tensors)

    def close(self) -> None:
        """Wait for what is on its way, and no longer than a moment."""
        deadline = time.monotonic() + _END
        try:
            while self._under_way and time.monotonic() < deadline:
                self._reap()
                time.sleep(_LOOK[1] if self._under_way else 0)
        except Exception as error:  # a device that is broken says so at any call
            log.debug("%s while what is on its way is waited for: %s", self._device.name, error)
        _lost.extend(self._under_way)
        self._under_way.clear()

    def _levels(self, base: NDArray[np.uint8], rows: int) -> NDArray[np.uint8]:
        end = self._levels_at + rows * self._picture
        return base[self._levels_at : end].reshape(rows, self._layout.height, self._layout.width, 3)

    def _working(self) -> int:
        """Bytes of the device's memory that finishing and mixing take for a moment, beside batch and levels."""
        most = 0 if self.finisher == "triton" else kernel.WORKING
        if self._mixing is not None and self._mixing.mixup is not None:
            most = max(most, WORKING)
        if self._mixing is not None and self._mixing.cutmix is not None:
            most = max(most, self.batch_bytes)  # the boxes are taken all at once
        return most

    def _reap(self) -> None:
        """Let go of what has arrived."""
        while self._under_way and self._under_way[0][0].done():
            self._under_way.popleft()


def _aligned(nbytes: int) -> int:
    return math.ceil(nbytes / _ALIGN) * _ALIGN
