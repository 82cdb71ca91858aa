"""The wire protocol, and that `docs/protocol.md` says what the code does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from headrace import protocol
from headrace.errors import ProtocolError
from headrace.output import CutMix, MixUp, Output
from headrace.protocol import MESSAGES, Decoder, Message
from headrace.slots import SlotLayout

DOCUMENT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")

#: What a carrier takes in a direction, and how that is decoded.
DIRECTIONS: dict[str, tuple[Decoder[Any], tuple[type[Message], ...]]] = {
    "Unix socket, client to daemon": (protocol.decode_session_request, get_args(protocol.SessionRequest)),
    "Unix socket, daemon to client": (protocol.decode_session_reply, get_args(protocol.SessionReply)),
    "ZeroMQ beside it, client to daemon": (protocol.decode_client, get_args(protocol.ClientMessage)),
    "ZeroMQ beside it, daemon to client": (protocol.decode_daemon, get_args(protocol.DaemonMessage)),
    "tcp, client to daemon": (protocol.decode_remote, get_args(protocol.RemoteMessage)),
    "tcp, daemon to client": (protocol.decode_remote_reply, get_args(protocol.RemoteReply)),
}
#: The document's headings: who says it, and whether on the session or later.
HEADINGS = {
    "Session, client to daemon": ("Unix socket, client to daemon",),
    "Session, daemon to client": ("Unix socket, daemon to client",),
    "ZeroMQ, client to daemon": ("ZeroMQ beside it, client to daemon", "tcp, client to daemon"),
    "ZeroMQ, daemon to client": ("ZeroMQ beside it, daemon to client", "tcp, daemon to client"),
}
PARTS: tuple[type[Any], ...] = (
    SlotLayout, protocol.StageStatus, protocol.StreamStatus, protocol.ClientStatus, protocol.Fingerprints,
    Output, MixUp, CutMix, protocol.RowReject,
)  # fmt: skip

by_direction = pytest.mark.parametrize("direction", DIRECTIONS)


# -- the document -----------------------------------------------------------------------------------------------


def sections(level: str) -> dict[str, str]:
    """Heading → text up to the next heading of the same level or above."""
    pieces = re.split(rf"^#{{2,{len(level)}}} ", DOCUMENT, flags=re.MULTILINE)[1:]
    wanted = set(re.findall(rf"^{level} (.+)$", DOCUMENT, flags=re.MULTILINE))
    return {head: text for head, _, text in (piece.partition("\n") for piece in pieces) if head in wanted}


def table(text: str) -> list[list[str]]:
    """The cells of the rows below the head of the first table."""
    rows = re.findall(r"^\|(.*)\|$", text, flags=re.MULTILINE)
    return [[c.strip().replace("\\|", "|") for c in re.split(r"(?<!\\)\|", row)] for row in rows[2:]]


def bound(value: int | float) -> str:
    if value == 1e12:
        return "1e12"
    whole = int(value)
    for power in (32, 63, 64):
        if whole in (1 << power, (1 << power) - 1):
            return f"2^{power}" if whole == 1 << power else f"2^{power}-1"
    return str(whole)


def written(kind: inspect.Type) -> str:
    """A type as the document writes it."""
    match kind:
        case inspect.Metadata(type=inner):
            return written(inner)
        case inspect.IntType(ge=low, le=high):
            assert low is not None
            # MessagePack has no larger number.
            return f"int {bound(low)} … {bound((1 << 64) - 1 if high is None else high)}"
        case inspect.FloatType(ge=None, le=None):
            return "float"
        case inspect.FloatType(ge=low, le=high):
            assert low is not None and high is not None
            return f"float {bound(low)} … {bound(high)}"
        case inspect.BoolType():
            return "bool"
        case inspect.StrType(max_length=longest):
            return "str" if longest is None else f"str ≤ {longest}"
        case inspect.BytesType(min_length=shortest, max_length=longest):
            assert shortest == longest
            return f"bytes {longest}"
        case inspect.LiteralType(values=values):
            return " | ".join(sorted(map(str, values)))
        case inspect.ListType(item_type=item, min_length=shortest, max_length=longest):
            if longest is None or shortest is None:
                return f"list of {written(item)}" + ("" if longest is None else f", at most {longest}")
            assert shortest == longest
            return f"list of {longest} {written(item)}"
        case inspect.TupleType(item_types=items):
            return ", ".join(map(written, items))
        case inspect.DictType(key_type=key, value_type=value, max_length=longest):
            most = "" if longest is None else f", at most {longest}"
            return f"map of {written(key)} to ({written(value)}){most}"
        case inspect.UnionType(types=types):
            (inner,) = (t for t in types if not isinstance(t, inspect.NoneType))
            assert len(types) == 2
            return f"{written(inner)} or null"
        case inspect.StructType(cls=cls) | inspect.DataclassType(cls=cls):
            return cls.__name__
    raise AssertionError(f"the document has no word for {kind}")


def fields(cls: type[Any]) -> list[list[str]]:
    """What the first three columns of a class's table must say."""
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.StructType | inspect.DataclassType)
    return [
        [
            field.encode_name,
            written(field.type),
            "" if field.default is msgspec.NODEFAULT else json.dumps(msgspec.to_builtins(field.default)),
        ]
        for field in info.fields
    ]


