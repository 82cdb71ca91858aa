"""Clients that say whatever they like, thousands of times a second, while two others get their epochs from the daemon.

    python tests/barrage.py SEED MESSAGES

fires so many at the daemon's loop (`hall`), and tells what became of them as JSON.
"""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hall import CHUNK, CHUNKS, Hall, Mail, level, rows_of
from mutants import Mutants

from headrace import protocol
from headrace.errors import ProtocolError
from headrace.protocol import Attach, Cancel, Chunk, Get, Hello, Leave, Message, Ping, Release, Report, Rows, Welcome

SHARED = (Get, Get, Get, Get, Release, Release, Cancel, Report)
REMOTE = (Get, Get, Get, Get, Get, Get, Cancel, Report)
STRANGE = (Hello, Ping, Attach, Leave, Get, Cancel, Report)
#: Messages between two turns of the loop at most, and turns between two looks at what it keeps.
TURN, CHECK = 16, 50


def framed(data: bytes, descriptors: int = 0) -> bytes:
    return len(data).to_bytes(4, "little") + bytes([descriptors]) + data


class Handler(logging.Handler):
    """An exception that the loop has caught is a fault, too."""

    def __init__(self) -> None:
        super().__init__()
        self.caught: list[str] = []
        self.lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += 1
        if record.exc_info:
            self.caught.append(logging.Formatter().format(record))


class Honest:
    """A trainer that keeps the rules, on this host or another, and looks at each picture as it comes and as it goes."""

    def __init__(self, hall: Hall, number: int, *, remote: bool) -> None:
        self.hall = hall
        self.chunks = 0
        self._remote = remote
        self._mail: Mail = hall.remote if remote else hall.shared
        self._control = b"\0" + number.to_bytes(3, "big") + b"\0"
        self._lane = self._control[:4] + b"\1"
        self._request = 0
        self._asked: dict[int, tuple[int, int]] = {}
        self._held: list[Chunk] = []
        self._epoch, self._next, self._got = 0, 0, set[int]()
        self._window = 1
        hello = Hello(stream="train", transport="tcp" if remote else "shm", client="honest")
        if remote:
            hall.hear_remote(self._control, protocol.encode(hello))
        else:
            self._socket, self._connection = hall.connect()
            self._socket.sendall(framed(protocol.encode(hello)))
            hall.hear_unix(self._connection)
        while (welcome := self._welcome()) is None:
            hall.turn()
        self.token = welcome.token
        if remote:
            hall.hear_remote(self._lane, protocol.encode(Attach(token=self.token, lane=1)))

    def turn(self) -> None:
        """Take what has come, give back what was looked at, ask for more."""
        for message in self._held:
            view = self._ring.views[message.slot]
            epoch, chunk = self._asked.pop(message.request)
            assert int(self._ring.generation[message.slot]) == message.generation
            for row in range(rows_of(chunk)):
                assert (view.images[row] == level(epoch, chunk * CHUNK + row)).all()
            self._say(Release(token=self.token, request=message.request))
        self._held = []
        said = self._mail.said.get(self._lane if self._remote else self._control, ())
        for message in said:
            if isinstance(message, Chunk | Rows):
                self._take(message)
        if said:
            said.clear()  # type: ignore[union-attr]
        while len(self._asked) < self._window:
            if self._next == CHUNKS:
                if len(self._got) < CHUNKS:
                    break
                self._epoch, self._next, self._got = self._epoch + 1, 0, set()
            self._request += 1
            self._asked[self._request] = self._epoch, self._next
            self.hall.wants(self._control, self._request, self._epoch, self._next)
            self._say(Get(token=self.token, request=self._request, epoch=self._epoch, chunk=self._next))
            self._next += 1

    def leave(self) -> None:
        if not self._remote:
            self._socket.close()
            self.hall.hear_unix(self._connection)
        else:
            self.hall.hear_remote(self._control, protocol.encode(Leave(token=self.token)))

    def hang_up(self) -> None:
        if not self._remote:
            self._socket.close()

    @property
    def _ring(self) -> Any:
        return self.hall.service._hosts[0].at.ring

    def _say(self, message: Message) -> None:
        hear = self.hall.hear_remote if self._remote else self.hall.hear_shared
        hear(self._control, protocol.encode(message))

    def _take(self, message: Chunk | Rows) -> None:
        epoch, chunk = self._asked[message.request]
        assert epoch == self._epoch and chunk not in self._got, "a chunk twice"
        self._got.add(chunk)
        self._window = message.window
        self.chunks += 1
        if isinstance(message, Chunk):
            self._held.append(message)
        else:
            del self._asked[message.request]

    def _welcome(self) -> Welcome | None:
        if self._remote:
            said = self._mail.said.get(self._control, ())
            return next((message for message in said if isinstance(message, Welcome)), None)
        return welcome_in(received(self._socket))


