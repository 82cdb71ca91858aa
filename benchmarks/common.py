"""What the benchmarks share: photos, a daemon, fresh processes in interleaved rounds, what /proc says, the report.

A benchmark is a program with a claim. It measures several *sides*, each in processes started for that one
measurement, in rounds: every side once, then every side again, each round beginning with another one, so that whatever
else the machine does meets all of them alike. Its exit status says whether the claims hold.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from headrace.ping import ping
from headrace.protocol import Pong
from headrace.server.usage import cpu_seconds, machine_seconds

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE = 224

#: Pixels of the longer side of a photo that is enlarged.
_LONG = 1280
#: Seconds that one side of one round may take.
_PATIENCE = 900

Rounds = Mapping[str, Sequence[dict[str, Any]]]


# -- photos -------------------------------------------------------------------------------------------------------


def add_photo_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--photos", choices=("imagenet-like", "large"), default="imagenet-like")
    parser.add_argument("--data", type=Path, help="class folders of photos that it is made from")
    parser.add_argument("--count", type=int, default=1000, help="pictures of the set")
    parser.add_argument("--folder", type=Path, help="class folders to be served as they are, instead of all this")


def sources(data: Path | None) -> list[Path]:
    """The photos that sets are made from.

    Args:
        data: class folders; None for the extra samples, named by HEADRACE_SAMPLES or beside the checkout, and where
            there are none for the colour photos that the scikit-image package ships.
    """
    if data is None:
        data = Path(os.environ.get("HEADRACE_SAMPLES") or Path(__file__).resolve().parents[2] / "shared") / "photos"
        if not data.is_dir():
            return _scikit_image_photos()
    found = sorted(data.glob("*/*.jp*g"))
    if not found:
        sys.exit(f"no JPEGs in the folders of {data}")
    return found


@contextlib.contextmanager
def photo_set(args: argparse.Namespace) -> Iterator[Path]:
    """The set that the options ask for, in a folder that is removed afterwards."""
    if args.folder is not None:
        yield args.folder
        return
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as temporary:
        folder = Path(temporary) / "photos"
        folder.mkdir()
        make_photos(args.photos, sources(args.data), folder, args.count)
        say(described(folder))
        yield folder


def make_photos(kind: str, sources: Sequence[Path], folder: Path, count: int) -> None:
    {"imagenet-like": imagenet_like, "large": large}[kind](sources, folder, count)


def described(folder: Path) -> str:
    """What photos are in the folders of a folder."""
    files = sorted(folder.glob("*/*"))
    nbytes = statistics.median(file.stat().st_size for file in files)
    sizes, progressive = [], 0
    for file in files:
        with Image.open(file) as opened:
            sizes.append(opened.size)
            progressive += "progressive" in opened.info
    width, height = (statistics.median(side) for side in zip(*sizes, strict=True))
    share = f", {progressive / len(files):.0%} of them progressive" if progressive else ""
    return f"{len(files)} photos of {nbytes / 1000:.0f} kB and {width:.0f}x{height:.0f} pixels (medians){share}"


def imagenet_like(sources: Sequence[Path], folder: Path, count: int) -> None:
    """Crops of the photos, 500 pixels by 375, baseline JPEG of quality 96 without chroma subsampling."""
    for s, source in enumerate(sources):
        (folder / source.parent.name).mkdir(exist_ok=True)
        with Image.open(source) as opened:
            photo = opened.convert("RGB")
        size = (500, 375) if photo.width >= photo.height else (375, 500)
        whole = min(photo.width / size[0], photo.height / size[1])
        rng = np.random.default_rng(s)
        for n in range(s, count, len(sources)):
            scale = whole * rng.uniform(0.6, 1.0)
            x, y = (rng.uniform(0, side - scale * cut) for side, cut in zip(photo.size, size, strict=True))
            crop = photo.resize(size, Image.Resampling.BICUBIC, (x, y, x + scale * size[0], y + scale * size[1]))
            crop.save(folder / source.parent.name / f"{n:06}.jpg", quality=96, subsampling=0)


def large(sources: Sequence[Path], folder: Path, count: int) -> None:
    """`count` links to the photos; instead of one that is no JPEG, or less than a megapixel, to one enlarged."""
    enlarged = folder.with_name("enlarged")
    targets = []
    for s, source in enumerate(sources):
        with Image.open(source) as opened:
            if opened.format == "JPEG" and opened.width * opened.height >= 1_000_000:
                targets.append(source)
                continue
            scale = _LONG / max(opened.size)
            photo = opened.convert("RGB").resize(
                [round(scale * side) for side in opened.size], Image.Resampling.BICUBIC
            )
        targets.append(enlarged / str(s) / source.parent.name / "photo.jpg")
        targets[-1].parent.mkdir(parents=True)
        photo.save(targets[-1], quality=90)
    link(targets, folder, count)


def link(sources: Sequence[Path], folder: Path, count: int) -> None:
    """`count` links to the photos, dealt out in turn."""
    for n in range(count):
        source = sources[n % len(sources)].resolve()
        (folder / source.parent.name).mkdir(exist_ok=True)
        (folder / source.parent.name / f"{n:06}{source.suffix}").symlink_to(source)


def _scikit_image_photos() -> list[Path]:
    """The colour photos that the scikit-image package ships."""
    spec = importlib.util.find_spec("skimage")
    if spec is None or spec.origin is None:
        sys.exit("no photos: name a folder with --data, or install scikit-image")
    found = []
    for file in sorted((Path(spec.origin).parent / "data").iterdir()):
        if file.suffix in (".png", ".jpg"):
            with Image.open(file) as image:
                if image.mode == "RGB" and min(image.size) >= 300:
                    found.append(file)
    return found


# -- a daemon -----------------------------------------------------------------------------------------------------


class Daemon:
    """`headrace serve` on one stream, a process of its own; with everything it writes in a temporary folder.

    Args:
        folder: of the pictures.
        stream: further keys of the stream; more_workers: of `workers`.
        more: further keys of the configuration.
    """

    def __init__(
        self,
        folder: Path,
        *,
        workers: int,
        backend: str = "auto",
        stream: Mapping[str, Any] | None = None,
        more_workers: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="headrace-bench-")
        home = Path(self._home.name)
        self.address = f"ipc://{home}/d.sock"
        self._log = home / "log"
        document = {
            "listen": self.address,
            "cache_dir": str(home / "cache"),
            "workers": {"processes": workers, "backend": backend} | dict(more_workers or {}),
            "streams": {"train": training_stream(folder) | dict(stream or {})},
            **more,
        }
        (home / "headrace.yaml").write_text(yaml.safe_dump(document))
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headrace.server", "serve", str(home / "headrace.yaml")],
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self.pid = self._process.pid

    def ping(self) -> Pong:
        return ping(self.address, timeout=30.0)

    def __enter__(self) -> Daemon:
        assert self._process.stdout is not None
        if not self._process.stdout.readline().startswith(b"listening on "):
            text = self._log.read_text()
            self.__exit__()
            sys.exit(f"the daemon did not start:\n{text}")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._home.cleanup()


def training_stream(folder: Path) -> dict[str, Any]:
    return {
        "dataset": {"folder": str(folder)},
        "shuffle": True,
        "transforms": [{"random_resized_crop": {"size": SIZE}}, "random_horizontal_flip"],
        "output": {"mean": list(MEAN), "std": list(STD)},
    }


def torchvision_operators() -> None:
    """Before torchvision is imported: beside a torch without CUDA one with it cannot register its own operators."""
    import torch

    if torch.version.cuda is None and "+cpu" not in version("torchvision"):
        for operator in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, operator):
                signature = "(Tensor boxes, Tensor scores, float threshold) -> Tensor"
                torch.library.define(f"torchvision::{operator}", signature)


# -- what /proc says ----------------------------------------------------------------------------------------------


def children(pid: int) -> list[int]:
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            found += map(int, file.read_text().split())
    return found


def below(pid: int) -> list[int]:
    """Its children, and theirs."""
    return [one for child in children(pid) for one in (child, *below(child))]


def descriptors(pid: int) -> int:
    """That the process keeps: the fewest in a fifth of a second, for a worker mostly has a picture's file open too."""
    counts = []
    for _ in range(10):
        counts.append(len(os.listdir(f"/proc/{pid}/fd")))
        time.sleep(0.02)
    return min(counts)


