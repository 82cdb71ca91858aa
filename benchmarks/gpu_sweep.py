"""What the worker of a GPU renders per second, over its threads, the share of the JPEG engine, and what is decoded.

    python benchmarks/gpu_sweep.py [--threads 4 8 16] [--hw-decoder-load 0 0.25 0.5 0.75 1] [--decode whole window]
                                   [--seconds 10] [--photos imagenet-like|large] [--count 1000] [--cpu]

No claim, and it has never run on a GPU: a table for whoever has one. Each line is a process of its own that runs the
worker's own loop (`headrace.workers.device`), fed with as many chunks as it takes; one that dies is a line too, for
decoding windows alone has crashed on some GPUs (NVIDIA/nvImageCodec, issue 55).

images/s    of 224x224 windows, in slots
cores       CPU time of the process over time
MiB         of the GPU's memory, by NVML; - where it does not tell
pure        whether pictures came out the same, to the bit, in other company: 48 of them in batches of 48, 7 and 1
of whole    by how many levels window decoding differs from that of the whole picture at most

With --cpu DALI's CPU operators stand in for the GPU, which shows that the program works and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import common
import numpy as np
from numpy.typing import NDArray

from headrace.channel import Channel, Closed
from headrace.pipeline import gpus, wholes
from headrace.pipeline.backend import Backend, Options, make
from headrace.pipeline.dataset import open_index
from headrace.pipeline.index import Index
from headrace.pipeline.render import ChunkReader, render
from headrace.pipeline.spec import Config, Stream
from headrace.slots import Ring
from headrace.workers import messages
from headrace.workers.device import LANES, DeviceWorker, Told
from headrace.workers.messages import Open, Ready, Render, Rendered

COLUMNS = ("threads", "load", "decode", "images/s", "cores", "MiB", "pure", "of whole")
#: Chunks that the worker has at once.
_IN_FLIGHT = 16
_PURE = 48
#: Seconds that one line may take beside what it measures.
_PATIENCE = 300


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_photo_options(parser)
    parser.add_argument("--threads", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--hw-decoder-load", type=float, nargs="+", default=[0, 0.25, 0.5, 0.75, 1])
    parser.add_argument("--decode", nargs="+", choices=("whole", "window"), default=["whole", "window"])
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured(args)))
        return 0
    died = False
    with common.photo_set(args) as folder:
        common.say("  ".join(f"{column:>8}" for column in COLUMNS))
        for threads, load, decode in itertools.product(args.threads, args.hw_decoder_load, args.decode):
            line = fresh(args, folder, threads, load, decode)
            died |= "died" in line
            cells = [threads, load, decode, *(line.get(column, "-") for column in COLUMNS[3:]), line.get("died", "")]
            common.say("  ".join(f"{cell!s:>8}" for cell in cells))
    return int(died)


def fresh(args: argparse.Namespace, folder: Path, threads: int, load: float, decode: str) -> dict[str, Any]:
    """The line of one process."""
    command = [sys.executable, __file__, "--one", "--folder", str(folder), "--threads", str(threads)]
    command += ["--hw-decoder-load", str(load), "--decode", decode, "--device", str(args.device)]
    command += ["--seconds", str(args.seconds), *(["--cpu"] if args.cpu else [])]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=args.seconds + _PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        return {"died": "hung"}
    if done.returncode:
        return {"died": f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"}
    line: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return line


def measured(args: argparse.Namespace) -> dict[str, Any]:
    gpus.count_by_bus()
    name, [threads], [load], [decode] = (
        "dali-cpu" if args.cpu else "dali-gpu",
        args.threads,
        args.hw_decoder_load,
        args.decode,
    )
    told = Told(name, args.device, threads, 1 << 40, load)
    parts = decode == "window"
    options = Options(
        args.device, told.lane_threads, load, told.options.batch, told.options.batch_pixels, gpu_parts=parts
    )
    stream = Config.load({"streams": {"train": common.training_stream(args.folder)}}).streams["train"]
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as cache:
        index = open_index(stream.dataset, Path(cache))
        backends = [make(name, options) for _ in range(LANES)]
        line = Run(stream, index, backends, told).measure(args.seconds)
        own = gpus.OwnMemory(args.device)()
        line["MiB"] = "-" if args.cpu or own is None else own >> 20
        alone = rendered(stream, index, backends[0], _PURE, whole=not parts)
        others = [rendered(stream, index, backends[0], batch, whole=not parts) for batch in (7, 1)]
        line["pure"] = "yes" if all(np.array_equal(alone, other) for other in others) else "no"
        if parts:
            whole = rendered(stream, index, backends[0], _PURE, whole=True)
            line["of whole"] = int(np.abs(alone.astype(np.int16) - whole).max())
    return line


class Run:
    """The worker in a thread, and its daemon's end."""

    def __init__(self, stream: Stream, index: Index, backends: list[Backend], told: Told) -> None:
        self._chunk, self._samples = stream.chunk, len(index)
        layout = stream.layout(index)
        self._ring = Ring.create(layout, _IN_FLIGHT)
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        worker = DeviceWorker(Channel(theirs, descriptors=3), backends, told, lambda: 0, _lock(told))
        threading.Thread(target=_until_closed, args=(worker,), daemon=True).start()
        assert isinstance(self._answer(), Ready)
        flags = wholes.create(len(index))
        opened = Open(stream=0, spec=json.dumps(stream.plain()), layout=layout, slots=_IN_FLIGHT, convicted={})
        self._channel.send(messages.encode(opened), [self._ring.fd, index.fd, flags], timeout=60)
        os.close(flags)
        self._next = 0

    def measure(self, seconds: float) -> dict[str, Any]:
        """Of whole epochs, after one that warms up and in which all pictures are decoded as a whole."""
        for slot in range(_IN_FLIGHT):
            self._ask(slot)
        chunks = -(-self._samples // self._chunk)
        while self._next < chunks + _IN_FLIGHT:
            self._ask(self._answered())
        began, used, count = time.perf_counter(), _cpu(), 0
        while (passed := time.perf_counter() - began) < seconds:
            self._ask(self._answered())
            count += self._rows(self._next)
        cores = (_cpu() - used) / passed
        for _ in range(_IN_FLIGHT):
            self._answered()
        return {"images/s": round(count / passed), "cores": round(cores, 2)}

    def _rows(self, number: int) -> int:
        chunk = number % -(-self._samples // self._chunk)
        return min(self._chunk, self._samples - chunk * self._chunk)

    def _ask(self, slot: int) -> None:
        epoch, chunk = divmod(self._next, -(-self._samples // self._chunk))
        rows = tuple(range(self._rows(self._next)))
        task = Render(job=slot, stream=0, epoch=epoch, chunk=chunk, slot=slot, rows=rows)
        self._channel.send(messages.encode(task), timeout=60)
        self._next += 1

    def _answered(self) -> int:
        answer = self._answer()
        assert isinstance(answer, Rendered) and not answer.rejects, answer
        return answer.job

    def _answer(self) -> Any:
        return messages.from_worker.decode(self._channel.recv(timeout=_PATIENCE)[0])


def _until_closed(worker: DeviceWorker) -> None:
    with contextlib.suppress(Closed):
        worker.run()


def _lock(told: Told) -> Any:
    if told.backend != "dali-gpu":
        return lambda address, nbytes: None
    from headrace.pipeline.cuda import Device

    return Device(told.device).lock


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def rendered(stream: Stream, index: Index, backend: Backend, batch: int, *, whole: bool) -> NDArray[np.uint8]:
    """The first pictures of an epoch, rendered so many at a time."""
    count = min(_PURE, len(index))
    ring = Ring.create(stream.layout(index), count)
    reader = ChunkReader(stream, index, wholes=np.full(len(index), not whole, np.uint8))
    places = [divmod(position, stream.chunk) for position in range(count)]
    for first in range(0, count, batch):
        some = range(first, min(first + batch, count))
        parts = [part for i in some for part in reader.prepare(0, places[i][0], ring.views[i], [places[i][1]])]
        render(backend, parts)
    pixels = [ring.views[i].images[row].copy() for i, (_, row) in enumerate(places)]
    return np.stack(pixels)


if __name__ == "__main__":
    sys.exit(main())
