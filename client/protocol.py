"""The wire protocol between client and daemon: types, version, encoding. `docs/protocol.md` is its text.

A message is one byte, the protocol's version, then a MessagePack map with the message's type in `"type"`.
Two carriers: a Unix connection (`Channel` frames), which begins with `Hello`, hands over the ring's descriptor and
whose end is the session's end; and ZeroMQ (DEALER to ROUTER), for everything that is frequent, and from another host
for everything. There `Rows` is followed by frames of plain bytes; every other message is one frame. Nothing here is
ever unpickled or evaluated; every field is typed, every size bounded.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from headrace.errors import ProtocolError
from headrace.output import Output
from headrace.slots import SlotLayout

VERSION = 3

#: Largest message that a daemon takes from a client, and a client from a daemon (class names may be many).
CLIENT_LIMIT = 1 << 16
DAEMON_LIMIT = 1 << 26

#: GETs that one session may have outstanding, whatever its window says; more ends the session.
MAX_OUTSTANDING = 1024

#: Data connections that one session may have over tcp.
MAX_LANES = 16

#: Of a stage's histogram, and stages of one report at most.
BUCKETS = 32
MAX_STAGES = 16

#: Sessions that `Pong` names: some 10 KB each, by what clients may say of themselves.
MAX_CLIENTS = 1000

#: In a render id: equal ids do not give equal bytes, because a picture depends a little on those beside it. What makes
#: it so follows, the share of `workers.hw_decoder_load`.
IMPURE = "hw_decoder_load-"

#: What fits into the int64 of an array, so that nothing overflows behind the decoder.
MAX_COUNT = (1 << 63) - 1
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Name = Annotated[str, Meta(max_length=1024)]
Token = Annotated[bytes, Meta(min_length=16, max_length=16)]
#: Bounded like `Count`; of a float NaN is no such number either.
Seconds = Annotated[float, Meta(ge=0, le=1e12)]


class Message(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True, kw_only=True):
    """Root of all messages; the tag is the class name."""


# -- session, client to daemon ------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag=True):
    """Opens a session on one stream. Said on a Unix connection, or over tcp on the session's control connection.

    Attributes:
        stream: its name; None where the daemon has just one.
        transport: how chunks are to come, `shm` or `tcp`; over tcp only `tcp`.
        client: who this is, for the daemon's log.
        device: of the GPU that the batches go to, its PCI bus id as NVML writes it, in lower case; "": none.
    """

    stream: Name | None
    transport: Name = "shm"
    client: Name = ""
    device: Name = ""


class Ping(Message, frozen=True, tag=True):
    """Asks whether the daemon is usable; answered with `Pong`, no session is opened.

    Attributes:
        detail: whether `stages` and `clients` are wanted, too. A health check does without what takes time for each.
    """

    detail: bool = False


# -- session, daemon to client ------------------------------------------------------------------------------


class StageStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stage of the way of a picture has taken so far.

    Attributes:
        count: pieces of work: pictures, or batches or chunks where a stage has nothing smaller.
        seconds: of one thread at a time, summed.
        nbytes: that were read or written.
        histogram: how long a piece of work took, counts by bucket: bucket 0 is less than 1 µs, bucket i from 2^(i - 1)
            to less than 2^i µs, and the last one all above.
    """

    count: Count
    seconds: Seconds
    nbytes: Count
    histogram: Annotated[list[Count], Meta(min_length=BUCKETS, max_length=BUCKETS)]


#: By name.
StageMap = Annotated[dict[Annotated[str, Meta(max_length=32)], StageStatus], Meta(max_length=MAX_STAGES)]


class StreamStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An open stream, and what it has done since it was opened.

    Attributes:
        samples: of an epoch.
        slots: of the ring.
        computed: chunks that workers rendered; `recomputed` counts those that had been rendered before.
        delivered: chunks that were leased to a session.
        failed: chunks that could not be had.
        ready: slots that hold a chunk; leased: those of them that somebody reads now.
        filling: slots that a worker writes to, or will.
        waiting: requests that have no answer yet.
        hits: of `delivered`, chunks that were computed for an earlier request.
        rejected: bad pictures, as often as they were met.
        images: rows that were computed, with those of bad pictures.
    """

    samples: Count
    slots: Count
    computed: Count
    recomputed: Count
    delivered: Count
    failed: Count
    ready: Count
    leased: Count
    filling: Count
    waiting: Count
    hits: Count
    rejected: Count
    images: Count


class ClientStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A session.

    Attributes:
        client: who it is, as the daemon's log has it.
        stream, transport, device: of its `Hello`.
        age: seconds since it came.
        outstanding: requests that have no answer yet.
        leases: slots that it reads now.
        delivered: chunks that it got.
        hits: of these, those that were computed for an earlier request, of anybody.
        recomputed: of these, those that were computed for it although they had been rendered before.
        lag: chunks that it is behind the furthest session of its stream.
        batches, images, waited, spent, stages: as in its last `Report`; before the first one 0 and empty.
    """

    client: str
    stream: str
    transport: str
    device: str
    age: Seconds
    outstanding: Count
    leases: Count
    delivered: Count
    hits: Count
    recomputed: Count
    lag: Count
    batches: Count
    images: Count
    waited: Seconds
    spent: Seconds
    stages: StageMap


class Pong(Message, frozen=True, tag=True):
    """The daemon is usable.

    Attributes:
        pid: of the daemon.
        version: of the release it runs.
        workers: their processes.
        deaths: of workers so far.
        uptime: seconds since it started.
        stages: of workers, summed over all there have been, and the daemon's own `send`; empty unless asked for.
        worker_seconds: from the moment a worker was ready to its end or now, summed likewise. A CPU worker's stages add
            up to it; one of a GPU has several threads.
        streams: by name; None until somebody has asked for the stream and it is open.
        sessions: that it has now; clients: the same, one by one, of too many the oldest; empty unless asked for.
        address: of its Unix socket. Who reaches it there, and finds the same `instance`, is on the same host.
        instance: random, of this run of the daemon.
        notices: what does not work as it is meant to, a sentence each.
    """

    pid: Count
    version: str
    workers: list[Count]
    deaths: Count
    uptime: Seconds
    stages: StageMap
    worker_seconds: Seconds
    streams: dict[str, StreamStatus | None]
    sessions: Count
    clients: Annotated[list[ClientStatus], Meta(max_length=MAX_CLIENTS)]
    address: str
    instance: Token
    notices: list[str]


class Indexing(Message, frozen=True, tag=True):
    """The stream is being opened: a sign of life, repeated until `Welcome`.

    Attributes:
        unit: `files` that are listed, then `MiB` of memory that are reserved.
        done, total: of that unit; 0: the total is unknown.
    """

    stream: str
    unit: str
    done: Count
    total: Count