def test_the_document_names_the_version_of_the_code() -> None:
    assert re.findall(r"^Protocol version: (\d+)$", DOCUMENT, flags=re.MULTILINE) == [str(protocol.VERSION)]


def test_the_document_has_each_message_once_in_the_order_of_the_code() -> None:
    headings = re.findall(r"^### (.+)$", DOCUMENT, flags=re.MULTILINE)
    names = [m.__name__ for m in MESSAGES] + [p.__name__ for p in PARTS]
    assert [h for h in headings if h in names] == names
    # And no other: what has a table of fields is a message or a part of one.
    assert [h for h, text in sections("###").items() if "| field | type | default |" in text] == names


@pytest.mark.parametrize("heading", HEADINGS)
def test_the_document_puts_each_message_under_its_direction(heading: str) -> None:
    ours = {m for direction in HEADINGS[heading] for m in DIRECTIONS[direction][1]}
    if heading.startswith("ZeroMQ"):
        ours -= {*get_args(protocol.SessionRequest), *get_args(protocol.SessionReply)}
    listed = re.findall(r"^### (.+)$", sections("##")[heading], flags=re.MULTILINE)
    assert listed == [m.__name__ for m in MESSAGES if m in ours]


def test_the_document_says_which_carrier_takes_which_messages() -> None:
    said = {
        f"{carrier}, {way}": re.findall(r"`(\w+)`", cell)
        for carrier, *cells in table(sections("##")["Carriers"])[:3]
        for way, cell in zip(("client to daemon", "daemon to client"), cells, strict=True)
    }
    assert said == {direction: [m.__name__ for m in messages] for direction, (_, messages) in DIRECTIONS.items()}


@pytest.mark.parametrize("cls", [*MESSAGES, *PARTS])
def test_the_document_lists_exactly_the_fields_types_bounds_and_defaults(cls: type[Any]) -> None:
    assert [row[:3] for row in table(sections("###")[cls.__name__])] == fields(cls)
    assert all(row[3] for row in table(sections("###")[cls.__name__]))


