"""Headrace against a torch DataLoader that does the same Pillow work, float32 out of both.

Claims, on 2 cores and the imagenet-like photos: at least 1.25 times the images per second of a DataLoader with as many
workers, which are persistent; and the daemon itself takes under 3 % of its workers' CPU time. Large photos are mostly
decoding, which is the same on both sides.

    python benchmarks/versus_dataloader.py [--rounds 7] [--epochs 3] [--workers 2] [--batch-size 64]
                                           [--photos imagenet-like|large] [--data DIR]

headrace            a daemon with N worker processes, one Loader
dataloader          torchvision's ImageFolder, RandomResizedCrop, RandomHorizontalFlip, ToTensor and Normalize in N
                    worker processes
dataloader, uint8   the same without ToTensor and Normalize; the consumer casts and normalises

Every side runs in fresh processes, has one epoch to warm up, and is then measured over whole epochs, the pauses between
them included. The consumer takes one row of pixels of each batch and does nothing else. torchvision crops before it
resizes and Headrace's filter sees the pixels beyond the window; the work is otherwise the same, by the same Pillow.

Seen on 2 shared cores of a virtual machine, by the command above without options, the photo set cut from 126 photos of
1280x853:

    side               images/s  (quartiles)   ratio  (quartiles)     others  CPU ms per image
    dataloader         360       (357 to 369)  1.00   (1.00 to 1.00)  0%      workers 5.21, consumer 0.08
    dataloader, uint8  363       (339 to 403)  1.02   (0.91 to 1.10)  0%      workers 4.55, consumer 0.86
    headrace           470       (453 to 479)  1.31   (1.26 to 1.36)  0%      workers 3.88, consumer 0.30, daemon 0.03
    holds  images/s over a DataLoader's: 1.306 >= 1.25
    holds  the daemon's CPU time over its workers': 0.008591 <= 0.03

Another day the same machine gave the DataLoader 318 and headrace 466 (1.46), with 5.99 and 4.21 ms CPU per image.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import common
import torch

from headrace import Loader

SIDES = ("dataloader", "dataloader, uint8", "headrace")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_photo_options(parser)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=3, help="measured, after one to warm up")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side is not None:
        print(json.dumps(headrace(args) if args.side == "headrace" else dataloader(args)))
        return 0
    with common.photo_set(args) as folder:
        options = ("--folder", folder, "--epochs", args.epochs, "--workers", args.workers)
        rounds = common.interleaved(
            SIDES,
            args.rounds,
            lambda side: common.fresh(__file__, "--side", side, "--batch-size", args.batch_size, *options),
        )
    common.speeds(rounds)
    ours, theirs = (common.median(rounds[side], "images_per_s") for side in ("headrace", "dataloader"))
    daemon, workers = (common.median(rounds["headrace"], key) for key in ("cpu_daemon", "cpu_workers"))
    claims = [
        common.Claim("images/s over a DataLoader's", ours / theirs, 1.25),
        common.Claim("the daemon's CPU time over its workers'", daemon / workers, 0.03, most=True),
    ]
    return common.conclude(claims, rounds=rounds)


def headrace(args: argparse.Namespace) -> dict[str, Any]:
    with (
        common.Daemon(args.folder, workers=args.workers) as daemon,
        Loader(daemon.address, batch_size=args.batch_size) as loader,
    ):
        return measured(loader, args.epochs, lambda: (daemon.pid, daemon.ping().workers))


def dataloader(args: argparse.Namespace) -> dict[str, Any]:
    levels = args.side.endswith("uint8")
    loader = torch.utils.data.DataLoader(
        pictures(args.folder, levels=levels),
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        persistent_workers=True,
    )
    batches = normalised(loader) if levels else loader
    return measured(batches, args.epochs, lambda: (None, common.children(os.getpid())))


def measured(
    batches: Iterable[Any], epochs: int, processes: Callable[[], tuple[int | None, list[int]]]
) -> dict[str, Any]:
    """One epoch unmeasured, then `epochs` measured ones.

    Args:
        processes: the daemon, if there is one, and the workers; asked when they are all there.
    """
    consume(batches)
    daemon, workers = processes()
    groups = {} if daemon is None else {"daemon": [daemon]}
    meter = common.Meter(workers=workers, consumer=[os.getpid()], **groups)
    images = sum(consume(batches) for _ in range(epochs))
    used = meter.read()
    return {"images": images, "images_per_s": images / used["seconds"]} | used


def consume(batches: Iterable[Any]) -> int:
    """One epoch; how many images it had."""
    count = 0
    for images, labels in batches:
        assert images.dtype == torch.float32
        float(images[-1, :, -1].sum())
        count += len(labels)
    return count


def pictures(folder: Path, *, levels: bool, size: int = common.SIZE) -> Any:
    """torchvision's data set of a folder; as uint8 `levels` or as normalised float32."""
    common.torchvision_operators()
    datasets, t = import_module("torchvision.datasets"), import_module("torchvision.transforms")
    chain = [t.RandomResizedCrop(size), t.RandomHorizontalFlip()]
    chain += [t.PILToTensor()] if levels else [t.ToTensor(), t.Normalize(common.MEAN, common.STD)]
    return datasets.ImageFolder(folder, t.Compose(chain))


class normalised:
    """The batches of a DataLoader of levels, cast and normalised by whoever takes them."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._mean, self._std = (torch.tensor(values).reshape(3, 1, 1) for values in (common.MEAN, common.STD))

    def __iter__(self) -> Any:
        for images, labels in self._loader:
            yield images.to(torch.float32).div_(255).sub_(self._mean).div_(self._std), labels


if __name__ == "__main__":
    sys.exit(main())
