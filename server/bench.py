"""How fast a daemon delivers to a client that does nothing with the batches."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from headrace.loader import Loader


@dataclass(frozen=True, slots=True)
class Result:
    """
    Attributes:
        wait_share: time inside `next()` over all time.
        p50_ms, p99_ms: of one `next()`.
    """

    images_per_s: float
    wait_share: float
    p50_ms: float
    p99_ms: float
    transport: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def sentences(self) -> list[str]:
        return [
            f"{self.images_per_s:.0f} images/s over {self.transport}",
            f"waited {self.wait_share:.0%} of the time; next() took {self.p50_ms:.1f} ms (median), "
            f"{self.p99_ms:.1f} ms (99 %)",
        ]


def bench(
    address: str,
    *,
    stream: str | None,
    batch_size: int,
    steps: int,
    transport: str,
    curve: Mapping[str, Any] | None = None,
) -> Result:
    """Take `steps` batches, in as many epochs as it needs; the first batch is warm-up.

    Raises:
        HeadraceError: as the Loader's.
    """
    waits: list[float] = []
    images = 0
    with Loader(address, stream=stream, batch_size=batch_size, rank=0, world_size=1, transport=transport,
                curve=curve, output="numpy") as loader:  # fmt: skip
        batches = iter(loader)
        next(batches)
        begin = time.perf_counter()
        while len(waits) < steps:
            before = time.perf_counter()
            batch = next(batches, None)
            waits.append(time.perf_counter() - before)
            if batch is None:
                waits.pop()
                batches = iter(loader)
                continue
            images += len(batch.indices)
        total = time.perf_counter() - begin
        used = loader.stats()["transport"]
    p50, p99 = np.percentile(waits, [50, 99]) * 1000
    return Result(images / total, sum(waits) / total, float(p50), float(p99), str(used))
