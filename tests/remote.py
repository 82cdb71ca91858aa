"""Clients over tcp that do what they are told, right or wrong; one of them without ZeroMQ."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray

from headrace import protocol
from headrace.protocol import Alive, Attach, Attached, Get, Hello, Indexing, Message, Rows, Welcome

TIMEOUT = 30.0


class RemoteClient:
    """A session over tcp by hand.

    Args:
        address: `tcp://HOST:PORT`.
        lanes: data connections to attach.
        unread: messages that each data connection takes in before it reads no more; 0: all.
    """

    def __init__(self, address: str, *, stream: str | None = None, lanes: int = 1, unread: int = 0) -> None:
        self.address = address
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.control = self.connect()
        self.lanes: list[zmq.Socket[bytes]] = []
        try:
            self._join(stream, lanes, unread)
        except BaseException:
            self.close()
            raise

    def _join(self, stream: str | None, lanes: int, unread: int) -> None:
        self.say(Hello(stream=stream, transport="tcp", client="raw"))
        welcome = self.told(Welcome)
        assert isinstance(welcome, Welcome)
        self.welcome = welcome
        for number in range(1, 1 + lanes):
            self.lanes.append(lane := self.connect(unread))  # not before: who says nothing for long is cut off
            self.say(Attach(token=welcome.token, lane=number), lane)
            assert self.told(Attached, lane) == Attached(lane=number)

    def connect(self, unread: int = 0) -> zmq.Socket[bytes]:
        made = self.context.socket(zmq.DEALER)
        made.linger = 0
        made.rcvhwm = unread
        made.sndhwm = 0
        made.sndtimeo = int(1000 * TIMEOUT)  # when it has been cut off, there is nobody to send to
        made.reconnect_ivl = -1
        made.connect(self.address)
        return made

    def say(self, message: Message, at: zmq.Socket[bytes] | None = None) -> None:
        (at or self.control).send(protocol.encode(message))

    def get(self, request: int, chunk: int, *, epoch: int = 0, first: int = 0, count: int = 0) -> None:
        token = self.welcome.token
        self.say(Get(token=token, request=request, epoch=epoch, chunk=chunk, first=first, count=count))

    def told(self, kind: type[Message] | None = None, at: zmq.Socket[bytes] | None = None) -> Message:
        """The next message that is no sign of life; of this kind, if one is given."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            message, frames = self.receive(at or self.control, deadline)
            if not isinstance(message, Alive | Indexing):
                assert kind is None or isinstance(message, kind), message
                assert not frames
                return message

    def rows(self, at: zmq.Socket[bytes] | None = None) -> tuple[Rows, dict[str, NDArray[Any]]]:
        """The next rows of a data connection, by field."""
        message, frames = self.receive(at or self.lanes[0], time.monotonic() + TIMEOUT)
        assert isinstance(message, Rows), message
        layout = self.welcome.layout
        parts = -(-message.count // message.split)
        data = [b"".join(frames[:parts]), *frames[parts:]]
        fields = {}
        for (name, (dtype, shape, _)), field in zip(layout.fields.items(), data, strict=False):
            fields[name] = np.frombuffer(field, dtype).reshape(-1, *shape[1:])
        assert len(fields) == len(data) == (6 if layout.text else 4)
        assert all(len(fields[name]) == message.count for name in fields if name != "text")
        return message, fields

    def receive(self, at: zmq.Socket[bytes], deadline: float) -> tuple[Message, Sequence[bytes]]:
        assert at.poll(max(0, int(1000 * (deadline - time.monotonic())))), "no answer"
        head, *frames = at.recv_multipart()
        return protocol.decode_remote_reply(head), frames

    def hears_nothing_more(self, seconds: float, at: zmq.Socket[bytes] | None = None) -> bool:
        """Whether no message comes for so long."""
        return not (at or self.control).poll(int(1000 * seconds))

    def close(self) -> None:
        self.context.destroy(0)


class BareClient:
    """The bytes of ZMTP 3.1 as a DEALER sends them, over a socket that one may read as one likes."""

    def __init__(self, address: str, *, receive_buffer: int | None = None) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(TIMEOUT)
        self.socket.connect((host, int(port)))
        self.socket.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32))
        assert len(self.read(64)) == 64
        ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
        self.socket.sendall(b"\x04" + bytes([len(ready)]) + ready)

    def say(self, message: Message) -> None:
        data = protocol.encode(message)
        assert len(data) < 256
        self.socket.sendall(b"\x00" + bytes([len(data)]) + data)

    def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count and (more := self.socket.recv(count - len(data))):
            data += more
        return data

    def message(self) -> list[bytes]:
        """The frames of the next message; commands, such as heartbeats, are passed over."""
        frames = []
        while True:
            flags = self.read(1)[0]
            size = int.from_bytes(self.read(8 if flags & 2 else 1), "big")
            data = self.read(size)
            if not flags & 4:
                frames.append(data)
                if not flags & 1:
                    return frames

    def told(self) -> Message:
        while isinstance(message := protocol.decode_remote_reply(self.message()[0]), Alive | Indexing):
            pass
        return message

    def close(self) -> None:
        self.socket.close()
