"""A backend whose pictures are no pictures: a cheap pure function of the encoded bytes and the parameters.

For tests of everything above the seam, and for measuring what is left of a throughput when rendering costs nothing.
Bytes after the end of a picture make it behave badly, so that faults can be placed in a data set of real files.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from headrace.pipeline.colour import Step
from headrace.pipeline.probe import BadPicture, Picture
from headrace.pipeline.transforms import Params
from headrace.stages import Lap, unmeasured

REJECT = b"#fake: reject"  # a bad picture
CRASH = b"#fake: crash"  # kills the process that renders it
HANG = b"#fake: hang"  # never comes back


class FakeBackend:
    """See the module."""

    render_id = "fake/1"

    def render(
        self,
        pictures: Sequence[Picture],
        params: Params,
        out: Sequence[NDArray[np.uint8]],
        begin: Callable[[Sequence[int]], None],
        lap: Lap = unmeasured,
    ) -> list[BadPicture | None]:
        verdicts: list[BadPicture | None] = []
        for i, (picture, target) in enumerate(zip(pictures, out, strict=True)):
            begin([i])
            verdict = _behave(picture.data)
            if verdict is None:
                where = params.box[i].tobytes() + bytes([int(params.mirror_x[i]), int(params.mirror_y[i])])
                what = b"".join(_numbers(step, i) for step in params.colour)
                digest = blake2b(picture.data + where + what, digest_size=48).digest()
                # One colour per row, so that a row out of place shows.
                colours = np.frombuffer(digest, np.uint8).reshape(16, 3)
                target[...] = np.resize(colours, (len(target), 3))[:, None, :]
            else:
                target[...] = 0
            verdicts.append(verdict)
            lap("render", nbytes=target.nbytes)
        return verdicts

    def close(self) -> None:
        pass


def _numbers(step: Step, i: int) -> bytes:
    values = (getattr(step, field.name) for field in fields(step))
    return b"".join(value[i].tobytes() for value in values if isinstance(value, np.ndarray))


def _behave(data: bytes) -> BadPicture | None:
    if data.endswith(CRASH):
        os.kill(os.getpid(), signal.SIGKILL)
    while data.endswith(HANG):
        time.sleep(60)
    return BadPicture("decode", "the file asks for it") if data.endswith(REJECT) else None
