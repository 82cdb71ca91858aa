"""Bad files among good ones: what they cost the others.

Claims, with 200 corrupt files spread over 2,000 good ones: at least 0.8 times the images per second of the 2,000 good
ones alone, every good one delivered once per epoch and no corrupt one, and workers that take no more memory for it.

    python benchmarks/corrupt.py [--rounds 5] [--epochs 2] [--workers 2] [--backend dali-cpu|pillow] [--good 2000]
                                 [--bad 200] [--photos imagenet-like|large] [--data DIR]

clean    the good files
corrupt  the same, and among them the corrupt ones: cut at a tenth, a half, nine tenths and just before the end, cut and
         closed, with a hole of zeros, with a run of flipped bytes in the header, empty, text

A file that decodes in spite of its damage is none of them: each is tried with the Pillow backend when it is made.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import numpy as np

from headrace import Loader
from headrace.pipeline.pillow import decode
from headrace.pipeline.probe import BadPicture, probe
from headrace.pipeline.spec import Decode
from headrace.server.usage import own_bytes

SIDES = ("clean", "corrupt")

#: What is done to a good file; `random` chooses places.
DAMAGE: tuple[Callable[[bytes, np.random.Generator], bytes], ...] = (
    lambda data, random: data[: len(data) // 10],
    lambda data, random: data[: len(data) // 2],
    lambda data, random: data[: len(data) * 9 // 10],
    lambda data, random: data[:-2],
    lambda data, random: data[: len(data) // 2] + b"\xff\xd9",
    lambda data, random: data[: len(data) // 2] + bytes(len(data) // 2),
    lambda data, random: _flipped(data, int(random.integers(20, 200))),
    lambda data, random: b"",
    lambda data, random: b"<!DOCTYPE html><title>404 Not Found</title>",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_photo_options(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=2, help="measured, after one to warm up")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--backend", default="dali-cpu")
    parser.add_argument("--good", type=int, default=2000)
    parser.add_argument("--bad", type=int, default=200)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side is not None:
        print(json.dumps(measured(args)))
        return 0
    args.count = args.good
    with common.photo_set(args) as clean, tempfile.TemporaryDirectory(prefix="headrace-bench-") as temporary:
        corrupt = Path(temporary)
        spread(clean, corrupt, args.bad)
        folders = {"clean": clean, "corrupt": corrupt}
        options = ("--epochs", args.epochs, "--workers", args.workers, "--backend", args.backend)
        options += ("--batch-size", args.batch_size, "--good", args.good, "--bad", args.bad)
        rounds = common.interleaved(
            SIDES,
            args.rounds,
            lambda side: common.fresh(__file__, "--side", side, "--folder", folders[side], *options),
        )
    common.speeds(rounds)
    growth = common.median(rounds["corrupt"], "growth") - common.median(rounds["clean"], "growth")
    claims = [
        common.Claim("good images/s over those of the clean set", common.paired(rounds, "corrupt", "clean"), 0.8),
        common.Claim(
            "MiB that the workers grew by in the measured epochs, beyond the clean set's", growth, 16, most=True
        ),
    ]
    return common.conclude(claims, rounds=rounds)


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Images/s, counted in good ones; `growth` is that of the workers' memory over the measured epochs, in MiB."""
    with (
        common.Daemon(args.folder, workers=args.workers, backend=args.backend) as daemon,
        Loader(daemon.address, batch_size=args.batch_size, max_bad=1.0) as loader,
    ):
        epoch(loader, args)
        workers = daemon.ping().workers
        before = sum(map(own_bytes, workers))
        meter = common.Meter(workers=workers, daemon=[daemon.pid], consumer=[os.getpid()])
        images = sum(epoch(loader, args) for _ in range(args.epochs))
        used = meter.read()
        assert daemon.ping().workers == workers, "a worker was replaced"
        growth = (sum(map(own_bytes, workers)) - before) / (1 << 20)
    return {"images": images, "images_per_s": images / used["seconds"], "growth": growth} | used


def epoch(loader: Loader, args: argparse.Namespace) -> int:
    """How many images it had, after a look at whether these were all the good ones, once each, and the rest rejects."""
    seen: list[int] = []
    rejected = 0
    for batch in loader:
        seen += batch.indices[batch.valid].tolist()
        rejected += len(batch.rejects)
    bad = args.bad if args.side == "corrupt" else 0
    assert len(seen) == len(set(seen)) == args.good, f"{len(set(seen))} of {args.good} good files, {len(seen)} in all"
    assert rejected == bad, f"{rejected} rejects, {bad} corrupt files"
    return len(seen)


def spread(clean: Path, corrupt: Path, bad: int) -> None:
    """Links to the clean files, and `bad` corrupt ones among them."""
    files = sorted(clean.glob("*/*"))
    for file in files:
        (corrupt / file.parent.name).mkdir(exist_ok=True)
        (corrupt / file.parent.name / file.name).symlink_to(file.resolve())
    random = np.random.default_rng(0)
    made = tried = 0
    while made < bad:
        file = files[(tried * len(files) // bad + tried) % len(files)]
        data = DAMAGE[tried % len(DAMAGE)](file.read_bytes(), random)
        tried += 1
        if tried > 20 * bad:
            sys.exit("these photos decode whatever is done to them")
        if is_bad(data):
            (corrupt / file.parent.name / f"{file.stem}-bad{made}.jpg").write_bytes(data)
            made += 1


def is_bad(data: bytes) -> bool:
    try:
        decode(probe(data, Decode()))
    except BadPicture:
        return True
    return False


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes(byte ^ 0xFF for byte in data[at : at + 40]) + data[at + 40 :]


if __name__ == "__main__":
    sys.exit(main())
