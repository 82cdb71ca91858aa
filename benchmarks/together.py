"""One side of one round: a server where there is one, its trainers, and what they get together in a stretch of time.

Every trainer is a process of its own, which takes batch after batch and says after each how many pictures it has had.
It takes one row of pixels of each batch and does nothing else. When all have had as many as warm it up the time begins,
without a pause in which anybody could work ahead, and when together they have had the pictures that are wanted it ends.
Only then is it looked how much memory they hold.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import common
import numpy as np
import peers

from headrace import Loader
from headrace.server.usage import held_bytes, own_bytes

#: Seconds without a picture from anybody: before the first one, and later.
_START, _SILENCE = 120.0, 40.0
#: Seconds for a process to end by itself.
_END = 10.0
_LOOKS = 3


@dataclass(frozen=True)
class Side:
    """
    Attributes:
        maker: "headrace" or a peer.
        trainers: processes that take pictures.
        backend, transport, dtype: of Headrace.
    """

    maker: str = "headrace"
    trainers: int = 1
    backend: str = "dali-cpu"
    transport: str = "shm"
    dtype: str = "float32"

    @property
    def apart(self) -> bool:
        """Whether each trainer has a pipeline of its own."""
        return self.maker != "headrace" and peers.PEERS[self.maker].serve is None

    @property
    def label(self) -> str:
        parts = [self.maker]
        if self.maker == "headrace":
            parts += [self.backend, self.transport, *([] if self.dtype == "float32" else [self.dtype])]
        many = "" if self.trainers == 1 else f", {self.trainers} trainers"
        return " ".join(parts) + many


@dataclass(frozen=True)
class Server:
    """
    Attributes:
        processes: its own by what they do; asked when all of them are there.
        chunks: how many were rendered again, at the end.
    """

    address: str
    processes: Callable[[], dict[str, list[int]]]
    chunks: Callable[[], dict[str, int]] = dict


def measured(side: Side, setting: peers.Setting, *, warm: int, wanted: int) -> dict[str, Any]:
    """What one side gives.

    Args:
        warm: pictures that each trainer takes first.
        wanted: pictures that all of them take together in the measured time, for each of them.
    """
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_serving(side, setting))
        trainers = stack.enter_context(_Trainers(side, setting, server.address))
        trainers.until(lambda: min(trainers.had) >= warm)
        groups = server.processes() | {"trainers": [p for pid in trainers.pids for p in (pid, *common.below(pid))]}
        meter, before = common.Meter(**groups), sum(trainers.had)
        trainers.until(lambda: sum(trainers.had) - before >= wanted * side.trainers)
        images, used = sum(trainers.had) - before, meter.read()
        pids = [pid for group in groups.values() for pid in group]
        looks = []
        for _ in range(_LOOKS):
            looks.append((sum(map(own_bytes, pids)), sum(map(held_bytes, pids))))
            trainers.listen(0.1)
        own, held = (max(look) for look in zip(*looks, strict=True))
        counts = server.chunks()
    return {"images": images, "images_per_s": images / used["seconds"], "own": own, "held": held} | used | counts


# -- servers ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _serving(side: Side, setting: peers.Setting) -> Iterator[Server]:
    if side.maker == "headrace":
        with common.Daemon(setting.folder, workers=setting.workers, backend=side.backend) as daemon:
            yield Server(
                daemon.address,
                lambda: {"workers": daemon.ping().workers, "daemon": [daemon.pid]},
                lambda: _recomputed(daemon),
            )
    elif side.apart:
        yield Server("", dict)
    else:
        part = _Part("--serve", side, setting)
        try:
            address = part.out.readline().decode().strip()
            if not address:
                part.fail("it ended without an address")
            yield Server(address, lambda: {"server": [part.pid, *common.below(part.pid)]})
        finally:
            _end([part])


def _recomputed(daemon: common.Daemon) -> dict[str, int]:
    status = daemon.ping().streams["train"]
    assert status is not None
    return {"recomputed": status.recomputed}


# -- trainers -----------------------------------------------------------------------------------------------------


class _Trainers:
    """Processes that say how many pictures they have had.

    Attributes:
        had: by each.
    """

    def __init__(self, side: Side, setting: peers.Setting, address: str) -> None:
        workers = setting.workers
        if side.apart:
            workers = max(1, workers // side.trainers)
        given = asdict(setting) | {"workers": workers, "trainers": side.trainers, "address": address}
        self._parts = [
            _Part("--trainer", side, peers.Setting(**given | {"number": number})) for number in range(side.trainers)
        ]
        self.pids = [part.pid for part in self._parts]
        self.had = [0] * side.trainers
        self._rests = [b""] * side.trainers
        self._selector = selectors.DefaultSelector()
        for number, part in enumerate(self._parts):
            self._selector.register(part.out, selectors.EVENT_READ, number)

    def __enter__(self) -> _Trainers:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        _end(self._parts)

    def until(self, enough: Callable[[], bool]) -> None:
        heard = time.monotonic()
        while not enough():
            if self.listen(1.0):
                heard = time.monotonic()
            elif time.monotonic() - heard > (patience := _SILENCE if any(self.had) else _START):
                self._parts[int(np.argmin(self.had))].fail(f"nobody got a picture for {patience:.0f} s: {self.had}")

    def listen(self, seconds: float) -> bool:
        """Whether somebody said something, within so many seconds."""
        events = self._selector.select(seconds)
        for key, _ in events:
            if not (text := os.read(key.fd, 1 << 16)):
                self._parts[key.data].fail(f"it ended after {self.had[key.data]} pictures")
            *lines, self._rests[key.data] = (self._rests[key.data] + text).split(b"\n")
            if lines:
                self.had[key.data] = int(lines[-1])
        return bool(events)


class _Part:
    """A process that plays a part of a side. What it says on standard error is shown if it fails.

    Attributes:
        out, pid: what it says, and its number.
    """

    def __init__(self, role: str, side: Side, setting: peers.Setting) -> None:
        self._what = f"{side.label}, {role[2:]} {setting.number}"
        self._log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("compare.py")), role, *told(side, setting)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        assert self.process.stdout is not None
        self.pid, self.out = self.process.pid, self.process.stdout

    def fail(self, what: str) -> NoReturn:
        self._log.seek(0)
        sys.stderr.write(self._log.read().decode(errors="replace"))
        sys.exit(f"{self._what}: {what}")

    def close(self) -> None:
        self._log.close()


def _end(parts: Sequence[_Part]) -> None:
    """By the end of their pipes; who lives on is killed, with whatever it started."""
    processes = [part.process for part in parts]
    with contextlib.ExitStack() as stack:
        left = []
        for pid in [pid for process in processes for pid in (process.pid, *common.below(process.pid))]:
            with contextlib.suppress(ProcessLookupError):  # by descriptor: a number may be somebody else's by then
                left.append(os.pidfd_open(pid))
                stack.callback(os.close, left[-1])
        for process in processes:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        until = time.monotonic() + _END
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, until - time.monotonic()))
        for one in left:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(one, signal.SIGKILL)
        for part in parts:
            part.process.wait()
            part.close()


# -- what a process is told ---------------------------------------------------------------------------------------


def told(side: Side, setting: peers.Setting) -> tuple[str, str]:
    """For a command line; `heard` understands it."""
    return json.dumps(asdict(side)), json.dumps(asdict(setting), default=str)


def heard(side: str, setting: str) -> tuple[Side, peers.Setting]:
    given = json.loads(setting)
    given["folder"] = Path(given["folder"])
    given["prepared"] = given["prepared"] and Path(given["prepared"])
    return Side(**json.loads(side)), peers.Setting(**given)


def to_listener() -> int:
    """What standard output was, for what is to be heard; from now on it goes where errors go: some peers log to it."""
    listener = os.dup(1)
    os.dup2(2, 1)
    return listener


def serve(side: Side, setting: peers.Setting) -> None:
    """Say the address, and serve until standard input ends."""
    listener = to_listener()
    server = peers.PEERS[side.maker].serve
    assert server is not None
    address, work = server(setting)
    os.write(listener, f"{address}\n".encode())
    threading.Thread(target=work, daemon=True).start()
    sys.stdin.read()
    for pid in common.below(os.getpid()):
        os.kill(pid, signal.SIGKILL)
    os._exit(0)  # some peers' threads never end


def train(side: Side, setting: peers.Setting) -> None:
    """Take batches until nobody listens any more."""
    listener = to_listener()
    batches = _headrace(side, setting) if side.maker == "headrace" else peers.PEERS[side.maker].batches(setting)
    had = 0
    try:
        for images, labels in batches:
            if not had:
                _look(images, side.dtype)
            assert len(labels) == setting.batch_size
            float(images[-1, :, -1].sum())
            had += len(labels)
            os.write(listener, b"%d\n" % had)
    except BrokenPipeError:
        return


def _headrace(side: Side, setting: peers.Setting) -> peers.Batches:
    with Loader(
        setting.address,
        batch_size=setting.batch_size,
        rank=0,
        world_size=1,
        last_batch="drop",
        dtype=side.dtype,
        transport=side.transport,
    ) as loader:
        yield from peers.forever(loader)


def _look(images: Any, dtype: str) -> None:
    """That a side makes the pictures that the others make: size, type, normalised by mean and deviation."""
    array = np.asarray(images)
    assert array.dtype == dtype, array.dtype
    assert sorted(array.shape[1:]) == [3, common.SIZE, common.SIZE], array.shape
    spread, middle = float(array.std()), float(array.mean())
    wanted = (20, 120) if dtype == "uint8" else (0.3, 2.0)
    assert wanted[0] < spread < wanted[1] and -2.5 < middle < 255, (middle, spread)
