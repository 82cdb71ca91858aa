"""The form in which a Loader hands out batches: memory, finishing, and tensors, arrays or lists around it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from types import ModuleType
from typing import Any, Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.assembly import Draft
from headrace.batch import Batch
from headrace.errors import ConfigError, ProtocolError
from headrace.finish import Finisher
from headrace.memory import BatchMemory
from headrace.mix import Mixing, mix
from headrace.output import Output

Library = Literal["torch", "numpy"]

#: Pieces of memory kept beside those of the batches that are being prefetched: two that the trainer may hold.
_SPARE = 2


class Form:
    """
    Args:
        library: whose arrays are handed out.
        output: dtype, layout, mean and std.
        height, width: of a picture.
        batch_size: rows of a full batch.
        prefetch: batches kept ready.
        text_labels: whether the label of a row is the first value of its text.
        columns: names of its further values.
        mixing: how rows are mixed; None: they are not.

    Raises:
        ConfigError: bfloat16 without torch.
    """

    def __init__(
        self,
        library: Library,
        output: Output,
        *,
        height: int,
        width: int,
        batch_size: int,
        prefetch: int,
        text_labels: bool = False,
        columns: Sequence[str] = (),
        mixing: Mixing | None = None,
    ) -> None:
        if library == "numpy" and output.dtype == "bfloat16":
            raise ConfigError("dtype: bfloat16 is unknown to NumPy; use output='torch', or dtype float16 or float32")
        self.output = output
        self._torch = import_torch() if library == "torch" else None
        self._finisher = Finisher(output, height, width)
        self._memory = BatchMemory(batch_size * self._finisher.row_bytes, idle=prefetch + _SPARE)
        self.finish = self._finisher.finish
        self._text_labels = text_labels
        self._columns = tuple(columns)
        self._mixing = mixing
        row = (str,) * text_labels + (Any,) * len(self._columns)
        self._decoder: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder(list[tuple[row]])  # type: ignore[valid-type]

    def allocate(self, rows: int) -> NDArray[Any]:
        """Memory for the pictures of a batch of at most `batch_size` rows, as `finish` takes it."""
        return self._finisher.rows(self._memory.take(), rows)

    def read(self, texts: Sequence[bytes]) -> list[tuple[Any, ...]]:
        """The values of some rows' texts: the label, if it is text, then the columns.

        Raises:
            ProtocolError: a text is not a MessagePack array of just these.
        """
        # As one array of arrays, since a call costs more than a row.
        head = b"\xdd" + len(texts).to_bytes(4, "big")
        try:
            return self._decoder.decode(head + b"".join(texts))
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"the text of a row is not what the stream was said to have: {error}") from error

    def make(self, draft: Draft, epoch: int) -> Batch:
        """The batch of a draft that misses nothing; those to be kept close up, and may be mixed, in place."""
        images, indices, valid, texts = draft.images, draft.indices, draft.valid, draft.texts
        labels: Any = draft.labels
        if not draft.keep.all():
            images = images[: _close_up(images, draft.keep)]
            labels, indices, valid = labels[draft.keep], indices[draft.keep], valid[draft.keep]
            texts = list(compress(texts, draft.keep))
        if self._mixing is not None:
            labels = mix(images, labels, valid, self._mixing, epoch=epoch, first=draft.positions.start)
        values = [list(column) for column in zip(*texts, strict=True)]
        if self._text_labels:
            labels = values.pop(0)
        elif self._torch is not None:
            labels = self._torch.from_numpy(labels)
        return Batch(
            images=self._wrap(images),
            labels=labels,
            indices=indices,
            valid=valid,
            epoch=epoch,
            step=draft.step,
            rejects=tuple(draft.rejects[row] for row in sorted(draft.rejects)),
            extra=dict(zip(self._columns, values, strict=True)),
        )

    def _wrap(self, images: NDArray[Any]) -> Any:
        swap = self.output.layout == "channels_last"
        if self._torch is None:
            return images.transpose(0, 3, 1, 2) if swap else images
        tensor = self._torch.from_numpy(images)
        if self.output.dtype == "bfloat16":
            tensor = tensor.view(self._torch.bfloat16)
        return tensor.permute(0, 3, 1, 2) if swap else tensor


def import_torch() -> ModuleType:
    """
    Raises:
        ConfigError: it is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise ConfigError(
            f"output='torch' needs torch ({error}): pip install 'headrace[torch]', or use output='numpy'"
        ) from None
    return torch


def library(name: str) -> Library:
    """
    Raises:
        ConfigError: an unknown name.
    """
    for known in get_args(Library):
        if name == known:
            return name  # type: ignore[return-value]
    raise ConfigError(f"output: {name!r} is not one of {', '.join(get_args(Library))}")


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
