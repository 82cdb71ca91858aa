"""Whether a backend really works here, found out by using it: `python -m headrace.pipeline.trial NAME DEVICE LOAD`.

A library may be there and not load, load and not find its GPU, decode nonsense, crash or hang. So the trial is
another process with a deadline, which renders a small picture by the backend and compares it with what Pillow makes
of it. Nothing of it stays behind: no CUDA in the process that asks, no memory on the GPU. Page-locking, which a worker
of a GPU does beside, is tried in the same way, under the name "page-locking".
"""

from __future__ import annotations

import ctypes
import io
import json
import mmap
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from headrace.pipeline import cuda, gpus
from headrace.pipeline.backend import BACKENDS, Backend, BackendFailed, Options, make
from headrace.pipeline.probe import probe
from headrace.pipeline.spec import Decode
from headrace.pipeline.transforms import CenterCrop, Resize, plan

#: Seconds for a trial: importing DALI takes one, from a cold disk many, and the start of CUDA several. Less than a
#: Loader waits for its private daemon, and than that one's lock is waited for.
TIMEOUT = 25.0
_SIZE = 32  # of the picture that comes out, which goes in larger
#: How far levels may be from Pillow's, on average: decoders and filters of a GPU round differently. A picture that was
#: not decoded, or not resized, is dozens away.
_TOLERANCE = 3.0
_DEFAULTS = Options()
#: The name by which page-locking is tried, and bytes for it.
PAGE_LOCKING = "page-locking"
_LOCKED = 8 << 20


@dataclass(frozen=True, slots=True)
class Trial:
    """
    Attributes:
        render_id: of the backend that works.
        trouble: why it does not, or "".
    """

    render_id: str = ""
    trouble: str = ""


class Running:
    """A trial that goes on.

    Args:
        name: of the backend.
        options: it gets.
        timeout: seconds until it counts as hung.
    """

    def __init__(self, name: str, options: Options = _DEFAULTS, *, timeout: float = TIMEOUT) -> None:
        self._timeout = timeout
        arguments = [name, str(options.device), str(options.hw_decoder_load), str(timeout)]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "headrace.pipeline.trial", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def result(self) -> Trial:
        """Wait for it; at most its deadline and a few seconds."""
        try:
            out, err = self._process.communicate(timeout=self._timeout + 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # what waits in a driver cannot be killed, and is left alone
                self._process.communicate(timeout=5)
            return Trial(trouble=self._too_long())
        code = self._process.returncode
        if code == 0:
            with suppress(ValueError, TypeError):
                return Trial(**json.loads(out.splitlines()[-1]))
        if code == -signal.SIGALRM:
            return Trial(trouble=self._too_long())
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        said = err.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(said) if line.strip()), "nothing")
        return Trial(trouble=f"a trial of it {how}; its last words: {last}")

    def _too_long(self) -> str:
        return f"a trial of it did not end within {self._timeout:g} seconds"


def run(name: str, options: Options = _DEFAULTS, *, timeout: float = TIMEOUT) -> Trial:
    """Try a backend."""
    return Running(name, options, timeout=timeout).result()


def render(name: str, options: Options) -> Trial:
    """The trial itself, in this process."""
    if name not in BACKENDS:
        return Trial(trouble="this version of Headrace does not have it")
    try:
        with closing(make(name, options)) as backend, closing(make("pillow")) as pillow:
            off = float(np.abs(_rendered(backend) - _rendered(pillow)).mean())
            if off > _TOLERANCE:
                return Trial(trouble=f"it renders nonsense, on average {off:.0f} levels away from Pillow's picture")
            return Trial(backend.render_id)
    except BackendFailed as error:
        return Trial(trouble=str(error))


def lock(device: int, load: Callable[[str], Any] = ctypes.CDLL) -> Trial:
    """Page-lock some memory for a GPU, in this process.

    Args:
        load: as of `headrace.pipeline.cuda.Device`.
    """
    with mmap.mmap(-1, _LOCKED) as memory:
        start = ctypes.c_char.from_buffer(memory)
        try:
            with closing(cuda.Device(device, load)) as gpu:
                gpu.lock(ctypes.addressof(start), _LOCKED)
        except cuda.CudaError as error:
            return Trial(trouble=str(error))
        finally:
            del start  # or the mapping could not be closed
    return Trial()


def _rendered(backend: Backend) -> NDArray[np.int16]:
    """What a backend makes of a colour gradient in a JPEG."""
    y, x = np.mgrid[0:80, 0:96].astype(np.uint8)
    data = io.BytesIO()
    Image.fromarray(np.stack([2 * x, 3 * y, 255 - x - y], -1)).save(data, "JPEG", quality=90, subsampling=0)
    picture = probe(data.getvalue(), Decode())
    height, width = np.array([picture.height], np.int64), np.array([picture.width], np.int64)
    params = plan((Resize(size=_SIZE), CenterCrop(size=_SIZE)), 0, 0, 0, height, width)
    out = np.zeros((_SIZE, _SIZE, 3), np.uint8)
    (verdict,) = backend.render([picture], params, [out], lambda begun: None)
    if verdict is not None:
        raise BackendFailed(f"it refuses a good picture: {verdict.reason}")
    return out.astype(np.int16)


def main(argv: list[str]) -> int:
    name, device, load, timeout = argv[1:]
    signal.alarm(max(1, int(float(timeout))))  # whatever it waits for, and whoever has forgotten it
    gpus.count_by_bus()
    options = Options(device=int(device), hw_decoder_load=float(load))
    done = lock(options.device) if name == PAGE_LOCKING else render(name, options)
    print(json.dumps(asdict(done)))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
