"""How long a large data set takes to open again, and what its index costs each process.

Claim: 1,300,000 files in 1,000 folders re-open in under a second, and the index costs a process no private memory.

    python benchmarks/index_reopen.py [--entries 1300000] [--folders 1000] [--rounds 5] [--dir DIR]

The files are hard links of one small file per folder, so the tree costs folder entries only. Every opening runs in a
fresh process: `build` walks and writes, `reopen` checks the folders' mtimes and maps, `worker` maps a descriptor
that it was given and reads paths and labels at random, while the parent has the same index mapped, as a daemon has.
`own` is the process's USS after that, less its USS before (smaps_rollup: Private_Clean + Private_Dirty).

2 cores, local disk, warm cache, Python 3.11:

    build                  1300000 files  median 12.465 s  (12.465 to 12.465, n=1)  own +187.3 MiB
    reopen                 1300000 files  median 0.102 s  (0.089 to 0.110, n=5)  own +1.8 MiB
    the index has 78 MiB
    worker, 100000 reads   1300000 files  median 0.279 s  (0.276 to 0.414, n=5)  own +0.1 MiB
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from headrace.pipeline.dataset import open_index
from headrace.pipeline.index import Index
from headrace.pipeline.spec import Dataset

READS = 100_000


def uss() -> int:
    """Private memory of this process, in bytes."""
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith(("Private_Clean", "Private_Dirty")))


def fabricate(root: Path, entries: int, folders: int) -> None:
    for f in range(folders):
        folder = root / f"n{f:08d}"
        folder.mkdir(parents=True)
        first = folder / "picture_00000000.JPEG"
        first.write_bytes(b"\xff\xd8")
        for i in range(1, entries // folders + (f < entries % folders)):
            os.link(first, folder / f"picture_{i:08d}.JPEG")


def opened(root: Path, cache: Path) -> dict[str, float]:
    before, begin = uss(), time.perf_counter()
    index = open_index(Dataset(folder=root), cache)
    seconds = time.perf_counter() - begin
    result = {"seconds": seconds, "own_mib": (uss() - before) / 2**20, "samples": len(index)}
    index.close()
    return result


def worked(fd: int) -> dict[str, float]:
    before, begin = uss(), time.perf_counter()
    index = Index.map(fd)
    draw = random.Random(0)
    for _ in range(READS):
        i = draw.randrange(len(index))
        assert index.path(i) and index.labels[i] >= 0
    seconds = time.perf_counter() - begin
    result = {"seconds": seconds, "own_mib": (uss() - before) / 2**20, "samples": len(index)}
    index.close()
    return result


def in_fresh_process(*args: str, fds: tuple[int, ...] = ()) -> dict[str, float]:
    done = subprocess.run([sys.executable, __file__, *args], stdout=subprocess.PIPE, check=True, pass_fds=fds)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=1_300_000)
    parser.add_argument("--folders", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", help="where the tree is made and removed again; default: the temporary directory")
    parser.add_argument("--open", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.open:
        print(json.dumps(opened(*map(Path, args.open))))
    elif args.work is not None:
        print(json.dumps(worked(args.work)))
    else:
        with tempfile.TemporaryDirectory(dir=args.dir) as folder:
            measure(Path(folder), args)


def measure(folder: Path, args: argparse.Namespace) -> None:
    root, cache = folder / "data", folder / "cache"
    fabricate(root, args.entries, args.folders)
    time.sleep(0.5)  # so that no folder counts as one that may still be changing
    show("build", [in_fresh_process("--open", str(root), str(cache))])
    show("reopen", [in_fresh_process("--open", str(root), str(cache)) for _ in range(args.rounds)])
    index = open_index(Dataset(folder=root), cache)
    assert index.sizes.sum() and index.labels.sum() and index.file is not None
    print(f"  the index has {index.file.stat().st_size / 2**20:.0f} MiB")
    touched = [index.path(i) for i in range(len(index))]  # the daemon's pages are there, so they are shared
    del touched
    show(
        f"worker, {READS} reads",
        [in_fresh_process("--work", str(index.fd), fds=(index.fd,)) for _ in range(args.rounds)],
    )
    index.close()


def show(name: str, rounds: list[dict[str, float]]) -> None:
    seconds = [r["seconds"] for r in rounds]
    print(
        f"  {name:22} {rounds[0]['samples']:.0f} files  median {statistics.median(seconds):.3f} s"
        f"  ({min(seconds):.3f} to {max(seconds):.3f}, n={len(rounds)})"
        f"  own {statistics.median(r['own_mib'] for r in rounds):+.1f} MiB",
        flush=True,
    )


if __name__ == "__main__":
    main()
