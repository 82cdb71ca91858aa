"""Servers and trainers in a storm, what is being done to them, and what they use."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from proxy import Proxy
from service import Daemon, Trainer

from headrace.errors import HeadraceError
from headrace.ping import ping
from headrace.protocol import Pong
from headrace.server.usage import own_bytes

#: By how much what is flat may have grown: bytes, as a share and beside it; descriptors.
GROWTH, SPARE, FEW = 0.1, 6 << 20, 2


@dataclass(eq=False)
class Server:
    """A daemon and what is being done to it. `held`: it is stopped; `spared`: it is killed no more."""

    number: int
    daemon: Daemon
    prefix: tuple[str, ...] = ()
    held: bool = False
    spared: bool = False
    lives: int = 1
    seen: Counter[str] = field(default_factory=Counter)

    @property
    def up(self) -> bool:
        return self.daemon.process is not None

    def workers(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(self.daemon.pid).children()
            return [child for child in children if "headrace.workers.worker" in " ".join(command(child))]
        return []

    def idle(self) -> bool:
        """Whether nobody has a session, a slot or a request any more."""
        if (pong := self.ask(5.0)) is None or (status := pong.streams["train"]) is None:
            return False
        return pong.sessions == status.leased == status.waiting == status.filling == 0

    def ask(self, timeout: float) -> Pong | None:
        with contextlib.suppress(HeadraceError):
            return ping(self.daemon.address, timeout=timeout)
        return None

    def count(self) -> None:
        """Note what it has done in this life."""
        if (pong := self.ask(2.0)) is not None and (status := pong.streams["train"]) is not None:
            self.seen.update(
                computed=status.computed,
                recomputed=status.recomputed,
                delivered=status.delivered,
                hits=status.hits,
                deaths=pong.deaths,
            )


@dataclass(eq=False)
class Client:
    """A trainer, the proxies between it and the servers, and what is done to it. `away`: it ends, or has ended.

    Attributes:
        size: of its record; begun: what it was at the beginning of this life; moved: when that grew last;
            longest: seconds that it did not, while nothing held it up.
    """

    number: int
    trainer: Trainer
    proxies: list[Proxy]
    prefix: tuple[str, ...] = ()
    held: bool = False
    away: bool = False
    spared: bool = False
    lives: int = 1
    size: int = 0
    begun: int = 0
    moved: float = 0.0
    longest: float = 0.0


@dataclass(frozen=True)
class Usage:
    """Of a process: bytes of its own memory, descriptors, threads, children."""

    memory: int
    descriptors: int
    threads: int
    children: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        threads, descriptors = len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd"))
        return cls(own_bytes(pid), descriptors, threads, len(psutil.Process(pid).children(recursive=True)))

    def flat(self, before: Usage) -> bool:
        return (
            self.memory <= before.memory * (1 + GROWTH) + SPARE
            and self.descriptors <= before.descriptors + FEW
            and self.threads <= before.threads
            and self.children <= before.children
        )

    def __str__(self) -> str:
        return (
            f"{self.memory / 1e6:.1f} MB, {self.descriptors} descriptors, {self.threads} threads, "
            f"{self.children} children"
        )


def tell(process: psutil.Process, number: signal.Signals) -> None:
    """Which may have ended meanwhile."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def size_of(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def tail(file: Path, size: int = 3000) -> str:
    return file.read_text(errors="replace")[-size:]
