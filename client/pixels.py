"""Where the rows of a batch are written, and what becomes of them once it misses nothing."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.assembly import Draft
from headrace.batch import Batch
from headrace.finish import Finisher
from headrace.memory import BatchMemory
from headrace.mix import Mixing, mix
from headrace.output import Output

#: Pieces of memory kept beside those of the batches that are being prefetched: two that the trainer may hold.
_SPARE = 2


class Made(NamedTuple):
    """Pictures and numeric labels as they are handed out, and the batch's `arrival`."""

    images: Any
    labels: Any
    arrival: Any = None


class Pixels(Protocol):
    """Everything but `hand_over` is for one thread."""

    def allocate(self, rows: int) -> NDArray[Any]:
        """Memory for the pictures of a batch of at most `batch_size` rows, a row each, as `finish` takes it.

        Raises:
            MemoryError: there is none.
        """

    def finish(self, levels: NDArray[np.uint8], out: NDArray[Any]) -> None:
        """Take pictures, uint8 (n, H, W, 3), to as many of those rows; on return `levels` may change."""

    def make_way(self) -> bool:
        """Wait until another draft may be made up; whether that had to be waited for.

        Raises:
            DeadlineError: the device takes nothing, or the Loader was closed.
        """

    def make(self, draft: Draft, kept: NDArray[np.int64] | None, valid: NDArray[np.bool_], epoch: int) -> Made:
        """What a draft that misses nothing comes to.

        Args:
            kept: the rows that are handed out; None: all of them.
            valid: those of them that count, bool (n,).
        """

    def hand_over(self, batch: Batch) -> None:
        """In the thread that gets the batch, before it does. May be called again."""

    def close(self) -> None:
        """Nothing is made any more."""


class HostPixels:
    """Finished row by row where they come, into memory of the host.

    Args:
        torch: the module, for tensors; None: arrays.
        output: dtype, layout, mean and std.
        height, width: of a picture.
        batch_size: rows of a full batch.
        prefetch: batches kept ready.
        mixing: how rows are mixed; None: they are not.
    """

    def __init__(
        self,
        torch: Any,
        output: Output,
        *,
        height: int,
        width: int,
        batch_size: int,
        prefetch: int,
        mixing: Mixing | None,
    ) -> None:
        self._torch = torch
        self._output = output
        self._mixing = mixing
        self._finisher = Finisher(output, height, width)
        self._memory = BatchMemory(batch_size * self._finisher.row_bytes, idle=prefetch + _SPARE)
        self.finish = self._finisher.finish

    def allocate(self, rows: int) -> NDArray[Any]:
        return self._finisher.rows(self._memory.take(), rows)

    def make_way(self) -> bool:
        return False

    def make(self, draft: Draft, kept: NDArray[np.int64] | None, valid: NDArray[np.bool_], epoch: int) -> Made:
        """Closed up and mixed in place."""
        images, labels = draft.images, draft.labels
        if kept is not None:
            images, labels = images[: _close_up(images, draft.keep)], labels[kept]
        if self._mixing is not None:
            labels = mix(images, labels, valid, self._mixing, epoch=epoch, first=draft.positions.start)
        return Made(self._wrap(images), labels if self._torch is None else self._torch.from_numpy(labels))

    def hand_over(self, batch: Batch) -> None:
        pass

    def close(self) -> None:
        pass

    def _wrap(self, images: NDArray[Any]) -> Any:
        swap = self._output.layout == "channels_last"
        if self._torch is None:
            return images.transpose(0, 3, 1, 2) if swap else images
        tensor = self._torch.from_numpy(images)
        if self._output.dtype == "bfloat16":
            tensor = tensor.view(self._torch.bfloat16)
        return tensor.permute(0, 3, 1, 2) if swap else tensor


def _close_up(images: NDArray[Any], keep: NDArray[np.bool_]) -> int:
    """Move the kept rows to the front, in order; how many they are."""
    edges = np.flatnonzero(np.diff(keep, prepend=False, append=False)).reshape(-1, 2).tolist()
    flat = images.reshape(-1)  # NumPy moves one dimension in place; of more it would copy a whole batch aside
    row = images[0].size
    end = 0
    for first, last in edges:
        if first != end:
            flat[end * row : (end + last - first) * row] = flat[first * row : last * row]
        end += last - first
    return end
