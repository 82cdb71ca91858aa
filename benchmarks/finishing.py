"""What finishing costs: milliseconds of one thread per picture of 224 by 224, alone and beside a busy main thread.

Each side finishes chunks of 32 pictures in a thread that is not the main one, first while the main thread sleeps, then
while it runs pure Python, which is the worst that a trainer can do to it. `obvious` is
`x.permute(0, 3, 1, 2).float().sub(mean).div(std)` in torch with one thread, which makes new memory for each step.

    python benchmarks/finishing.py [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from common import MEAN, SIZE, STD, Claim, conclude, fresh, quartiles, say

from headrace.finish import Finisher
from headrace.output import DType, Layout, Output

CHUNK = 32
SIDES = ("obvious", "float32 NCHW", "float32 NHWC", "float16 NCHW", "bfloat16 NHWC", "uint8 NCHW", "uint8 NHWC")

#: Chunks of which a measurement is the median, after a few to warm up.
_CHUNKS, _WARM = 25, 3


def finishing(side: str) -> Callable[[], object]:
    """Finishes one chunk."""
    levels = np.random.default_rng(0).integers(0, 256, (CHUNK, SIZE, SIZE, 3), np.uint8)
    if side == "obvious":
        import torch

        torch.set_num_threads(1)
        x = torch.from_numpy(levels)
        mean, std = (torch.tensor(values).view(1, 3, 1, 1) * 255 for values in (MEAN, STD))
        return lambda: x.permute(0, 3, 1, 2).float().sub(mean).div(std)
    dtype, layout = side.split()
    look: dict[str, Any] = {} if dtype == "uint8" else {"mean": MEAN, "std": STD}
    finisher = Finisher(Output(cast(DType, dtype), cast(Layout, layout), **look), SIZE, SIZE)
    out = finisher.rows(np.zeros(CHUNK * finisher.row_bytes, np.uint8), CHUNK)
    return lambda: finisher.finish(levels, out)


def milliseconds(finish: Callable[[], object], busy: bool) -> float:
    """Of one chunk, the median."""
    times: list[float] = []

    def work() -> None:
        for _ in range(_WARM + _CHUNKS):
            before = time.perf_counter()
            finish()
            times.append(1000 * (time.perf_counter() - before))

    thread = threading.Thread(target=work)
    thread.start()
    while busy and thread.is_alive():
        sum(i * i for i in range(1000))
    thread.join()
    return statistics.median(times[_WARM:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        finish = finishing(args.side)
        print(json.dumps({"alone": milliseconds(finish, busy=False), "beside": milliseconds(finish, busy=True)}))
        return 0
    rounds: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for r in range(args.rounds):
        first = r % len(SIDES)
        for side in (*SIDES[first:], *SIDES[:first]):
            rounds[side].append(fresh(__file__, "--side", side))
    for side in SIDES:
        for how, unit, scale in (("alone", "ms per picture", CHUNK), ("beside", "ms per chunk", 1)):
            low, middle, high = quartiles([r[how] / scale for r in rounds[side]])
            what = "alone" if how == "alone" else "beside a busy main thread"
            say(f"    {side:14} {what:26} {middle:8.3f} {unit} ({low:.3f} to {high:.3f})")

    def ratio(side: str) -> float:
        pairs = zip(rounds["obvious"], rounds[side], strict=True)
        return statistics.median(float(obvious["alone"] / ours["alone"]) for obvious, ours in pairs)

    beside = statistics.median(r["beside"] for r in rounds["float32 NCHW"])
    return conclude(
        [
            Claim("obvious over float32 NCHW, alone", ratio("float32 NCHW"), 1.5),
            Claim("obvious over float32 NHWC, alone", ratio("float32 NHWC"), 2.0),
            Claim("ms per chunk of float32 NCHW beside a busy main thread", beside, 40.0, most=True),
        ],
        rounds=rounds,
    )


if __name__ == "__main__":
    sys.exit(main())