def received(sock: Any) -> list[Message]:
    """The messages that wait at the client's end of a Unix connection."""
    data = b""
    with contextlib.suppress(OSError):
        while more := sock.recv(1 << 20):
            data += more
    messages = []
    while data:
        size = int.from_bytes(data[:4], "little")
        messages.append(protocol.decode_session_reply(data[5 : 5 + size]))
        data = data[5 + size :]
    return messages


def welcome_in(messages: Sequence[Message]) -> Welcome | None:
    return next((message for message in messages if isinstance(message, Welcome)), None)


class Peer:
    """Somebody who says what comes to mind, from a connection to its death.

    Args:
        number: its identities begin with it.
        stolen: the token of somebody else's session over tcp.
    """

    def __init__(self, hall: Hall, number: int, mutants: Mutants, stolen: bytes) -> None:
        r = mutants.random
        self.hall = hall
        self.mutants = mutants
        self.kind = r.choice(("shm", "shm", "here", "tcp", "tcp", "stranger"))
        self._stolen = stolen
        self._control = b"\0" + number.to_bytes(3, "big") + b"\0"
        self._mail = hall.shared if self.kind == "shm" else hall.private if self.kind == "here" else hall.remote
        self._reads = r.random() < 0.9
        self._token = b""
        self._greeted = self._lanes = 0
        self._wild = r.choice((0.0, 0.02, 0.1, 0.5))
        self._kept: deque[bytes] = deque(maxlen=16)
        if r.random() < 0.2:
            self._mail.deaf.update(self._control[:4] + bytes([i]) for i in range(1, 8))
        self._unix = self.kind in ("shm", "here")
        if self._unix:
            self._socket, self._connection = hall.connect()

    @property
    def over(self) -> bool:
        """Whether nothing comes of it any more: its session has ended, or it does not get one."""
        return self.hall.service.find(self._token) is None if self._token else self._greeted > 2

    def say(self) -> None:
        """One message."""
        r = self.mutants.random
        self.mutants.be(self._wild, self._kept)
        if not self._token:
            self._greet()
        elif self.kind == "shm" and r.random() < 0.98:
            data = self.mutants.bytes(SHARED, self._token)
            self._note(data, protocol.decode_client)
            self.hall.hear_shared(self._control, data)
        elif self._unix and r.random() < 0.02:
            self._over_unix(self.mutants.bytes((Ping,), self._token))
        else:
            self._over_tcp()

    def hang_up(self) -> None:
        if self._unix:
            self._socket.close()

    def end(self) -> None:
        """Without a word."""
        r = self.mutants.random
        for mail in (self._mail, self.hall.remote):
            mail.end(self._control[:4] + bytes([lane]) for lane in range(8))
        if self._unix:
            if r.random() < 0.5:
                with contextlib.suppress(OSError):
                    self._socket.send(framed(r.randbytes(30))[: r.randrange(30)])
            self._socket.close()
            while self._connection in self.hall.service._connections:  # poll says so as long as it is not heard
                self.hall.hear_unix(self._connection)
        self.hall.forget(self._control)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _greet(self) -> None:
        r, transport = self.mutants.random, "shm" if self.kind == "shm" else "tcp"
        right = Hello(stream=r.choice(("train", "train", "val")), transport=transport, client="a peer")
        self._greeted += 1
        data = protocol.encode(right) if r.random() > self._wild / 2 else self.mutants.bytes(STRANGE, bytes(16))
        if self._unix:
            self._over_unix(data)
            for _ in range(3):
                self.hall.turn()
            welcome = welcome_in(received(self._socket))
        elif self.kind == "tcp":
            self.hall.hear_remote(self._control, data)
            for _ in range(3):
                self.hall.turn()
            welcome = welcome_in([*self._mail.said.get(self._control, ())])
        else:
            self.hall.hear_remote(self._control, data)
            return
        if welcome is not None:
            self._token = welcome.token

    def _over_unix(self, data: bytes) -> None:
        r = self.mutants.random
        data = framed(data, r.choice((0,) * 30 + (1, 255)))
        with contextlib.suppress(OSError):
            self._socket.send(data if r.random() < 0.95 else data[: r.randrange(len(data))])
        self.hall.hear_unix(self._connection)

    def _over_tcp(self) -> None:
        r, public = self.mutants.random, self.kind != "here"
        if r.random() < 0.03:  # who knows a token may attach a connection, but not speak for the session
            data = self.mutants.bytes((Get, Cancel, Leave, Report), self._stolen)
            with contextlib.suppress(ProtocolError):
                if isinstance(protocol.decode_remote(data), Attach):
                    return
            self._note(data, protocol.decode_remote)  # it may be an old one of its own
            self.hall.hear_remote(self._control, data, public=public)
            return
        if self._lanes < 2 or r.random() < 0.01:
            self._lanes += 1
            first = 0 if self.kind == "here" else 1
            lane = (self._lanes - 1 + first) % 8
            if lane and self._lanes > 8:
                lane = 0 if r.random() < 0.1 else 1 + lane % 6  # where it is attached already
            data = protocol.encode(Attach(token=self._token, lane=lane))
            self.hall.hear_remote(self._control[:4] + bytes([lane]), data, public=public)
            return
        data = self.mutants.bytes((*REMOTE, Ping) if public or r.random() < 0.01 else REMOTE, self._token)
        lane = 0 if r.random() < 0.98 else r.randrange(8)
        if lane == 0:
            self._note(data, protocol.decode_remote)
        self.hall.hear_remote(self._control[:4] + bytes([lane]), data, public=public)

    def _note(self, data: bytes, decode: Any) -> None:
        """If this is a request, what its answer must show."""
        with contextlib.suppress(ProtocolError):
            message = decode(data)
            if isinstance(message, Get) and message.token == self._token:
                self.hall.wants(self._control, message.request, message.epoch, message.chunk)


