"""Frames and file descriptors over a Unix stream socket.

A frame is `u32 length (little endian), u8 descriptors, bytes`. Used between client and daemon (the session),
and between daemon and workers. The socket never blocks: an event loop calls `receive` and `flush` when the poller
says so, everybody else calls `recv` and `send` with a deadline.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence

from headrace.errors import DeadlineError, ProtocolError

_HEAD = 5
_FD = struct.Struct("i")
_READ = 1 << 18


class Closed(Exception):
    """The peer has ended, or this end was closed."""


class Channel:
    """One end of a connection.

    Args:
        sock: a connected `AF_UNIX` stream socket; owned from now on.
        limit: bytes of the largest frame taken; a larger one is a `ProtocolError`.
        descriptors: how many descriptors a frame may bring (0: the kernel closes whatever comes).
        turn: bytes after which `receive` looks no further, rounded up to a read: a peer that sends without end must
            not keep an event loop to itself.
    """

    def __init__(self, sock: socket.socket, *, limit: int = 1 << 24, descriptors: int = 0, turn: int = 1 << 20) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._limit = limit
        self._descriptors = descriptors
        self._turn = turn
        self._read_at_once = min(turn, _READ)
        self._in = bytearray()
        self._fds: deque[int] = deque()
        self._frames: deque[tuple[bytes, list[int]]] = deque()
        self._out: deque[tuple[memoryview, list[int]]] = deque()
        self._eof = False

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def pending(self) -> bool:
        """Whether `flush` has work left: poll for writing then."""
        return bool(self._out)

    @property
    def queued_bytes(self) -> int:
        """Bytes that the peer has not taken yet."""
        return sum(len(data) for data, _ in self._out)

    # -- event loop -----------------------------------------------------------------------------------------

    def receive(self) -> list[tuple[bytes, list[int]]]:
        """Every whole frame that has arrived, without waiting; of very many some, and the others by the next call.

        Raises:
            Closed: the peer has ended and every frame it sent was handed out before.
            ProtocolError: a frame over the limit, or descriptors that no frame may bring.
        """
        self._fill()
        frames = list(self._frames)
        self._frames.clear()
        if not frames and self._eof:
            raise Closed
        return frames

    def post(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Queue a frame and send what goes at once. Descriptors are duplicated, so the caller may close its own.

        Raises:
            Closed: the peer has ended, or this end was closed.
            OSError: (EMFILE) no descriptors are left for the duplicates; nothing was queued.
        """
        if self._eof:
            raise Closed
        head = len(frame).to_bytes(4, "little") + bytes([len(fds)])
        self._out.append((memoryview(head + frame), _duplicates(fds)))
        self.flush()

    def flush(self) -> None:
        """Send what goes without waiting.

        Raises:
            Closed: the peer has ended.
        """
        while self._out:
            data, fds = self._out[0]
            try:
                sent = socket.send_fds(self.sock, [data], fds) if fds else self.sock.send(data)
            except BlockingIOError:
                return
            except OSError as error:
                raise Closed from error
            for fd in fds:
                os.close(fd)
            if sent == len(data):
                self._out.popleft()
            else:
                self._out[0] = (data[sent:], [])

    # -- with a deadline ------------------------------------------------------------------------------------

    def send(self, frame: bytes, fds: Sequence[int] = (), *, timeout: float) -> None:
        """Send one frame.

        Raises:
            Closed: the peer has ended.
            DeadlineError: it does not take the frame.
        """
        deadline = time.monotonic() + timeout
        self.post(frame, fds)
        while self._out:
            self._wait(select.POLLOUT, deadline)
            self.flush()

    def recv(self, *, timeout: float) -> tuple[bytes, list[int]]:
        """The next frame and its descriptors, which are the caller's.

        Raises:
            Closed: the peer has ended.
            DeadlineError: nothing came.
            ProtocolError: a frame over the limit.
        """
        deadline = time.monotonic() + timeout
        while not self._frames:
            if self._eof:
                raise Closed
            self._wait(select.POLLIN, deadline)
            self._fill()
        return self._frames.popleft()

    def close(self) -> None:
        """Close the socket and every descriptor that was not handed on. May be called twice."""
        self._eof = True
        self.sock.close()
        for _, fds in [*self._out, *self._frames]:
            for fd in fds:
                os.close(fd)
        while self._fds:
            os.close(self._fds.popleft())
        self._out.clear()
        self._frames.clear()

    # -- inside ---------------------------------------------------------------------------------------------

    def _wait(self, events: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(self.sock, events)
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise DeadlineError("the other end of the connection neither answers nor closes")

    def _fill(self) -> None:
        taken = 0
        while not self._eof and taken < self._turn:
            try:
                data = self._read()
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self._eof = True
            self._in += data
            taken += len(data)
            self._cut()
            if len(data) < self._read_at_once:
                break

    def _read(self) -> bytes:
        if not self._descriptors:
            return self.sock.recv(self._read_at_once)
        # Not `socket.recv_fds`: it drops its flags, so a child started meanwhile would inherit the descriptors.
        room = socket.CMSG_LEN(self._descriptors * _FD.size)
        data, messages, _, _ = self.sock.recvmsg(self._read_at_once, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, payload in messages:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(payload) - len(payload) % _FD.size
                self._fds.extend(fd for (fd,) in _FD.iter_unpack(payload[:whole]))
        return data

    def _cut(self) -> None:
        while len(self._in) >= _HEAD:
            length, count = int.from_bytes(self._in[:4], "little"), self._in[4]
            if length > self._limit:
                raise ProtocolError(f"a frame of {length} bytes; at most {self._limit} are taken")
            if count > self._descriptors:
                raise ProtocolError(f"a frame announces {count} descriptors; at most {self._descriptors} are taken")
            if len(self._in) < _HEAD + length:
                break
            if count > len(self._fds):
                raise ProtocolError(f"a frame announces {count} descriptors, {len(self._fds)} came with it")
            frame = bytes(self._in[_HEAD : _HEAD + length])
            del self._in[: _HEAD + length]
            self._frames.append((frame, [self._fds.popleft() for _ in range(count)]))
        # They come with the first byte of their frame, and a read ends behind them.
        if len(self._fds) > (self._descriptors if self._in else 0):
            raise ProtocolError(f"{len(self._fds)} descriptors came that no frame announces")


def _duplicates(fds: Sequence[int]) -> list[int]:
    """All of them, or none."""
    made: list[int] = []
    try:
        for fd in fds:
            made.append(os.dup(fd))  # noqa: PERF401
    except OSError:
        for fd in made:
            os.close(fd)
        raise
    return made