def test_the_document_gives_the_limits_of_the_code() -> None:
    numbers = [int(re.sub(r"\D", "", row[1])) for row in table(sections("##")["Messages"])]
    assert numbers == [
        protocol.CLIENT_LIMIT, protocol.DAEMON_LIMIT, protocol.MAX_OUTSTANDING, protocol.MAX_LANES,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "layout",
    [SlotLayout(chunk=2, height=3, width=5), SlotLayout(2, 3, 5, "float32", label_width=7, text=11)],
    ids=["numbers", "vectors and text"],
)
def test_the_document_draws_the_slot_of_the_code(layout: SlotLayout) -> None:
    names = msgspec.structs.asdict(layout)
    drawn = []
    for name, dtype, shape in table(sections("##")["The ring"]):
        sides = shape.split(", or ")[-1 if layout.label_width else 0].split(", ")
        side_lengths = tuple(int(side) if side.isdecimal() else names[side] for side in sides)
        drawn.append((name, names.get(dtype, dtype), side_lengths))
    assert drawn == [(name, str(dtype), shape) for name, (dtype, shape, _) in layout.fields.items()]


def test_every_message_goes_just_one_way() -> None:
    ways = {way: set() for way in ("client to daemon", "daemon to client")}
    for direction, (_, messages) in DIRECTIONS.items():
        ways[direction.partition(", ")[2]].update(messages)
    assert not set.intersection(*ways.values())
    assert set.union(*ways.values()) == set(Message.__subclasses__()) == set(MESSAGES)


# -- the code ---------------------------------------------------------------------------------------------------

counts = st.integers(0, (1 << 63) - 1)
names = st.text(max_size=50)
tokens = st.binary(min_size=16, max_size=16)
windows = st.integers(1, protocol.MAX_OUTSTANDING)
texts = st.lists(names, max_size=4)
triples = st.tuples(*[st.floats(0.01, 10)] * 3)
alphas = st.floats(0.01, 10)
lanes = st.integers(0, protocol.MAX_LANES)
sides = st.integers(1, 1 << 16)
seconds = st.floats(0, 1e12)
histograms = st.lists(counts, min_size=protocol.BUCKETS, max_size=protocol.BUCKETS)
stages = st.dictionaries(
    st.text(max_size=32), st.builds(protocol.StageStatus, counts, seconds, counts, histograms), max_size=3
)
clients = st.builds(protocol.ClientStatus, *[names] * 4, seconds, *[counts] * 8, seconds, seconds, stages)
rejects = st.lists(st.builds(protocol.RowReject, counts, counts, names, names, names), max_size=3)

SOME: dict[type[Message], st.SearchStrategy[Message]] = {
    protocol.Hello: st.builds(protocol.Hello, stream=st.none() | names, transport=names, client=names, device=names),
    protocol.Ping: st.builds(protocol.Ping, detail=st.booleans()),
    protocol.Pong: st.builds(
        protocol.Pong,
        pid=counts,
        version=names,
        workers=st.lists(counts, max_size=3),
        deaths=counts,
        uptime=seconds,
        stages=stages,
        worker_seconds=seconds,
        streams=st.dictionaries(names, st.none() | st.builds(protocol.StreamStatus, *[counts] * 13), max_size=3),
        sessions=counts,
        clients=st.lists(clients, max_size=2),
        address=names,
        instance=tokens,
        notices=texts,
    ),
    protocol.Indexing: st.builds(protocol.Indexing, stream=names, unit=names, done=counts, total=counts),
    protocol.Welcome: st.builds(
        protocol.Welcome,
        pid=counts,
        token=tokens,
        endpoint=names,
        transport=names,
        stream=names,
        layout=st.builds(
            SlotLayout,
            *[sides] * 3,
            label_dtype=st.sampled_from(["int64", "float32"]),
            label_width=st.integers(0, 1 << 20),
            text=st.integers(0, 1 << 40),
        ),
        slots=st.integers(1, 1 << 32),
        samples=st.integers(1, (1 << 63) - 1),
        seed=st.integers(0, (1 << 64) - 1),
        classes=texts,
        labels=st.sampled_from(["numbers", "text"]),
        columns=texts,
        fingerprints=st.builds(protocol.Fingerprints, names, names, names),
        output=st.builds(Output, st.sampled_from(["float16", "float32"]), mean=triples, std=triples)
        | st.just(Output("uint8", "NHWC"))
        | st.builds(Output, mixup=st.none() | st.builds(MixUp, alphas), cutmix=st.builds(CutMix, alphas)),
        on_bad_sample=st.sampled_from(["skip", "replace", "mask", "raise"]),
        max_bad=st.floats(0, 1),
        render_id=names,
        window=windows,
        in_flight=st.integers(1, 1 << 32),
        notices=texts,
    ),
    protocol.Refused: st.builds(protocol.Refused, kind=names, text=names),
    protocol.Goodbye: st.builds(protocol.Goodbye, reason=names),
    protocol.Attach: st.builds(protocol.Attach, token=tokens, lane=lanes),
    protocol.Leave: st.builds(protocol.Leave, token=tokens),
    protocol.Get: st.builds(
        protocol.Get, token=tokens, request=counts, epoch=counts, chunk=counts, first=counts, count=counts
    ),
    protocol.Release: st.builds(protocol.Release, token=tokens, request=counts),
    protocol.Cancel: st.builds(protocol.Cancel, token=tokens, request=counts),
    protocol.Report: st.builds(
        protocol.Report, token=tokens, batches=counts, images=counts, waited=seconds, spent=seconds, stages=stages
    ),
    protocol.Chunk: st.builds(
        protocol.Chunk,
        request=counts,
        slot=counts,
        generation=counts,
        render_id=names,
        window=windows,
        rejects=rejects,
    ),
    protocol.Rows: st.builds(
        protocol.Rows,
        request=counts,
        first=counts,
        count=sides,
        split=sides,
        render_id=names,
        window=windows,
        rejects=rejects,
    ),
    protocol.Failed: st.builds(protocol.Failed, request=counts, kind=names, text=names),
    protocol.Unknown: st.builds(protocol.Unknown, token=tokens),
    protocol.Attached: st.builds(protocol.Attached, lane=lanes),
    protocol.Alive: st.builds(protocol.Alive),
}

