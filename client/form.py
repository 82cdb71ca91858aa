"""The form in which a Loader hands out batches: pictures and labels, finished somewhere, and texts beside them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from types import ModuleType
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from headrace.assembly import Draft
from headrace.batch import Batch
from headrace.errors import ConfigError, ProtocolError
from headrace.mix import Mixing
from headrace.output import Output
from headrace.pixels import HostPixels, Pixels

Library = Literal["torch", "numpy"]


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
        pixels: where pictures are finished; None: on the host.

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
        pixels: Pixels | None = None,
    ) -> None:
        if library == "numpy" and output.dtype == "bfloat16":
            raise ConfigError("dtype: bfloat16 is unknown to NumPy; use output='torch', or dtype float16 or float32")
        self.output = output
        torch = import_torch() if library == "torch" else None
        self._pixels = pixels or HostPixels(
            torch, output, height=height, width=width, batch_size=batch_size, prefetch=prefetch, mixing=mixing
        )
        self.allocate, self.finish = self._pixels.allocate, self._pixels.finish
        self.make_way, self.hand_over, self.close = self._pixels.make_way, self._pixels.hand_over, self._pixels.close
        self._text_labels = text_labels
        self._columns = tuple(columns)
        row = (str,) * text_labels + (Any,) * len(self._columns)
        self._decoder: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder(list[tuple[row]])  # type: ignore[valid-type]

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
        """The batch of a draft that misses nothing; those to be kept close up, and may be mixed, in place.

        Raises:
            MemoryError: there is none for it.
        """
        indices, valid, texts, kept = draft.indices, draft.valid, draft.texts, None
        if not draft.keep.all():
            kept = np.flatnonzero(draft.keep)
            indices, valid = indices[kept], valid[kept]
            texts = list(compress(texts, draft.keep))
        made = self._pixels.make(draft, kept, valid, epoch)
        values = [list(column) for column in zip(*texts, strict=True)]
        return Batch(
            images=made.images,
            labels=values.pop(0) if self._text_labels else made.labels,
            indices=indices,
            valid=valid,
            epoch=epoch,
            step=draft.step,
            rejects=tuple(draft.rejects[row] for row in sorted(draft.rejects)),
            extra=dict(zip(self._columns, values, strict=True)),
            arrival=made.arrival,
        )


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
