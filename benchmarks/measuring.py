"""What measuring every stage costs: the way of a chunk with its clocks, and without.

Claim: less than 1 % of the CPU time that a chunk takes, with the fastest backend that works here.

    python benchmarks/measuring.py [--rounds 31] [--chunks 8] [--backend dali-cpu] [--photos imagenet-like|large]
                                   [--data DIR]

In one process and one thread a chunk is rendered as a worker does it, its answer is encoded, decoded and added up as
the daemon does it, and its rows are copied and finished to float32 as a Loader does it. Each chunk is made twice in a
row, with the clocks and without them; who begins changes each time. What is compared is the thread's CPU time, in pairs
of some chunks each, so that other work of the machine meets both alike.

Seen on 2 shared cores of a virtual machine that was busy with other things, by `--rounds 21 --count 300`, twice:

    dali-cpu: 3.20 ms of CPU time for a picture
    measuring takes -0.56% of it (quartiles -2.26% to +0.94%)
    stages: copy, decode, finish, plan, read, resize, write
    holds  share of the CPU time: -0.00556 <= 0.01

    measuring takes +0.09% of it (quartiles -0.76% to +1.27%)
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import numpy as np

from headrace import engine
from headrace.assembly import Draft, Piece, Want
from headrace.form import Form
from headrace.output import Output
from headrace.pipeline import render
from headrace.pipeline.backend import BackendFailed, make
from headrace.pipeline.dataset import open_index
from headrace.pipeline.render import ChunkRenderer
from headrace.pipeline.spec import Config
from headrace.protocol import Chunk
from headrace.shm import SharedDelivery
from headrace.slots import Ring
from headrace.stages import Clock, Stages
from headrace.workers import messages
from headrace.workers.messages import Rendered

CHUNK = 32


class Silent:
    """A clock that counts nothing."""

    def __init__(self, stages: Stages) -> None:
        pass

    def lap(self, name: str, count: int = 1, nbytes: int = 0) -> None:
        pass


class Way:
    """Of the chunks of one stream, from the files to finished rows."""

    def __init__(self, folder: Path, backend: str, cache: Path) -> None:
        stream = {"chunk": CHUNK, **common.training_stream(folder)}
        spec = Config.load({"streams": {"train": stream}}).streams["train"]
        self.index = open_index(spec.dataset, cache)
        self.ring = Ring.create(spec.layout(self.index), 1)
        self.renderer = ChunkRenderer(spec, self.index, make(backend))
        size = {"height": common.SIZE, "width": common.SIZE}
        self.form = Form("numpy", Output(mean=common.MEAN, std=common.STD), **size, batch_size=CHUNK, prefetch=0)
        self.daemons, self.clients = Stages(), Stages()

    def walk(self, chunk: int, *, measured: bool) -> float:
        """CPU seconds of one chunk."""
        clock: Any = Clock if measured else Silent
        render.Clock = clock  # type: ignore[misc]
        begun = time.thread_time()
        done = self.renderer.render(0, chunk, self.ring.views[0])
        answer = Rendered(job=1, render_id="", trouble="", rejects=[], stages=done.stages.status())
        told = messages.from_worker.decode(messages.encode(answer))
        assert isinstance(told, Rendered)
        self.daemons.merge(told.stages)
        draft = self._draft()
        message = Chunk(request=1, slot=0, generation=int(self.ring.generation[0]), render_id="", window=1, rejects=[])
        lap = clock(self.clients).lap
        want = Want(chunk, 0, [Piece(draft, 0, 0, CHUNK)])
        assert engine._copy(SharedDelivery(self.ring, message), want, {}, self.form, lap)
        lap("copy")
        return time.thread_time() - begun

    def _draft(self) -> Draft:
        return Draft(
            step=0,
            positions=range(CHUNK),
            images=self.form.allocate(CHUNK),
            labels=np.zeros(CHUNK, np.int64),
            indices=np.zeros(CHUNK, np.int64),
            valid=np.ones(CHUNK, np.bool_),
            keep=np.ones(CHUNK, np.bool_),
            missing=CHUNK,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_photo_options(parser)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--chunks", type=int, default=8, help="of a round")
    parser.add_argument("--backend", help="by default dali-cpu where it works, else pillow")
    args = parser.parse_args()
    backend = args.backend or fastest()
    with common.photo_set(args) as folder, tempfile.TemporaryDirectory() as cache:
        way = Way(folder, backend, Path(cache))
        whole = len(way.index) // CHUNK
        for chunk in range(whole):  # what was decoded once is known to be good, and then takes less
            way.walk(chunk, measured=chunk % 2 == 0)
        ratios, seconds = [], []
        for r in range(args.rounds):
            spent = {True: 0.0, False: 0.0}
            for c in range(args.chunks):
                for measured in ((c + r) % 2 == 0, (c + r) % 2 == 1):
                    spent[measured] += way.walk((r * args.chunks + c) % whole, measured=measured)
            ratios.append(spent[True] / spent[False] - 1)
            seconds.append(spent[True] / (args.chunks * CHUNK))
        laps = {**way.daemons.status(), **way.clients.status()}
        low, middle, high = common.quartiles(ratios)
    common.say(f"    {backend}: {1000 * common.quartiles(seconds)[1]:.2f} ms of CPU time for a picture")
    common.say(f"    measuring takes {middle:+.2%} of it (quartiles {low:+.2%} to {high:+.2%})")
    common.say("    stages: " + ", ".join(sorted(laps)))
    return common.conclude([common.Claim("share of the CPU time", middle, 0.01, most=True)], ratios=ratios)


def fastest() -> str:
    try:
        make("dali-cpu").close()
    except BackendFailed:
        return "pillow"
    return "dali-cpu"


if __name__ == "__main__":
    sys.exit(main())
