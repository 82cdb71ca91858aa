"""What daemon, workers and indexer say to each other over their socket pairs: MessagePack, typed, no version.

Both ends are always the same installation, so unlike `headrace.protocol` this carries no version.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.protocol import RowReject, StageStatus
from headrace.slots import SlotLayout


class _Message(msgspec.Struct, frozen=True, tag_field="type", kw_only=True):
    pass


# -- daemon to worker ---------------------------------------------------------------------------------------


class Open(_Message, frozen=True, tag=True):
    """A stream that tasks may name from now on. The descriptors of the ring, of the index and of the flags that say
    which samples were decoded as a whole come with the frame, in this order.

    Attributes:
        stream: its number at this daemon.
        spec: `Stream.plain()` as JSON.
        layout, slots: of the ring.
        convicted: sample index → why it is not rendered (the ledger).
    """

    stream: int
    spec: str
    layout: SlotLayout
    slots: int
    convicted: dict[int, str]


class Convict(_Message, frozen=True, tag=True):
    """One more sample that is not to be rendered."""

    stream: int
    index: int
    reason: str


class Render(_Message, frozen=True, tag=True):
    """Fill `rows` of the chunk into the slot; answered by `Rendered` or `RenderFailed` of the same `job`.

    Attributes:
        fallback: whether the fallback's renderer is to do it: under the first one, workers died of these rows.
    """

    job: int
    stream: int
    epoch: int
    chunk: int
    slot: int
    rows: tuple[int, ...]
    fallback: bool = False


# -- worker to daemon ---------------------------------------------------------------------------------------


class Ready(_Message, frozen=True, tag=True):
    """The worker has started and takes tasks.

    Attributes:
        render_id: of its renderer, or of the fallback if that does not work here.
        trouble: why it does not, or "".
    """

    render_id: str
    trouble: str = ""


class Rendered(_Message, frozen=True, tag=True):
    """The rows are in the slot.

    Attributes:
        render_id: of the renderer that did it.
        trouble: why that was the fallback's, or "".
        stages: what it and what came before it has taken since the last answer of this kind, `wait` included.
    """

    job: int
    render_id: str
    trouble: str
    rejects: list[RowReject]
    stages: dict[str, StageStatus]


class RenderFailed(_Message, frozen=True, tag=True):
    """Samples could not be read, after retries; nothing is said about the chunk's other rows."""

    job: int
    kind: str
    text: str


class Leaving(_Message, frozen=True, tag=True):
    """The last message of a worker that ends by its own decision. What it was given and has not answered is to be given
    again; no picture is to blame.

    Attributes:
        text: why.
        failed: whether its device or library does not work, so that another one would end likewise; else it is to be
            replaced at once (it holds more memory than it may). It may come before `Ready`.
    """

    text: str
    failed: bool


# -- daemon and indexer -------------------------------------------------------------------------------------


class Build(_Message, frozen=True, tag=True):
    """List the data set of `spec` (`Stream.plain()` as JSON), or open the cached list."""

    spec: str
    cache_dir: str


class Progress(_Message, frozen=True, tag=True):
    """`total` is 0 while it is unknown."""

    done: int
    total: int


class Built(_Message, frozen=True, tag=True):
    """The index's descriptor comes with the frame; `file` is where it lies, None if only in memory."""

    file: str | None


class BuildFailed(_Message, frozen=True, tag=True):
    kind: str
    text: str


_encoder = msgspec.msgpack.Encoder()

#: Union decoders, one per receiver.
to_worker: msgspec.msgpack.Decoder[Open | Convict | Render] = msgspec.msgpack.Decoder(Open | Convict | Render)
from_worker: msgspec.msgpack.Decoder[Ready | Rendered | RenderFailed | Leaving] = msgspec.msgpack.Decoder(
    Ready | Rendered | RenderFailed | Leaving
)
to_indexer: msgspec.msgpack.Decoder[Build] = msgspec.msgpack.Decoder(Build)
from_indexer: msgspec.msgpack.Decoder[Progress | Built | BuildFailed] = msgspec.msgpack.Decoder(
    Progress | Built | BuildFailed
)


def encode(message: Any) -> bytes:
    return _encoder.encode(message)
