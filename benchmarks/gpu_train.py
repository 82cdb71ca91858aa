"""What reaches a trainer's GPU: copying, finishing, delivery, and a ResNet-50 loop in bf16, each beside its limit.

Claims, on a machine with an NVIDIA GPU: batches are copied to it at 0.9 of a plain page-locked copy of the same bytes,
and finished there at 0.8 of a device-to-device copy of as many bytes; a GPU's worker delivers through slots on the host
0.9 of the images/s of a bare DALI pipeline; a ResNet-50 loop in bf16 reaches 0.95 of the images/s that it has on one
constant batch with CPU workers, and 0.9 with the worker on the same GPU, without MPS and with it.

    python benchmarks/gpu_train.py [--rounds 3] [--steps 60] [--batch-size 256] [--size 224] [--model resnet50]
                                   [--workers N] [--only copy delivery train] [--photos imagenet-like|large]
                                   [--count 1000] [--cpu]

constant batch      the loop on one batch that lies on the device
CPU workers         a daemon with N worker processes (Pillow), a Loader with device="cuda"
GPU worker          the same with the worker on the trainer's GPU; two processes there take turns,
GPU worker, MPS     and under NVIDIA's Multi-Process Service, where it is installed, they share
DataLoader          torchvision in N worker processes, pinned memory, cast and normalised on the device
bare DALI           file reader, decoding of the random window alone, resize and mirror; the levels stay on the GPU
delivery            a daemon with the GPU's worker, a Loader of levels in NumPy arrays

Every side runs in a fresh process, warms up, and is then measured over whole steps; whoever falls short of the constant
batch because N cores decode less than the GPU trains on will see that the DataLoader does too.

It has never run on a GPU, so nothing was seen. With --cpu everything is on the CPU, and neither copying nor bare DALI
is measured: it shows that the program works, and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import common
import numpy as np
import peers
import torch

from headrace import Loader, kernel
from headrace.device import open_device
from headrace.output import Output
from headrace.pipeline import gpus
from headrace.workers.cpus import usable_cpus

PARTS = ("copy", "delivery", "train")
TRAINING = ("constant batch", "CPU workers", "GPU worker", "GPU worker, MPS", "DataLoader")
DELIVERY = ("bare DALI", "delivery")
MPS = "nvidia-cuda-mps-control"
#: Steps before the measured ones: pools and clocks settle, the first pictures have been decoded as a whole.
_WARM = 10
#: Copies that are timed together.
_CALLS = 50
#: Seconds for the service to start or to end.
_PATIENCE = 60


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_photo_options(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="measured, of one side of one round")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--size", type=int, default=common.SIZE)
    parser.add_argument("--model", default="resnet50", help="of torchvision.models")
    parser.add_argument("--workers", type=int, default=usable_cpus(), help="processes that decode on the CPU")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--side", choices=("copy", *DELIVERY, *TRAINING), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side is not None:
        print(json.dumps(side(args)))
        return 0
    if not args.cpu and (trouble := gpus.look().trouble):
        sys.exit(f"nothing is measured without a GPU: {trouble}")
    with common.photo_set(args) as folder:
        claims, details = measured(args, folder)
    return common.conclude(claims, **details)


def measured(args: argparse.Namespace, folder: Path) -> tuple[list[common.Claim], dict[str, Any]]:
    """The claims, and what they were made from."""
    options = ["--folder", folder, *(["--cpu"] if args.cpu else [])]
    for name in ("steps", "batch_size", "size", "model", "workers"):
        options += [f"--{name.replace('_', '-')}", getattr(args, name)]
    claims: list[common.Claim] = []
    details: dict[str, Any] = {}

    def one(name: str) -> dict[str, Any]:
        with mps() if name.endswith("MPS") else contextlib.nullcontext():
            return common.fresh(__file__, "--side", name, *options)

    def rounds(sides: tuple[str, ...]) -> common.Rounds:
        found = common.interleaved(sides, args.rounds, one)
        common.speeds(found)
        return found

    if "copy" in args.only and not args.cpu:
        copied = details["copy"] = common.fresh(__file__, "--side", "copy", *options)
        common.say("    " + ", ".join(f"{name} {value:.3g}" for name, value in copied.items()))
        claims += [
            common.Claim("copying to the device over a plain page-locked copy", copied["copy_share"], 0.9),
            common.Claim("finishing over a device-to-device copy of as many bytes", copied["finish_share"], 0.8),
        ]
    if "delivery" in args.only:
        found = rounds(DELIVERY[1:] if args.cpu else DELIVERY)
        details["delivery"] = found
        if not args.cpu:
            share = common.paired(found, "delivery", "bare DALI")
            claims.append(common.Claim("images/s delivered over those of bare DALI", share, 0.9))
    if "train" in args.only:
        sides = tuple(name for name in TRAINING if possible(name, cpu=args.cpu))
        found = rounds(sides)
        details["train"] = found
        bounds = {"CPU workers": 0.95, "GPU worker": 0.9, "GPU worker, MPS": 0.9}
        for name in bounds:
            if name in sides and not args.cpu:
                share = common.paired(found, name, "constant batch")
                claims.append(common.Claim(f"training with {name} over a constant batch", share, bounds[name]))
    return claims, details


def possible(name: str, *, cpu: bool) -> bool:
    """Whether a side of the loop can be measured here; it is said if not."""
    if cpu and "GPU" in name:
        return False
    if name.endswith("MPS"):
        try:
            with mps():
                pass
        except (OSError, subprocess.SubprocessError) as error:
            common.say(f"    not measured: {name}: {error}")
            return False
    return True


def side(args: argparse.Namespace) -> dict[str, Any]:
    """What one side gives, in this process."""
    gpus.count_by_bus()
    with contextlib.ExitStack() as stack:
        if args.side == "copy":
            return copying(args)
        if args.side in DELIVERY:
            return delivery(args, stack)
        return training(args, stack)


# -- the loop -----------------------------------------------------------------------------------------------------


def training(args: argparse.Namespace, stack: contextlib.ExitStack) -> dict[str, Any]:
    device = torch.device("cpu" if args.cpu else "cuda")
    common.torchvision_operators()
    model = getattr(import_module("torchvision.models"), args.model)(num_classes=1000)
    model = model.to(device, memory_format=torch.channels_last)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    groups: dict[str, list[int]] = {"trainer": [os.getpid()]}

    def step(images: Any, labels: Any) -> int:
        with torch.autocast(device.type, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        return len(labels)

    batches = _batches(args, device, stack, groups)
    for images, labels in itertools.islice(batches, _WARM if not args.cpu else 1):
        step(images, labels)
    _synchronise(device)
    meter = common.Meter(**{name: pids or common.children(os.getpid()) for name, pids in groups.items()})
    count, waited = 0, 0.0
    for _ in range(args.steps):
        before = time.perf_counter()
        images, labels = next(batches)
        waited += time.perf_counter() - before
        count += step(images, labels)
    _synchronise(device)
    used = meter.read()
    share = waited / used["seconds"]
    return {"images": count, "images_per_s": count / used["seconds"], "wait_share": share} | used


def _batches(
    args: argparse.Namespace, device: torch.device, stack: contextlib.ExitStack, groups: dict[str, list[int]]
) -> Iterator[tuple[Any, Any]]:
    """Without end. The processes that make them go into `groups`; none: the children of this process."""
    if args.side == "constant batch":
        shape = (args.batch_size, 3, args.size, args.size)
        images = torch.randn(shape, device=device).to(torch.bfloat16, memory_format=torch.channels_last)
        return itertools.repeat((images, torch.randint(1000, (args.batch_size,), device=device)))
    if args.side == "DataLoader":
        groups["workers"] = []
        return _forever(_data_loader(args, device))
    daemon = stack.enter_context(_daemon(args, gpu=args.side.startswith("GPU")))
    loader = stack.enter_context(
        Loader(
            daemon.address,
            batch_size=args.batch_size,
            last_batch="drop",
            dtype="bfloat16",
            layout="channels_last",
            device=None if args.cpu else "cuda",
        )
    )
    batches = _forever(loader)
    next(batches)  # from now on all workers are there
    groups |= {"daemon": [daemon.pid], "workers": daemon.ping().workers}
    return batches


def _forever(batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    while True:
        yield from batches


def _data_loader(args: argparse.Namespace, device: torch.device) -> Iterable[tuple[Any, Any]]:
    loader: Any = torch.utils.data.DataLoader(
        peers.pictures(args.folder, levels=True, size=args.size),
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=args.workers,
        persistent_workers=True,
        pin_memory=not args.cpu,
    )
    return _OnDevice(loader, device)


class _OnDevice:
    """The batches of a DataLoader of levels, cast and normalised on the device."""

    def __init__(self, loader: Iterable[tuple[Any, Any]], device: torch.device) -> None:
        self._loader = loader
        self._device = device
        self._mean, self._std = (
            torch.tensor(values, device=device).reshape(3, 1, 1) for values in (common.MEAN, common.STD)
        )

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for images, labels in self._loader:
            images = images.to(self._device, non_blocking=True).to(memory_format=torch.channels_last)
            images = images.to(torch.float32).div_(255).sub_(self._mean).div_(self._std).to(torch.bfloat16)
            yield images, labels.to(self._device, non_blocking=True)


def _daemon(args: argparse.Namespace, *, gpu: bool) -> common.Daemon:
    stream = {"transforms": [{"random_resized_crop": {"size": args.size}}, "random_horizontal_flip"]}
    more = {"devices": [0], "threads": args.workers} if gpu else {}
    backend = "dali-gpu" if gpu else "pillow"
    return common.Daemon(args.folder, workers=args.workers, backend=backend, stream=stream, more_workers=more)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def mps() -> Iterator[None]:
    """Processes that are started meanwhile are clients of a service of their own. They have to end before it does.

    Raises:
        OSError, subprocess.SubprocessError: it is not installed, does not start, or does not end.
    """
    variables = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
    with tempfile.TemporaryDirectory(prefix="headrace-mps-") as name:
        for variable in variables:
            (folder := Path(name) / variable).mkdir()
            os.environ[variable] = str(folder)
        try:
            subprocess.run([MPS, "-d"], check=True, timeout=_PATIENCE)
            try:
                yield
            finally:
                subprocess.run([MPS], input=b"quit -t 10\n", check=False, timeout=_PATIENCE)
        finally:
            for variable in variables:
                del os.environ[variable]


# -- copying and finishing ----------------------------------------------------------------------------------------


def copying(args: argparse.Namespace) -> dict[str, Any]:
    """GB/s, and what each pass is of a plain copy; medians of rounds in which both sides take turns."""
    device = open_device("cuda")
    assert device is not None
    output = Output("bfloat16", "channels_last", common.MEAN, common.STD)
    _, finish = kernel.choose(output, args.size, args.size, device.target)
    shape = (args.batch_size, args.size, args.size, 3)
    nbytes = math.prod(shape)
    host = np.frombuffer(device.lock(nbytes), np.uint8)
    plain = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    levels = torch.randint(256, shape, dtype=torch.uint8, device=device.target)
    out = torch.empty(shape, dtype=torch.bfloat16, device=device.target)
    # A copy reads as much as it writes; finishing to 16 bits writes twice what it reads.
    source, target = (torch.empty(3 * nbytes // 2, dtype=torch.uint8, device=device.target) for _ in range(2))
    copies = _turns(
        args.rounds,
        lambda: device.submit(host, lambda staged: None),
        lambda: target[:nbytes].copy_(plain, non_blocking=True),
    )
    passes = _turns(args.rounds, lambda: finish(levels, None, out), lambda: target.copy_(source))
    return {
        "copy_share": statistics.median(theirs / ours for ours, theirs in copies),
        "copy_gb_s": nbytes / 1e9 / statistics.median(ours for ours, _ in copies),
        "finish_share": statistics.median(theirs / ours for ours, theirs in passes),
        "finish_gb_s": 3 * nbytes / 1e9 / statistics.median(ours for ours, _ in passes),
    }


def _turns(rounds: int, ours: Callable[[], Any], theirs: Callable[[], Any]) -> list[tuple[float, float]]:
    """Seconds of one call of each, round by round; the first round warms up and is left out."""
    found = []
    for _ in range(1 + 3 * rounds):
        seconds = []
        for call in (ours, theirs):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(_CALLS):
                call()
            torch.cuda.synchronize()
            seconds.append((time.perf_counter() - began) / _CALLS)
        found.append((seconds[0], seconds[1]))
    return found[1:]


# -- delivery -----------------------------------------------------------------------------------------------------


def delivery(args: argparse.Namespace, stack: contextlib.ExitStack) -> dict[str, Any]:
    groups: dict[str, list[int]] = {"consumer": [os.getpid()]}
    if args.side == "bare DALI":
        sizes = _bare_dali(args)
    else:
        daemon = stack.enter_context(_daemon(args, gpu=not args.cpu))
        loader = stack.enter_context(
            Loader(daemon.address, batch_size=args.batch_size, dtype="uint8", layout="NHWC", output="numpy")
        )
        sizes = (len(labels) for _, labels in _forever(loader))
        next(sizes)
        groups |= {"daemon": [daemon.pid], "workers": daemon.ping().workers}
    # Whole pictures are decoded in the first epoch, windows alone from the second on.
    for _ in itertools.islice(sizes, max(_WARM, -(-args.count // args.batch_size)) if not args.cpu else 1):
        pass
    meter = common.Meter(**groups)
    count = sum(itertools.islice(sizes, args.steps))
    used = meter.read()
    return {"images": count, "images_per_s": count / used["seconds"]} | used


def _bare_dali(args: argparse.Namespace) -> Iterator[int]:
    """Sizes of batches whose levels are on the GPU."""
    dali, fn = import_module("nvidia.dali"), import_module("nvidia.dali.fn")

    @dali.pipeline_def(batch_size=args.batch_size, num_threads=args.workers, device_id=0, seed=0)
    def pipeline() -> Any:
        encoded, labels = fn.readers.file(file_root=str(args.folder), random_shuffle=True, name="reader")
        images = fn.decoders.image_random_crop(encoded, device="mixed", random_area=(0.08, 1.0))
        images = fn.resize(images, size=[args.size, args.size], antialias=True)
        return fn.flip(images, horizontal=fn.random.coin_flip()), labels

    made = pipeline()
    made.build()
    while True:
        images, _ = made.run()
        yield len(images)


if __name__ == "__main__":
    sys.exit(main())
