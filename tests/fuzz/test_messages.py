"""What comes over the wire, by the ten thousand and damaged in every way: a message, or a typed error, and no more."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from typing import Any, get_args

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from mutants import KINDS, Mutants

from headrace import protocol
from headrace.channel import Channel, Closed
from headrace.errors import ProtocolError
from headrace.protocol import Decoder, Message, Rows
from headrace.slots import SlotLayout
from headrace.tcp import RowsDelivery

DECODERS: dict[str, tuple[Decoder[Any], tuple[type[Message], ...]]] = {
    "Unix socket, from a client": (protocol.decode_session_request, get_args(protocol.SessionRequest)),
    "Unix socket, from a daemon": (protocol.decode_session_reply, get_args(protocol.SessionReply)),
    "beside it, from a client": (protocol.decode_client, get_args(protocol.ClientMessage)),
    "beside it, from a daemon": (protocol.decode_daemon, get_args(protocol.DaemonMessage)),
    "tcp, from a client": (protocol.decode_remote, get_args(protocol.RemoteMessage)),
    "tcp, from a daemon": (protocol.decode_remote_reply, get_args(protocol.RemoteReply)),
}
#: Of each decoder and seed.
MESSAGES = 1000
seeds = st.integers(0, (1 << 32) - 1)


def test_there_are_mutants_of_every_message() -> None:
    assert {*KINDS} == {*protocol.MESSAGES}


@pytest.mark.parametrize("carrier", DECODERS)
@settings(max_examples=10)
@given(seed=seeds)
def test_a_message_however_damaged_is_one_of_its_carrier_or_a_protocol_error(carrier: str, seed: int) -> None:
    decode, kinds = DECODERS[carrier]
    mutants = Mutants(seed, wild=0.8)
    taken = 0
    for _ in range(MESSAGES):
        try:
            message = decode(mutants.bytes(kinds, b"t" * 16))
        except ProtocolError:
            continue
        taken += 1
        assert type(message) in kinds
        assert decode(protocol.encode(message)) == message  # what was taken can be said again
    assert MESSAGES // 10 < taken < MESSAGES // 2


# -- frames over a Unix connection ------------------------------------------------------------------------------


def stream_of(r: random.Random, frames: int) -> bytes:
    """Frames of up to 120 bytes, of which 100 are taken; sometimes with a head that lies."""
    data = b""
    for _ in range(frames):
        body = r.randbytes(r.choice((0, 1, 50, 99, 100)))
        head = len(body).to_bytes(4, "little") + b"\0"
        if r.random() < 0.02:
            head = r.choice((b"\x65\0\0\0\0", b"\xff\xff\xff\xff\0", head[:4] + b"\1", r.randbytes(5)))
        data += head + body
    return data


def taken(data: bytes, cuts: list[int]) -> tuple[list[bytes], str]:
    """The frames that a channel finds when the bytes come in such pieces, and how it ends."""
    sock, other = socket.socketpair()
    channel = Channel(other, limit=100, turn=64)
    frames: list[bytes] = []
    try:
        for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True):
            sock.sendall(data[a:b])
            for _ in range(1 + (b - a) // 64):
                frames += [frame for frame, _ in channel.receive()]
                assert len(channel._in) < 105  # what is kept is less than one frame
        sock.close()
        while True:
            frames += [frame for frame, _ in channel.receive()]
    except (ProtocolError, Closed) as error:
        return frames, type(error).__name__
    finally:
        sock.close()
        channel.close()


@settings(max_examples=150)
@given(seed=seeds, frames=st.integers(0, 30))
def test_frames_are_the_same_however_they_are_cut_on_the_way(seed: int, frames: int) -> None:
    r = random.Random(seed)
    data = stream_of(r, frames)
    once, how = taken(data, [])
    cut, too = taken(data, sorted(r.choices(range(len(data) + 1), k=20)))
    assert how == too
    # Of what came together with a frame that is none nothing is taken.
    both = min(len(once), len(cut))
    assert once[:both] == cut[:both] and (how == "ProtocolError" or len(once) == len(cut))


@settings(max_examples=100)
@given(seed=seeds)
def test_descriptors_that_come_uninvited_stay_nowhere(seed: int) -> None:
    r = random.Random(seed)
    before = len(os.listdir("/proc/self/fd"))
    for most in (0, 1):
        sock, other = socket.socketpair()
        channel = Channel(other, limit=100, descriptors=most)
        given_out: list[int] = []
        with open(os.devnull) as file:
            try:
                for _ in range(10):
                    body = r.randbytes(r.randrange(10))
                    frame = len(body).to_bytes(4, "little") + bytes([r.choice((0, 1, 2))]) + body
                    cut = r.randrange(1, len(frame) + 1)
                    socket.send_fds(sock, [frame[:cut]], [file.fileno()] * r.choice((0, 1, 2, 5)))
                    sock.sendall(frame[cut:])
                    for _, fds in channel.receive():
                        assert len(fds) <= most
                        given_out += fds
                    assert len(channel._fds) <= most
            except ProtocolError:
                pass
        for fd in given_out:
            os.close(fd)
        sock.close()
        channel.close()
    assert len(os.listdir("/proc/self/fd")) == before


# -- rows over tcp, from a daemon that is none ------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def collector() -> Iterator[None]:
    """pyzmq's thread for frames that were not copied: one for the process."""
    from zmq.utils.garbage import gc

    zmq.Frame(bytes(1 << 17), track=True)
    yield
    gc.stop()


def frames_of(layout: SlotLayout, message: Rows) -> list[bytes]:
    """What has to follow the message."""
    size = message.count
    texts = [bytes(i % 3) for i in range(size)]
    label = np.dtype(layout.label_dtype).itemsize * max(1, layout.label_width)
    frames = [
        bytes(min(message.split, size - row) * layout.height * layout.width * 3)
        for row in range(0, size, message.split)
    ]
    frames += [bytes(label * size), bytes(8 * size), bytes(size)]
    if layout.text:
        frames += [np.cumsum([len(text) for text in texts], dtype=np.int64).tobytes(), b"".join(texts)]
    return frames


@settings(max_examples=40)
@given(seed=seeds)
def test_rows_are_what_was_announced_or_a_protocol_error(seed: int) -> None:
    mutants = Mutants(seed)
    r = mutants.random
    layout = SlotLayout(
        6, 2, 3, r.choice(("int64", "float32")), label_width=r.choice((0, 0, 3)), text=r.choice((0, 100))
    )
    sound = 0
    for _ in range(100):
        message = mutants.right((Rows,), b"")
        assert isinstance(message, Rows)
        frames = frames_of(layout, message)
        whole = r.random() < 0.3
        if not whole:
            for _ in range(r.randrange(1, 3)):
                i = r.randrange(len(frames))
                frames[i] = r.choice((b"", frames[i] + b"x", frames[i][:-1], r.randbytes(len(frames[i]))))
                if r.random() < 0.2:
                    frames.insert(i, r.choice(frames))
                elif r.random() < 0.2:
                    del frames[i]
                if not frames:
                    break
        try:
            delivery = RowsDelivery(layout, message, [zmq.Frame(frame) for frame in frames])
            rows = sum(len(levels) for levels in delivery.images(message.first, message.count))
            assert rows == len(delivery.labels) == len(delivery.indices) == len(delivery.status) == message.count
            if layout.text:
                assert len(delivery.texts(message.first, message.count)) == message.count
            sound += 1
        except ProtocolError:
            assert not whole
    assert sound >= 10