class Barrage:
    """
    Args:
        seed: of all that is random.
        peers: that there are at once.
    """

    def __init__(self, folder: Path, seed: int, peers: int = 10) -> None:
        self.mutants = Mutants(seed)
        self.log = Handler()
        logging.getLogger("headrace").addHandler(self.log)
        logging.getLogger("headrace").propagate = False
        self.hall = Hall(folder)
        self.honest = [Honest(self.hall, 1, remote=False), Honest(self.hall, 2, remote=True)]
        self._number = 2
        self.turns = self.messages = 0
        self.peers = [self._peer() for _ in range(peers)]

    def fire(self, messages: int) -> None:
        """So many."""
        r = self.mutants.random
        for _ in range(messages // TURN + 1):
            i = r.randrange(len(self.peers))
            if r.random() < (0.5 if self.peers[i].over else 0.02):
                self.peers[i].end()
                self.peers[i] = self._peer()
            for _ in range(TURN):
                self.peers[i].say()
                self.messages += 1
            self.turns += 1
            self.hall.turn(r.randrange(4))
            for honest in self.honest:
                honest.turn()
            if self.turns % CHECK == 0:
                self.hall.tick()
                self.hall.check()
        assert not self.log.caught, self.log.caught[0]

    def close(self) -> None:
        for peer in self.peers:
            peer.end()
        for honest in self.honest:
            honest.leave()
        self.hall.check()
        for host in self.hall.service._hosts:
            self.hall.remote.deaf.clear()
            self.hall.private.deaf.clear()
            self.hall.turn()
            if host.at is not None:
                left = [session for session in host.at.desk.sessions if not session.ended]
                assert len(left) <= len(self.hall.service._connections)
        self.hall.close()
        self._unlog()
        assert not self.log.caught, self.log.caught[0]

    def abandon(self) -> None:
        """After a fault: close what is open."""
        for somebody in (*self.peers, *self.honest):
            somebody.hang_up()
        self.hall.abandon()
        self._unlog()

    def _unlog(self) -> None:
        logging.getLogger("headrace").removeHandler(self.log)
        logging.getLogger("headrace").propagate = True

    def _peer(self) -> Peer:
        self._number += 1
        return Peer(self.hall, self._number, self.mutants, self.honest[1].token)


def main(seed: int, messages: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="hr-", dir="/tmp") as folder:
        barrage = Barrage(Path(folder), seed)
        barrage.fire(messages // 10)
        before, began, cpu = resident(), time.monotonic(), time.process_time()
        barrage.fire(messages - messages // 10)
        seconds, cpu, after = time.monotonic() - began, time.process_time() - cpu, resident()
        barrage.close()
    return {
        "messages": barrage.messages,
        "messages_per_s": round(messages * 0.9 / seconds),
        "messages_per_cpu_s": round(messages * 0.9 / cpu),
        "peers": barrage._number - 2,
        "chunks": barrage.hall.chunks,
        "honest_chunks": sum(honest.chunks for honest in barrage.honest),
        "turns": barrage.turns,
        "log_lines": barrage.log.lines,
        "grown_mib": round((after - before) / (1 << 20), 1),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]))) + "\n")
