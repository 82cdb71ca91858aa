"""Real daemons and trainers for tests: processes to be started, killed and asked."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml
from trainer import whole_lines

from headrace.ping import ping
from headrace.pipeline import machine
from headrace.pipeline.backend import Backend
from headrace.pipeline.dataset import open_index
from headrace.pipeline.index import Index
from headrace.pipeline.render import ChunkRenderer
from headrace.pipeline.spec import Config, Stream
from headrace.protocol import Pong, StreamStatus
from headrace.slots import Ring, SlotView, Status

#: Index, label and digest of a picture. The label is a number, a list of them, or a text.
Row = tuple[int, Any, str]

_TRAINER = Path(__file__).with_name("trainer.py")
_START_TIMEOUT = 60.0


def stream(folder: Path, *, chunk: int = 4, size: int = 32, **more: Any) -> dict[str, Any]:
    """The description of a stream with everything random switched on."""
    transforms = [{"random_resized_crop": {"size": size}}, "random_horizontal_flip"]
    return {"dataset": {"folder": str(folder)}, "shuffle": True, "chunk": chunk, "transforms": transforms, **more}


class Daemon:
    """`headrace serve` on a configuration of one or more streams.

    Args:
        folder: for its files.
        slots: of each ring; None for the default memory.
        group: who may connect beside the user.
        tcp: listen at a port of loopback too; it stays the same when the daemon is started again. Or where else to
            listen, `tcp://ADDRESS:PORT`.
        metrics: at a port of loopback.
        keys: for tcp: the daemon's secret ones, and those of who may connect.

    Attributes:
        address, tcp_address: where it listens; the second is known once it has started.
    """

    def __init__(
        self,
        folder: Path,
        streams: dict[str, Any],
        *,
        workers: int = 1,
        slots: int | None = None,
        group: str | None = None,
        backend: str = "pillow",
        name: str = "d",
        tcp: bool | str = False,
        metrics: bool = False,
        keys: tuple[Path, Path] | None = None,
    ) -> None:
        self.address = f"ipc://{folder}/{name}.sock"
        self.config = folder / f"{name}.yaml"
        self.log = folder / f"{name}.log"
        self.tcp_address = tcp if isinstance(tcp, str) else "tcp://127.0.0.1:0" if tcp else ""
        document: dict[str, Any] = {"workers": {"processes": workers, "backend": backend}, "streams": streams}
        if keys is not None:
            document["curve"] = {"secret_key": str(keys[0]), "clients": [str(keys[1])]}
        if metrics:
            document["metrics"] = "127.0.0.1:0"
        if slots is not None:
            document["memory"] = f"{slots} slots"
        if group is not None:
            document["socket"] = {"group": group}
        self._document = document
        self._configure()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, limit_descriptors: int | None = None, prefix: Sequence[str] = ()) -> Daemon:
        """Until it listens.

        Args:
            prefix: a command that runs the rest of its line, such as setpriv's.
        """
        self.launch(limit_descriptors=limit_descriptors, prefix=prefix)
        assert self._line() == f"listening on {self.address}", self.log.read_text()
        if self.tcp_address:
            line = self._line()
            self.tcp_address = line.removeprefix("listening on ")
            assert self.tcp_address.startswith("tcp://"), (line, self.log.read_text())
            self._configure()
        return self

    def launch(self, *, limit_descriptors: int | None = None, prefix: Sequence[str] = ()) -> None:
        """As `start`, without waiting."""
        near = not self.tcp_address or "//127.0.0.1:" in self.tcp_address
        everywhere = [] if near or "curve" in self._document else ["--insecure"]
        limit = [] if limit_descriptors is None else ["prlimit", f"--nofile={limit_descriptors}"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*prefix, *limit, sys.executable, "-m", "headrace.server", "serve", *everywhere, str(self.config)],
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    def _configure(self) -> None:
        listen = [self.address, self.tcp_address] if self.tcp_address else self.address
        self.config.write_text(yaml.safe_dump(self._document | {"listen": listen}))

    def _line(self) -> str:
        assert self.process is not None and self.process.stdout is not None
        line = b""
        deadline = time.monotonic() + _START_TIMEOUT
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self.process.stdout.fileno(), 1) if ready else b""
            if not data:
                break
            line += data
        return line.decode().rstrip("\n")

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def metrics_address(self) -> str:
        """`http://HOST:PORT`, of its latest start."""
        return re.findall(r"metrics at (http://\S+)/metrics$", self.log.read_text(), re.M)[-1]

    def ping(self) -> Pong:
        return ping(self.address, timeout=20.0)

    def status(self, name: str = "train") -> StreamStatus:
        status = self.ping().streams[name]
        assert status is not None
        return status

    def kill(self) -> None:
        """Without any warning."""
        assert self.process is not None and self.process.stdout is not None
        self.process.kill()
        self.process.wait(30)
        self.process.stdout.close()
        self.process = None

    def stop(self) -> int:
        """As a service manager does; its exit status."""
        if self.process is None:
            return 0
        assert self.process.stdout is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        status = self.process.wait(30)
        self.process.stdout.close()
        self.process = None
        return status

    def __enter__(self) -> Daemon:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class Trainer:
    """A trainer process; `record` is what it got, across all its lives."""

    def __init__(self, source: str, record: Path, **options: Any) -> None:
        self.record = record
        self._command = [sys.executable, str(_TRAINER), source, str(record)]
        for option, value in options.items():
            self._command += [f"--{option.replace('_', '-')}", str(value)]
        self.log = record.with_suffix(".log")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, prefix: Sequence[str] = ()) -> Trainer:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([*prefix, *self._command], stderr=log, start_new_session=True)
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(30)

    def wait(self, timeout: float = 90.0) -> Trainer:
        """For its end, which must be a good one."""
        assert self.process is not None
        assert self.process.wait(timeout) == 0, self.log.read_text()[-4000:]
        return self

    @property
    def batches(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in whole_lines(self.record)]

    def rows(self) -> list[Row]:
        """`(index, label, digest of the picture)` of every valid row, in the order of their delivery."""
        return [
            row
            for batch in self.batches
            for row, valid in zip(
                zip(batch["indices"], batch["labels"], batch["pictures"], strict=True), batch["valid"], strict=True
            )
            if valid
        ]

    def __enter__(self) -> Trainer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self.running:
            self.kill()


def with_timings(code: Path, timings: dict[str, float]) -> Path:
    """A folder for PYTHONPATH: daemons with these `network.Timings` instead of their own."""
    code.mkdir()
    (code / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'serve' in sys.orig_argv:\n"
        "    from headrace.server import network, service\n"
        f"    service.Service.__init__.__kwdefaults__['timings'] = network.Timings(**{timings})\n"
    )
    return code


#: What was rendered for a test before: by everything that decides the pictures, their files' times included.
_rendered: dict[tuple[str, str, bytes, int], list[Row]] = {}


@dataclass
class Truth:
    """What an epoch must be: rendered in this process, without any daemon."""

    config: Path
    cache: Path
    name: str = "train"

    def rows(self, epoch: int) -> list[Row]:
        """`(index, label, digest)` by position, rejects left out."""
        return [row for row in self.positions(epoch) if row[2]]

    def positions(self, epoch: int) -> list[Row]:
        """`(index, label, digest)` by position; the digest of a reject is empty."""
        config = Config.load(self.config)
        spec = config.streams[self.name]
        index = open_index(spec.dataset, self.cache)
        backend = machine.make(config.workers)
        pixels = spec.fingerprints(index.data_fingerprint).pixels
        key = backend.render_id, pixels, hashlib.sha256(index.mtimes_ns.tobytes()).digest(), epoch
        if key not in _rendered:
            _rendered[key] = self._render(spec, index, backend, epoch)
        backend.close()
        index.close()
        return _rendered[key]

    def _render(self, spec: Stream, index: Index, backend: Backend, epoch: int) -> list[Row]:
        renderer = ChunkRenderer(spec, index, backend)
        ring = Ring.create(spec.layout(index), 1)
        view = ring.views[0]
        rows = []
        for chunk in range(renderer.chunks):
            renderer.render(epoch, chunk, view)
            for row in range(renderer.rows(chunk)):
                good = view.status[row] == Status.OK
                digest = hashlib.sha256(view.images[row]).hexdigest()[:16] if good else ""
                rows.append((int(view.indices[row]), label(index, view, row), digest))
        del view
        ring.close()
        return rows


def label(index: Index, view: SlotView, row: int) -> Any:
    """Of a row, as a trainer gets it."""
    if index.labels_text:
        return msgspec.msgpack.decode(index.text_row(int(view.indices[row])))[0]
    return view.labels[row].tolist()


def merged(trainers: list[Trainer]) -> list[Row]:
    """The valid rows of all ranks in the order of the epoch: step after step, rank after rank."""
    steps = zip(*(trainer.batches for trainer in trainers), strict=True)
    rows = []
    for step in steps:
        for batch in step:
            rows += [
                (i, label, picture)
                for i, label, picture, valid in zip(
                    batch["indices"], batch["labels"], batch["pictures"], batch["valid"], strict=True
                )
                if valid
            ]
    return rows


def at_work(pid: int) -> bool:
    """Whether the process computes, or waits for a disk, at this moment."""
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state in "RD"
    return False


def until(done: Any, what: str, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not done():
        assert time.monotonic() < deadline, f"waited {timeout} s for {what}"
        time.sleep(0.02)


def signal_(pid: int, number: signal.Signals) -> None:
    """To a process that may have ended meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