class Meter:
    """CPU seconds per group of processes, from its making to `read`.

    Args:
        groups: process ids by name.
    """

    def __init__(self, **groups: Iterable[int]) -> None:
        self._groups = {name: list(pids) for name, pids in groups.items()}
        self._before = self._used()
        self._since = time.perf_counter()

    def read(self) -> dict[str, float]:
        """`seconds`, `cpu_NAME` of each group, and `others`: the share of the machine that went elsewhere meanwhile."""
        seconds = time.perf_counter() - self._since
        used = {name: now - self._before[name] for name, now in self._used().items()}
        others = used.pop("machine") - sum(used.values())
        capacity = seconds * (os.cpu_count() or 1)
        return {f"cpu_{name}": value for name, value in used.items()} | {
            "seconds": seconds,
            "others": others / capacity,
        }

    def _used(self) -> dict[str, float]:
        used = {name: sum(map(cpu_seconds, pids)) for name, pids in self._groups.items()}
        return used | {"machine": sum(machine_seconds())}


# -- rounds -------------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    print(text, flush=True)


def interleaved(sides: Sequence[str], rounds: int, run: Callable[[str], dict[str, Any]]) -> Rounds:
    """What each side gave, round by round."""
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for r in range(rounds):
        first = r % len(sides)
        for side in (*sides[first:], *sides[:first]):
            results[side].append(run(side))
        say(f"round {r + 1}: " + ", ".join(f"{side} {results[side][r]['images_per_s']:.0f}" for side in sides))
    return results


