"""Messages of clients, right and wrong, by the hundred thousand: whole ones, and what may become of them on the way."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from scripted import welcome
from status import pong

from headrace import protocol
from headrace.protocol import Message

#: Numbers at which something may turn over.
EDGES = (0, 1, 2, 3, 5, 6, 255, 1023, 1024, 1 << 16, (1 << 31) - 1, 1 << 32, (1 << 62) + 1, (1 << 63) - 1)
BEYOND = (-1, 1 << 63, (1 << 64) - 1)
#: Values that a field does not have.
ODD = (None, True, 1.5, float("nan"), "", "x" * 2000, b"", b"x" * 16, [], {}, [[]], {"a": 1}, *BEYOND)
NAMES = (None, "train", "val", "", "../../etc/passwd", "/etc/passwd", "x" * 1024, "\x9b\n\0", "{0}%s", "tráin")
TRANSPORTS = ("shm", "tcp", "", "rdma", "../x")
STAGES = ("wait", "copy", "finish", "device", "", "x" * 32, "\n")


class Mutants:
    """
    Args:
        seed: of all that is random.
        wild: the share of messages that are not right.
    """

    def __init__(self, seed: int, wild: float = 0.5) -> None:
        self.random = random.Random(seed)
        self.wild = wild
        self._kept: deque[bytes] = deque(maxlen=64)
        self._next = 0

    def be(self, wild: float, kept: deque[bytes]) -> None:
        """Somebody: how wild, and with which messages to say again."""
        self.wild, self._kept = wild, kept

    def number(self) -> int:
        r = self.random
        return r.randrange(8) if r.random() < 0.8 else r.choice(EDGES)

    def request(self) -> int:
        """A number that was not used yet, mostly."""
        self._next += 1
        return self._next if self.random.random() < 0.995 else self.number()

    def right(self, kinds: Sequence[type[Message]], token: bytes) -> Message:
        """A message of one of these kinds whose fields are what they may be."""
        return _MAKE[self.random.choice(kinds)](self, token)

    def bytes(self, kinds: Sequence[type[Message]], token: bytes) -> bytes:
        """A message as it goes over the wire, or what comes instead of one."""
        r = self.random
        if r.random() >= self.wild:
            data = protocol.encode(self.right(kinds, token))
            self._kept.append(data)
            return data
        return r.choice(_WRONG)(self, kinds, token)

    # -- what comes instead -----------------------------------------------------------------------------------------

    def _damaged(self, kinds: Sequence[type[Message]], token: bytes) -> bytes:
        r = self.random
        data = bytearray(protocol.encode(self.right(kinds, token)))
        for _ in range(r.randrange(1, 4)):
            at = r.randrange(len(data) + 1)
            match r.randrange(5):
                case 0:
                    data[at : at + 1] = r.randbytes(1)
                case 1:
                    del data[at : at + r.randrange(1, 8)]
                case 2:
                    data[at:at] = r.randbytes(r.randrange(1, 8))
                case 3:
                    data[at:at] = data[r.randrange(len(data) + 1) :][:16]
                case 4:
                    del data[at:]
            if not data:
                break
        return bytes(data)

    def _replayed(self, kinds: Sequence[type[Message]], token: bytes) -> bytes:
        return self.random.choice(self._kept) if self._kept else b""

    def _other_version(self, kinds: Sequence[type[Message]], token: bytes) -> bytes:
        return self.random.randbytes(1) + protocol.encode(self.right(kinds, token))[1:]

    def _other_kind(self, kinds: Sequence[type[Message]], token: bytes) -> bytes:
        return protocol.encode(self.right(KINDS, token))

    def _odd_field(self, kinds: Sequence[type[Message]], token: bytes) -> bytes:
        r = self.random
        content: dict[Any, Any] = msgspec.to_builtins(self.right(kinds, token), builtin_types=(bytes,))
        match r.randrange(4):
            case 0:
                content.pop(r.choice([*content]))
            case 1:
                content[r.choice(("more", "", "Type", "__class__"))] = r.choice(ODD)
            case _:
                content[r.choice([*content])] = r.choice(ODD)
        return bytes([protocol.VERSION]) + msgspec.msgpack.encode(content)

    def _noise(self, kinds: Sequence[type[Message]], token: bytes) -> bytes:
        return (bytes([protocol.VERSION]) if self.random.random() < 0.7 else b"") + self.random.randbytes(
            self.random.randrange(64)
        )

    def _large(self, kinds: Sequence[type[Message]], token: bytes) -> bytes:
        if self.random.random() < 0.9:  # it takes longer than the others
            return b""
        size = protocol.CLIENT_LIMIT + self.random.randrange(-1, 2)
        return (bytes([protocol.VERSION]) + self.random.choice((b"\x91", b"\x81\xa1z", b"\0")) * size)[:size]


def _stage(m: Mutants) -> protocol.StageStatus:
    histogram = [m.number() for _ in range(protocol.BUCKETS)] if m.random.random() < 0.1 else [0] * protocol.BUCKETS
    return protocol.StageStatus(m.number(), 1.0, m.number(), histogram)


def _report(m: Mutants, token: bytes) -> Message:
    names = {m.random.choice(STAGES) for _ in range(m.random.randrange(4))}
    if m.random.random() < 0.05:
        names = {f"{m.random.random()}" for _ in range(protocol.MAX_STAGES)}
    return protocol.Report(
        token=token, batches=m.number(), images=m.number(), waited=1.0, spent=1e12,
        stages={name: _stage(m) for name in names},
    )  # fmt: skip


def _rejects(m: Mutants) -> list[protocol.RowReject]:
    return [
        protocol.RowReject(m.number(), m.number(), "a/1.jpg", "decode", "why") for _ in range(m.random.randrange(3))
    ]


def _get(m: Mutants, token: bytes) -> Message:
    r = m.random
    first, count = (r.randrange(2), r.randrange(2)) if r.random() < 0.995 else (m.number(), m.number())
    chunk = r.randrange(6) if r.random() < 0.995 else m.number()
    return protocol.Get(token=token, request=m.request(), epoch=m.number(), chunk=chunk, first=first, count=count)


_MAKE: dict[type[Message], Callable[[Mutants, bytes], Message]] = {
    protocol.Hello: lambda m, token: protocol.Hello(
        stream=m.random.choice(NAMES), transport=m.random.choice(TRANSPORTS), client=m.random.choice(NAMES) or "",
        device=m.random.choice(NAMES) or "",
    ),
    protocol.Ping: lambda m, token: protocol.Ping(detail=m.random.random() < 0.5),
    protocol.Attach: lambda m, token: protocol.Attach(token=token, lane=min(m.number(), protocol.MAX_LANES)),
    protocol.Leave: lambda m, token: protocol.Leave(token=token),
    protocol.Get: _get,
    protocol.Release: lambda m, token: protocol.Release(token=token, request=max(0, m._next - m.number())),
    protocol.Cancel: lambda m, token: protocol.Cancel(token=token, request=max(0, m._next - m.number())),
    protocol.Report: _report,
    # The daemon's own, which no client says.
    protocol.Alive: lambda m, token: protocol.Alive(),
    protocol.Unknown: lambda m, token: protocol.Unknown(token=token),
    protocol.Refused: lambda m, token: protocol.Refused(kind="ConfigError", text="no"),
    protocol.Attached: lambda m, token: protocol.Attached(lane=1),
    protocol.Goodbye: lambda m, token: protocol.Goodbye(reason="a reason"),
    protocol.Failed: lambda m, token: protocol.Failed(request=m.request(), kind="DatasetError", text="a text"),
    protocol.Indexing: lambda m, token: protocol.Indexing(stream="train", unit="MiB", done=m.number(), total=9),
    protocol.Chunk: lambda m, token: protocol.Chunk(
        request=m.request(), slot=m.number(), generation=m.number(), render_id="r", window=3, rejects=_rejects(m)
    ),
    protocol.Rows: lambda m, token: protocol.Rows(
        request=m.request(), first=m.number(), count=m.random.randrange(1, 6), split=m.random.randrange(1, 6),
        render_id="r", window=3, rejects=_rejects(m),
    ),
    protocol.Pong: lambda m, token: pong(stages={"read": _stage(m)}, deaths=m.number()),
    protocol.Welcome: lambda m, token: welcome(samples=max(1, m.number()), seed=m.number()),
}  # fmt: skip

_WRONG: tuple[Callable[[Mutants, Sequence[type[Message]], bytes], bytes], ...] = (
    Mutants._damaged, Mutants._damaged, Mutants._damaged, Mutants._replayed, Mutants._other_version,
    Mutants._other_kind, Mutants._odd_field, Mutants._noise, Mutants._large,
)  # fmt: skip

#: All that there are.
KINDS = tuple(_MAKE)