GET: dict[str, Any] = {"type": "Get", "token": bytes(16), "request": 1, "epoch": 2, "chunk": 3}


def wire(content: object, version: int = protocol.VERSION) -> bytes:
    return bytes([version]) + msgspec.msgpack.encode(content)


def messages(direction: str) -> st.SearchStrategy[Message]:
    return st.one_of([SOME[m] for m in DIRECTIONS[direction][1]])


@by_direction
@given(data=st.data())
def test_a_message_arrives_as_it_was_sent(direction: str, data: st.DataObject) -> None:
    decode, _ = DIRECTIONS[direction]
    message = data.draw(messages(direction))
    encoded = protocol.encode(message)
    assert encoded[0] == protocol.VERSION
    assert decode(encoded) == message
    assert decode(memoryview(encoded)) == message


@by_direction
@given(data=st.data())
def test_what_a_carrier_does_not_take_in_a_direction_is_refused(direction: str, data: st.DataObject) -> None:
    decode, taken = DIRECTIONS[direction]
    other = data.draw(st.sampled_from([m for m in MESSAGES if m not in taken]))
    encoded = protocol.encode(data.draw(SOME[other]))
    with pytest.raises(ProtocolError, match="not a message: Invalid value"):
        decode(encoded)


@given(version=st.integers(0, 255).filter(lambda v: v != protocol.VERSION))
def test_another_version_is_refused_by_number_whatever_follows(version: int) -> None:
    text = f"protocol version {version}, this side speaks {protocol.VERSION}: install the same release"
    for content in (GET, "something else"):
        with pytest.raises(ProtocolError, match=text):
            protocol.decode_client(wire(content, version))


@pytest.mark.parametrize("data", [b"", bytes([protocol.VERSION])])
def test_an_empty_message_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        protocol.decode_client(data)


