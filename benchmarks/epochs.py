"""What fifty epochs leave behind: nothing.

Claim: the memory of its own (USS without clean pages of files, which are the kernel's) and the descriptors of each
process, daemon, workers and client, are the same after epoch 50 as after epoch 10: descriptors exactly, memory within
2 % or 4 MiB. The exit status says whether they are.

    python benchmarks/epochs.py [--epochs 50] [--count 2000] [--workers 2] [--data DIR]

Two runs: `default`, with chunks of 32 and the default memory, and `tight`, with chunks of 4 and a ring of one slot more
than the fewest allowed, so that each epoch goes round it a hundred times and more. One picture in fifty is cut off, so
that rejects are made too. With other than 50 epochs the first look is after a fifth of them.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import common

from headrace import Loader
from headrace.server.usage import own_bytes

#: Pictures that are made, and how many there are to one that is cut off; the set is links to them.
MADE = 200
CUT = 50
RUNS: dict[str, Any] = {"default": {"chunk": 32}, "tight": {"chunk": 4}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=50, help="at least 2")
    parser.add_argument("--count", type=int, default=2000, help="pictures of an epoch")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--data", type=Path, help="class folders of photos to make the pictures from")
    parser.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.epochs < 2:
        parser.error("--epochs: one epoch has nothing to be compared with")
    if args.run is not None:
        print(json.dumps(soak(args)))
        return 0
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as temporary:
        made, folder = Path(temporary, "made"), Path(temporary, "set")
        made.mkdir()
        folder.mkdir()
        common.imagenet_like(common.sources(args.data), made, MADE)
        files = sorted(made.glob("*/*"))
        for file in files[::CUT]:
            os.truncate(file, file.stat().st_size // 2)
        common.link(files, folder, args.count)
        options = ("--epochs", args.epochs, "--workers", args.workers, "--folder", folder)
        looks = {run: common.fresh(__file__, "--run", run, *options) for run in RUNS}
    claims = [claim for run, seen in looks.items() for claim in compared(run, seen)]
    return common.conclude(claims, looks=looks)


def soak(args: argparse.Namespace) -> dict[str, Any]:
    """All epochs of one run; what the processes hold after the first look's epoch and after the last."""
    memory = {"memory": f"{args.workers + 2} slots"} if args.run == "tight" else {}
    first = max(1, args.epochs // 5)
    looks = {}
    logging.getLogger("headrace").setLevel(logging.ERROR)  # each epoch's bad pictures are named
    with (
        common.Daemon(args.folder, workers=args.workers, stream=RUNS[args.run], **memory) as daemon,
        Loader(daemon.address, batch_size=64, max_bad=1.0) as loader,
    ):
        workers = daemon.ping().workers
        processes = {"daemon": daemon.pid, "client": os.getpid()}
        processes |= {f"worker {n + 1}": pid for n, pid in enumerate(workers)}
        hoard(loader)
        for epoch in range(1, args.epochs + 1):
            if epoch > 1:
                for images, _ in loader:
                    float(images[-1, :, -1].sum())
            if epoch in (first, args.epochs):
                looks[str(epoch)] = {name: held(pid) for name, pid in processes.items()}
        if daemon.ping().workers != workers:
            sys.exit("a worker died on the way: nothing can be said")
        rejected = loader.stats()["epochs"][args.epochs - 1]["rejected"]
        assert rejected, "no picture was bad: the set is not what it should be"
    return looks


def hoard(loader: Loader) -> None:
    """The first epoch, half of which holds on to more batches than any later one.

    A Loader keeps the memory of a few dropped batches for the next ones. How many there are follows from how many were
    ever in use at once, which is a matter of chance between two threads: now there are as many as it ever keeps, and
    all of their pages have been written.
    """
    kept: deque[Any] = deque(maxlen=8)
    for batch in loader:
        kept.append(batch)
        if batch.step > len(loader) // 2:
            kept.clear()


def held(pid: int) -> dict[str, int]:
    return {"bytes": own_bytes(pid), "descriptors": common.descriptors(pid)}


def compared(run: str, looks: dict[str, dict[str, dict[str, int]]]) -> list[common.Claim]:
    """Two claims on each process: how far its memory and its descriptors have moved from the first look to the last."""
    (first, before), (_, after) = looks.items()
    claims = []
    for name, then in before.items():
        now, mib = after[name], then["bytes"] / 2**20
        moved = abs(now["bytes"] / 2**20 - mib)
        text = f"{run}, {name}: MiB moved since epoch {first}, from {mib:.1f}"
        claims.append(common.Claim(text, moved, max(0.02 * mib, 4), most=True))
        text = f"{run}, {name}: descriptors moved, from {then['descriptors']}"
        claims.append(common.Claim(text, abs(now["descriptors"] - then["descriptors"]), 0, most=True))
    return claims


if __name__ == "__main__":
    sys.exit(main())