class Fingerprints(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hex digests: which files and labels; in which order; which pixels come out."""

    data: str
    order: str
    pixels: str


class Welcome(Message, frozen=True, tag=True):
    """The session stands. With transport `shm` the read-only descriptor of the ring comes with this frame.

    Attributes:
        token: names the session in every ZeroMQ message.
        endpoint: where the daemon's ROUTER is bound, for transport `shm`, and for `tcp` where this was said on a Unix
            connection; empty where the connection that `Hello` came over goes there already.
        layout, slots: of the ring, and how to map it.
        samples: N, the positions of an epoch.
        classes: names by label; empty where labels are no classes.
        labels: `numbers`, in the field `labels`; or `text`, the first value of each row's text.
        columns: names of the further values of each row's text.
        output, on_bad_sample, max_bad: the stream's defaults for the Loader's arguments.
        render_id: of the renderer that the daemon uses now.
        window: GETs that may be outstanding now; `Chunk` brings later values.
        in_flight: chunks that the workers are at at once.
        notices: what the listing left out, and what at the daemon does not work as it is meant to, a sentence each,
            for the log.
    """

    pid: Count
    token: Token
    endpoint: str
    transport: str
    stream: str
    layout: SlotLayout
    slots: Annotated[int, Meta(ge=1, le=1 << 32)]
    samples: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
    seed: Annotated[int, Meta(ge=0)]
    classes: list[str]
    labels: Literal["numbers", "text"]
    columns: list[str]
    fingerprints: Fingerprints
    output: Output
    on_bad_sample: Literal["skip", "replace", "mask", "raise"]
    max_bad: Annotated[float, Meta(ge=0, le=1)]
    render_id: str
    window: Annotated[int, Meta(ge=1, le=MAX_OUTSTANDING)]
    in_flight: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
    notices: list[str]


class Refused(Message, frozen=True, tag=True):
    """No session, and why: `kind` is a class of `headrace.errors`."""

    kind: str
    text: str


class Goodbye(Message, frozen=True, tag=True):
    """The session is over: the daemon is stopping, or the client broke a rule. The client closes the connection."""

    reason: str


# -- ZeroMQ, client to daemon -------------------------------------------------------------------------------


class Attach(Message, frozen=True, tag=True):
    """Joins the connection that it comes over to a session with transport `tcp`; answered by `Attached`.

    Attributes:
        lane: 0 is the control connection, needed where `Hello` was said elsewhere; from 1 on they are data connections,
            over which `Rows` come. At least one of these is attached before the first `Get`.
    """

    token: Token
    lane: Annotated[int, Meta(ge=0, le=MAX_LANES)]


class Leave(Message, frozen=True, tag=True):
    """The session over tcp is over. Where there is a Unix connection its end says so."""

    token: Token


class Get(Message, frozen=True, tag=True):
    """Asks for a chunk; answered by `Chunk`, `Rows` or `Failed` with the same `request`, in any order.

    Attributes:
        request: chosen by the client, growing within a session.
        epoch, chunk: the address, together with the session's stream.
        first, count: the run of rows that is wanted; 0 rows: all. Over `shm` the whole chunk is leased in any case.
    """

    token: Token
    request: Count
    epoch: Count
    chunk: Count
    first: Count = 0
    count: Count = 0


class Release(Message, frozen=True, tag=True):
    """The client has copied what it wanted from this `Chunk`. Not for `Rows`, which are the client's own."""

    token: Token
    request: Count


class Cancel(Message, frozen=True, tag=True):
    """Requests up to and including this one are not wanted any more.

    One that was answered meanwhile is still to be released.
    """

    token: Token
    request: Count


class Report(Message, frozen=True, tag=True):
    """How the client is served, for those who look at the daemon: at most once a second, and at the end of an epoch. No
    answer.

    Attributes:
        batches, images: that the trainer took since this Loader was made; of images those that are valid.
        waited: seconds that it waited for them; spent: seconds from the first one on, without what lies between epochs.
        stages: of the Loader, since it was made.
    """

    token: Token
    batches: Count
    images: Count
    waited: Seconds
    spent: Seconds
    stages: StageMap


# -- ZeroMQ, daemon to client -------------------------------------------------------------------------------


class RowReject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row whose picture's content is bad.

    Attributes:
        row: within the chunk.
        index: line of the listing.
        path: the file, root included, in the escaped form of `headrace ls`.
        stage: `read`, `probe`, `decode` or `worker`.
        reason: a sentence.
    """

    row: Count
    index: Count
    path: str
    stage: str
    reason: str


class Chunk(Message, frozen=True, tag=True):
    """A chunk is ready in `slot`, and leased to this session until `Release`.

    The reader checks that the slot's generation equals `generation` before and after its copy; if not, the copy is
    thrown away and the chunk asked for again.
    """

    request: Count
    slot: Count
    generation: Count
    render_id: str
    window: Annotated[int, Meta(ge=1, le=MAX_OUTSTANDING)]
    rejects: list[RowReject]


class Rows(Message, frozen=True, tag=True):
    """Rows of a chunk, over a data connection; their fields follow, a frame each, in the order of the slot's layout:
    images (in frames of `split` rows), labels, indices, status, and if the layout has text, ends and text.

    Attributes:
        request: that this answers.
        first, count: which rows of the chunk; `ends` count from the first one's beginning.
        split: rows in each frame of images but the last.
        render_id, window: as in `Chunk`.
        rejects: those among these rows; `row` counts within the chunk.
    """

    request: Count
    first: Count
    count: Annotated[int, Meta(ge=1, le=1 << 16)]
    split: Annotated[int, Meta(ge=1, le=1 << 16)]
    render_id: str
    window: Annotated[int, Meta(ge=1, le=MAX_OUTSTANDING)]
    rejects: list[RowReject]


class Attached(Message, frozen=True, tag=True):
    """The connection belongs to the session."""

    lane: Annotated[int, Meta(ge=0, le=MAX_LANES)]


class Alive(Message, frozen=True, tag=True):
    """Sent now and then over tcp, so that the daemon learns of connections that have ended; says nothing."""


class Failed(Message, frozen=True, tag=True):
    """The chunk cannot be had: an I/O error that did not go away, by name."""

    request: Count
    kind: str
    text: str


class Unknown(Message, frozen=True, tag=True):
    """The token names no session: say `Hello` again."""

    token: Token


SessionRequest = Hello | Ping
SessionReply = Pong | Indexing | Welcome | Refused | Goodbye
ClientMessage = Get | Release | Cancel | Report
DaemonMessage = Chunk | Failed | Unknown
#: Over tcp, where the session has no Unix connection.
RemoteMessage = Hello | Ping | Attach | Leave | Get | Cancel | Report
RemoteReply = SessionReply | Attached | Rows | Failed | Unknown | Alive

#: Every message type, in the order of `docs/protocol.md`.
MESSAGES: tuple[type[Message], ...] = (
    Hello,
    Ping,
    Pong,
    Indexing,
    Welcome,
    Refused,
    Goodbye,
    Attach,
    Leave,
    Get,
    Release,
    Cancel,
    Report,
    Chunk,
    Rows,
    Failed,
    Unknown,
    Attached,
    Alive,
)

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()
_HEAD = bytes([VERSION])


class Decoder(Generic[T]):
    """Decodes one direction of the protocol: any message outside its union is refused."""

    def __init__(self, union: Any, limit: int) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)
        self._limit = limit

    def __call__(self, data: bytes | memoryview) -> T:
        """
        Raises:
            ProtocolError: another version, too large, or not a message of this direction.
        """
        if len(data) > self._limit:
            raise ProtocolError(f"a message of {len(data)} bytes; at most {self._limit} are taken")
        if len(data) < 2 or data[0] != VERSION:
            theirs = data[0] if len(data) else "none"
            raise ProtocolError(
                f"protocol version {theirs}, this side speaks {VERSION}: install the same release on both sides"
            )
        try:
            return self._decoder.decode(data[1:])
        except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors
            raise ProtocolError(f"not a message: {error}") from error


def encode(message: Message) -> bytes:
    """The bytes of a message, version byte first."""
    return _HEAD + _encoder.encode(message)


decode_session_request: Decoder[Hello | Ping] = Decoder(SessionRequest, CLIENT_LIMIT)
decode_session_reply: Decoder[Pong | Indexing | Welcome | Refused | Goodbye] = Decoder(SessionReply, DAEMON_LIMIT)
decode_client: Decoder[Get | Release | Cancel | Report] = Decoder(ClientMessage, CLIENT_LIMIT)
decode_daemon: Decoder[Chunk | Failed | Unknown] = Decoder(DaemonMessage, DAEMON_LIMIT)
decode_remote: Decoder[Hello | Ping | Attach | Leave | Get | Cancel | Report] = Decoder(RemoteMessage, CLIENT_LIMIT)
decode_remote_reply: Decoder[
    Pong | Indexing | Welcome | Refused | Goodbye | Attached | Rows | Failed | Unknown | Alive
] = Decoder(RemoteReply, DAEMON_LIMIT)