def fresh(program: str, *args: object) -> dict[str, Any]:
    """The JSON object that a program prints as its last line, run in a process of its own."""
    with subprocess.Popen([sys.executable, program, *map(str, args)], stdout=subprocess.PIPE) as process:
        try:
            output, _ = process.communicate(timeout=_PATIENCE)
        except BaseException:
            for pid in (*children(process.pid), process.pid):  # a daemon would live on
                os.kill(pid, signal.SIGTERM)
            raise
    if process.returncode:
        sys.exit(f"{Path(program).name} {' '.join(map(str, args))}: exit status {process.returncode}")
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def median(rounds: Sequence[Mapping[str, float]], key: str) -> float:
    return statistics.median(r[key] for r in rounds)


def paired(rounds: Rounds, ours: str, theirs: str) -> float:
    """The median, over the rounds, of the ratio of two sides' images/s in the same round."""
    pairs = zip(rounds[ours], rounds[theirs], strict=True)
    return statistics.median(a["images_per_s"] / b["images_per_s"] for a, b in pairs)


# -- the report ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """`measured` is to be at least, or with `most` at most, `bound`."""

    text: str
    measured: float
    bound: float
    most: bool = False

    @property
    def holds(self) -> bool:
        return self.measured <= self.bound if self.most else self.measured >= self.bound

    def __str__(self) -> str:
        sign = "<=" if self.most else ">="
        return f"{'holds' if self.holds else 'FAILS'}  {self.text}: {self.measured:.4g} {sign} {self.bound:g}"


def speeds(rounds: Rounds) -> None:
    """Prints a line per side: images/s, what it is to the first side in the same round, CPU time per image."""
    base: list[float] = [r["images_per_s"] for r in next(iter(rounds.values()))]
    table = [["side", "images/s", "(quartiles)", "ratio", "(quartiles)", "others", "CPU ms per image"]]
    for side, results in rounds.items():
        speed: list[float] = [r["images_per_s"] for r in results]
        low, middle, high = quartiles(speed)
        least, ratio, most = quartiles([ours / theirs for ours, theirs in zip(speed, base, strict=True)])
        groups = [key for key in results[0] if key.startswith("cpu_")]
        cpu = (f"{key[4:]} {1000 * statistics.median(r[key] / r['images'] for r in results):.2f}" for key in groups)
        table.append([
            side,
            f"{middle:.0f}", f"({low:.0f} to {high:.0f})",
            f"{ratio:.2f}", f"({least:.2f} to {most:.2f})",
            f"{median(results, 'others'):.0%}",
            ", ".join(cpu),
        ])  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        say("    " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    say("    others: share of the machine's CPU time that went to anything else, the median round's")


def conclude(claims: Sequence[Claim], **details: Any) -> int:
    """Prints the claims and everything as one line of JSON; the exit status."""
    for claim in claims:
        say(f"    {claim}")
    found = [{"claim": c.text, "measured": c.measured, "bound": c.bound, "holds": c.holds} for c in claims]
    say(json.dumps({"benchmark": Path(sys.argv[0]).stem, "claims": found, **details}))
    return 0 if all(claim.holds for claim in claims) else 1