@pytest.mark.parametrize(
    ("decode", "limit"),
    [
        (protocol.decode_session_request, protocol.CLIENT_LIMIT),
        (protocol.decode_client, protocol.CLIENT_LIMIT),
        (protocol.decode_session_reply, protocol.DAEMON_LIMIT),
        (protocol.decode_daemon, protocol.DAEMON_LIMIT),
        (protocol.decode_remote, protocol.CLIENT_LIMIT),
        (protocol.decode_remote_reply, protocol.DAEMON_LIMIT),
    ],
)
def test_a_message_over_the_limit_is_refused_unread(decode: Decoder[Any], limit: int) -> None:
    with pytest.raises(ProtocolError, match=f"a message of {limit + 1} bytes; at most {limit} are taken"):
        decode(bytes(limit + 1))


def test_the_longest_message_is_taken() -> None:
    reason = protocol.Goodbye(reason="")
    room = protocol.DAEMON_LIMIT - len(protocol.encode(reason)) - 4
    longest = protocol.Goodbye(reason="x" * room)
    assert len(protocol.encode(longest)) == protocol.DAEMON_LIMIT
    assert protocol.decode_session_reply(protocol.encode(longest)) == longest


def test_what_follows_a_message_is_refused() -> None:
    assert protocol.decode_client(wire(GET)) == protocol.Get(token=bytes(16), request=1, epoch=2, chunk=3)
    for junk in (b"\0", protocol.encode(protocol.Ping())):
        with pytest.raises(ProtocolError, match="trailing"):
            protocol.decode_client(wire(GET) + junk)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"more": 1}, "unknown field `more`"),
        ({"request": None}, "Expected `int`, got `None`"),
        ({"request": 1.0}, "Expected `int`, got `float`"),
        ({"request": "1"}, "Expected `int`, got `str`"),
        ({"request": True}, "Expected `int`, got `bool`"),
        ({"request": -1}, "Expected `int` >= 0"),
        ({"epoch": 1 << 63}, "Expected `int` <="),
        ({"chunk": (1 << 64) - 1}, "Expected `int` <="),
        ({"token": "0123456789abcdef"}, "Expected `bytes`"),
        ({"token": bytes(15)}, "Expected `bytes` of length >= 16"),
        ({"token": bytes(17)}, "Expected `bytes` of length <= 16"),
        ({"type": "get"}, "Invalid value 'get'"),
        ({"type": 1}, "Expected `str`"),
    ],
)
def test_a_field_that_is_unknown_of_another_type_or_out_of_bounds_is_refused(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ProtocolError, match=message):
        protocol.decode_client(wire(GET | change))


@pytest.mark.parametrize("name", sorted(GET))
def test_a_missing_field_is_refused(name: str) -> None:
    with pytest.raises(ProtocolError, match="missing required field"):
        protocol.decode_client(wire({k: v for k, v in GET.items() if k != name}))


def test_fields_may_come_in_any_order() -> None:
    assert protocol.decode_client(wire(dict(reversed(GET.items())))) == protocol.decode_client(wire(GET))


@pytest.mark.parametrize("content", [[], ["Get", 1], None, 7, "Get", {}, {"type": "Get"}, [GET]])
def test_what_is_no_map_of_a_message_is_refused(content: object) -> None:
    with pytest.raises(ProtocolError):
        protocol.decode_client(wire(content))


@pytest.mark.parametrize("opening", [b"", b"\x81\xa1z", b"\x82\xa1z", b"\x81\xa4type"])
def test_deep_nesting_is_refused(opening: bytes) -> None:
    data = bytes([protocol.VERSION]) + opening + b"\x91" * 60_000
    with pytest.raises(ProtocolError):
        protocol.decode_client(data)


@given(SOME[protocol.Welcome])
def test_an_output_that_makes_no_sense_is_refused(welcome: Message) -> None:
    content = msgspec.to_builtins(welcome, builtin_types=(bytes,))
    content["output"] = {"dtype": "uint8", "layout": "NCHW", "mean": [1, 1, 1], "std": [1, 1, 1]}
    with pytest.raises(ProtocolError, match="uint8 hands out the rendered levels"):
        protocol.decode_session_reply(wire(content))
