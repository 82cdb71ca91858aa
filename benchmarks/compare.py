"""Headrace and its peers, side by side: `make bench`. Writes RESULTS.md and results.svg.

    python benchmarks/compare.py [--only SECTION...] [--peers all] [--rounds 11] [--quick] [--data DIR] [--out FOLDER]
                                 [--workers 2] [--batch-size 64] [--sides SIDE...]

one       one trainer, ImageNet-like photos: torch's DataLoader, bare DALI, tf.data and its service, each backend and
          transport
large     one trainer, large photos
trainers  two and four trainers: what they get together
wire      rows over tcp, against a bare pyzmq program that sends as many bytes
gpu       one GPU's worker against a bare DALI pipeline there; nothing where there is none
peers     with `--peers all`: TensorSocket with two trainers and FFCV

Claims, on 2 cores: with ImageNet-like photos and float32 the daemon with `dali-cpu` has 0.95 of bare DALI, 1.4 of the
DataLoader and 2 times tf.data's service; with large ones 0.95 of bare DALI and 1.35 of the DataLoader. Four trainers
together get 2.5 times what one of float32 gets if they take float32, and 3.5 times it as uint8, two get 2 times
TensorSocket's two; no chunk is rendered twice and the daemon itself takes under 3 % of its workers' CPU time; over tcp
it moves 0.9 of what a bare program moves.

It runs in a virtual environment of its own, build/peers, where its peers are. Each section leaves what it found in
build/bench, and the page is of all sections that are there from the same machine, so that they can be run one by one;
with `--out` only of what was run. `--quick`: two rounds of few photos, which show that it works and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import common
import peers
import results
import tcp
import together
from together import Side

from headrace.pipeline import gpus
from headrace.workers.cpus import usable_cpus

HERE = Path(__file__).resolve().parent
KEPT = HERE.parent / "build" / "bench"

DALI, PILLOW = Side(), Side(backend="pillow")
#: Photos of a set, pictures that each trainer takes in the measured time.
SETS = {"imagenet-like": (1024, 1536), "large": (256, 1280)}
QUICK = (128, 128)
#: How often a peer may be tried in a round.
_TRIES = 3


@dataclass(frozen=True)
class Plan:
    """
    Attributes:
        sides: the first is what the others are held against.
        wanted: pictures that each trainer takes in the measured time; None: as `SETS` says.
        claims: a text, our side, theirs and the least ratio.
    """

    title: str
    text: str
    sides: tuple[Side, ...]
    claims: tuple[tuple[str, Side, Side, float], ...] = ()
    photos: str = "imagenet-like"
    wanted: int | None = None


ONE = Side("DataLoader")
PLANS: Mapping[str, Plan] = {
    "one": Plan(
        "One trainer, ImageNet-like photos",
        "Two workers, processes or threads on each side, as `--workers` says.",
        (
            ONE,
            Side("bare DALI"),
            Side("tf.data"),
            Side("tf.data service"),
            DALI,
            PILLOW,
            replace(DALI, transport="tcp"),
            replace(PILLOW, transport="tcp"),
        ),
        (
            ("over bare DALI", DALI, Side("bare DALI"), 0.95),
            ("over the DataLoader", DALI, ONE, 1.4),
            ("over tf.data service", DALI, Side("tf.data service"), 2.0),
        ),
    ),
    "large": Plan(
        "One trainer, large photos",
        "Mostly decoding, which is much the same on all sides.",
        (ONE, Side("bare DALI"), Side("tf.data"), DALI, PILLOW),
        (("over bare DALI", DALI, Side("bare DALI"), 0.95), ("over the DataLoader", DALI, ONE, 1.35)),
        photos="large",
    ),
    "trainers": Plan(
        "Two and four trainers",
        "What they get together. Who has a server has one for all of them; who has none has one pipeline each, the "
        "workers divided among them, at least one each.",
        (
            DALI,
            replace(DALI, trainers=2),
            replace(DALI, trainers=4),
            replace(DALI, trainers=4, dtype="uint8"),
            Side("DataLoader", 2),
            Side("DataLoader", 4),
            Side("bare DALI", 4),
            Side("tf.data service", 4),
        ),
        (
            ("four trainers of float32 over one", replace(DALI, trainers=4), DALI, 2.5),
            ("four trainers of uint8 over one of float32", replace(DALI, trainers=4, dtype="uint8"), DALI, 3.5),
        ),
        wanted=1024,
    ),
    "wire": Plan(
        "Rows over tcp on loopback",
        "Chunks of 32 pictures of 224x224 out of the daemon's memory, against a bare pyzmq program that sends the same "
        "frames; [tcp.py](tcp.py).",
        (),
    ),
    "gpu": Plan(
        "One GPU",
        "A daemon with the GPU's worker that hands out levels through slots on the host, against a bare DALI pipeline "
        "on the same GPU; [gpu_train.py](gpu_train.py).",
        (),
        photos="large",
    ),
    "peers": Plan(
        "TensorSocket and FFCV",
        "TensorSocket's trainers are held against as many of ours, on one stream; FFCV has one.",
        (
            replace(DALI, trainers=2),
            Side("TensorSocket", 2),
            DALI,
            Side("FFCV, JPEG"),
            Side("FFCV, raw"),
        ),
        (("two trainers over TensorSocket's two", replace(DALI, trainers=2), Side("TensorSocket", 2), 2.0),),
        wanted=1024,
    ),
}
#: Sides of the programs tcp.py and gpu_train.py, and how they are called here.
WIRE = {"bare": "bare pyzmq", "1 connection": "headrace tcp"}
GPU = {"bare DALI": "bare DALI, GPU", "delivery": "headrace dali-gpu shm uint8"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PLANS, metavar="SECTION", help=", ".join(PLANS))
    parser.add_argument("--peers", choices=("usual", "all"), default="usual")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--data", type=Path, help="class folders of photos that the sets are made from")
    parser.add_argument("--out", type=Path, help="folder for the page; by default this one")
    parser.add_argument("--workers", type=int, default=usable_cpus(), help="processes or threads of each side")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--sides", nargs="+", help="only these, by the labels of the table")
    # What parts of one side are told.
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--trainer", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--beton", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        side, setting = together.heard(*args.measure[:2])
        warm, wanted = map(int, args.measure[2:])
        print(json.dumps(together.measured(side, setting, warm=warm, wanted=wanted)))
    elif args.trainer is not None:
        together.train(*together.heard(*args.trainer))
    elif args.serve is not None:
        together.serve(*together.heard(*args.serve))
    elif args.beton is not None:
        for raw in (False, True):
            peers.write_beton(args.beton[0], args.beton[1] / f"{'raw' if raw else 'jpeg'}.beton", raw=raw)
        print("{}")
    else:
        return compared(args)
    return 0


def compared(args: argparse.Namespace) -> int:
    if args.quick:
        args.rounds = min(args.rounds, 2)
        args.out = args.out or KEPT / "quick"
    names = args.only or [name for name in PLANS if name != "peers" or args.peers == "all"]
    kept = KEPT if args.out is None else args.out / "sections"
    claims: list[common.Claim] = []
    for name in names:
        began = time.monotonic()
        common.say(f"-- {PLANS[name].title}")
        run = {"wire": wire, "gpu": gpu}.get(name) or partial(section, name=name)
        photos, rounds = run(args)
        if not rounds:
            common.say("nothing of it is to be measured here")
            continue
        common.speeds(rounds)
        found = held(name, rounds)
        for claim in found:
            common.say(f"    {claim}")
        common.say(f"    {time.monotonic() - began:.0f} s")
        claims += found
        made(args, name, photos, rounds, found).save(kept)
    sections = [one for name in PLANS if (one := results.Section.load(kept, name)) is not None]
    out = HERE if args.out is None else args.out
    page = results.write([one for one in sections if one.machine == results.machine()], out)
    common.say(f"{page.name} is of the sections {', '.join(one.name for one in sections)}")
    return 0 if args.quick or all(claim.holds for claim in claims) else 1


def section(args: argparse.Namespace, name: str) -> tuple[str, common.Rounds]:
    plan = PLANS[name]
    sides = {side.label: side for side in plan.sides if args.sides is None or side.label in args.sides}
    if not sides:
        return "", {}
    count, wanted = QUICK if args.quick else SETS[plan.photos]
    wanted = min(wanted, plan.wanted or wanted)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as home:
        folder, prepared = Path(home, "photos"), Path(home, "prepared")
        folder.mkdir()
        prepared.mkdir()
        common.make_photos(plan.photos, common.sources(args.data), folder, count)
        photos = common.described(folder)
        common.say(photos)
        if any(side.maker.startswith("FFCV") for side in sides.values()):
            common.fresh(__file__, "--beton", folder, prepared)
        batch_size = count // 16 if args.quick else args.batch_size
        setting = peers.Setting(folder, batch_size, args.workers, prepared=prepared)

        def run(label: str) -> dict[str, Any]:
            share = sides[label].trainers if sides[label].apart else 1  # each with work of its own: as much in all
            told = together.told(sides[label], setting)
            for failed in range(_TRIES):
                try:
                    found = common.fresh(__file__, "--measure", *told, count // share, wanted // share)
                    return found | {"failed": failed}
                except SystemExit as failure:  # of a peer that hangs now and then
                    if sides[label].maker == "headrace" or failed + 1 == _TRIES:
                        raise
                    common.say(f"{label} failed and is tried again: {failure}")
            raise AssertionError

        return photos, common.interleaved(list(sides), args.rounds, run)


def wire(args: argparse.Namespace) -> tuple[str, common.Rounds]:
    if args.sides is not None:
        return "", {}
    chunks = 64 if args.quick else 3000
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as home:
        options = ("--folder", tcp.pictures(Path(home)), "--chunks", chunks, "--window", 8)
        rounds = common.interleaved(
            list(WIRE), args.rounds, lambda name: common.fresh(tcp.__file__, "--side", name, *options)
        )
    return "", {WIRE[name]: found for name, found in rounds.items()}


def gpu(args: argparse.Namespace) -> tuple[str, common.Rounds]:
    """Where there is an NVIDIA GPU. It has not run on one yet."""
    if args.sides is not None or not gpus.look().found:
        return "", {}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as home:
        folder = Path(home, "photos")
        folder.mkdir()
        common.make_photos(PLANS["gpu"].photos, common.sources(args.data), folder, 1024)
        options = ("--folder", folder, "--steps", 4 if args.quick else 60, "--workers", args.workers)
        program = HERE / "gpu_train.py"
        rounds = common.interleaved(
            list(GPU), args.rounds, lambda name: common.fresh(str(program), "--side", name, *options)
        )
        return common.described(folder), {GPU[name]: found for name, found in rounds.items()}


def held(name: str, rounds: common.Rounds) -> list[common.Claim]:
    """The claims of a section whose sides were measured."""
    if name == "wire":
        return [common.Claim("over the bare program", common.paired(rounds, WIRE["1 connection"], WIRE["bare"]), 0.9)]
    if name == "gpu":
        return [common.Claim("over bare DALI", common.paired(rounds, GPU["delivery"], GPU["bare DALI"]), 0.9)]
    claims = [
        common.Claim(text, common.paired(rounds, ours.label, theirs.label), least)
        for text, ours, theirs, least in PLANS[name].claims
        if ours.label in rounds and theirs.label in rounds
    ]
    if name == "trainers":
        for label, found in rounds.items():
            if label.startswith("headrace"):
                again = common.median(found, "recomputed")
                claims.append(common.Claim(f"chunks rendered again, {label}", again, 0, most=True))
                share = common.median(found, "cpu_daemon") / common.median(found, "cpu_workers")
                claims.append(common.Claim(f"the daemon's CPU time over its workers', {label}", share, 0.03, most=True))
    return claims


def made(
    args: argparse.Namespace, name: str, photos: str, rounds: common.Rounds, claims: Sequence[common.Claim]
) -> results.Section:
    plan = PLANS[name]
    command = ["python", "benchmarks/compare.py", "--only", name, "--rounds", str(args.rounds)]
    command += ["--quick"] if args.quick else []
    command += ["--data", "DIR"] if args.data is not None else []
    command += ["--workers", str(args.workers), "--batch-size", str(args.batch_size)]
    command += ["--sides", *args.sides] if args.sides is not None else []
    return results.Section(
        name=name,
        title=plan.title,
        text=plan.text,
        photos=photos,
        command=shlex.join(command),
        day=time.strftime("%Y-%m-%d"),
        machine=results.machine(),
        versions=", ".join(versions()),
        rounds=rounds,
        claims=[asdict(claim) | {"claim": claim.text, "holds": claim.holds} for claim in claims],
    )


def versions() -> Iterator[str]:
    yield f"Python {sys.version.split()[0]}"
    for name in ("headrace", "torch", "torchvision", "pillow", "nvidia-dali-cuda130", "tensorflow-cpu", "tensorsocket",
                 "ffcv", "pyzmq"):  # fmt: skip
        with contextlib.suppress(PackageNotFoundError):
            yield f"{name} {version(name)}"


if __name__ == "__main__":
    sys.exit(main())
