"""A CPU worker with a backend that breaks on demand: `python -m brittle FD PID BACKEND [FALLBACK]`, and in any process
whose interpreter starts with a `sitecustomize.py` that calls `break_dali`.

What the backend "brittle" does stands in the file that the variable BRITTLE names, a word: see `ORDERS`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.pipeline import backend as backends
from headrace.pipeline.backend import Backend, BackendFailed, Options
from headrace.pipeline.fake import FakeBackend
from headrace.pipeline.probe import BadPicture, Picture
from headrace.pipeline.transforms import Params
from headrace.stages import Lap, unmeasured
from headrace.workers import renderer, worker

VARIABLE = "BRITTLE"
RENDER_ID = "brittle/1"
ORDERS = (
    "work",
    "absent",  # it cannot be made
    "fail",  # it has no memory left
    "crash",  # whatever it renders
)
POISON = b"#brittle: crash"  # at the end of a picture: kills this backend, and no other


def order() -> str:
    return Path(os.environ[VARIABLE]).read_text()


class Brittle(FakeBackend):
    render_id = RENDER_ID

    def __init__(self, options: Options) -> None:
        if order() == "absent":
            raise BackendFailed("it is not installed")

    def render(
        self,
        pictures: Sequence[Picture],
        params: Params,
        out: Sequence[NDArray[np.uint8]],
        begin: Callable[[Sequence[int]], None],
        lap: Lap = unmeasured,
    ) -> list[BadPicture | None]:
        begin(range(len(pictures)))  # all at once, as DALI does
        if order() == "crash" or any(picture.data.endswith(POISON) for picture in pictures):
            os.kill(os.getpid(), signal.SIGSEGV)
        if order() == "fail":
            out[0][...] = 77
            raise BackendFailed("out of memory")
        return super().render(pictures, params, out, lambda _: None, lap)


def break_dali() -> None:
    """From now on DALI fails once the order says so."""
    make = backends.BACKENDS["dali-cpu"]

    def made(options: Options) -> Backend:
        if order() == "fail":
            raise BackendFailed("still out of memory")
        dali = make(options)
        render = dali.render

        def failing(*args: object) -> list[BadPicture | None]:
            if order() == "fail":
                raise BackendFailed("out of memory")
            return render(*args)  # type: ignore[arg-type]

        dali.render = failing  # type: ignore[method-assign, assignment]
        return dali

    backends.BACKENDS["dali-cpu"] = made


if __name__ == "__main__":
    backends.BACKENDS["brittle"] = Brittle
    renderer._DELAYS = (0.3, 0.3)
    sys.exit(worker.main(sys.argv))
