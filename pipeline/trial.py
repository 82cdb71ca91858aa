"""Whether a backend really works here, found out by using it: `python -m headrace.pipeline.trial`.

A library may be there and not load, load and not find its GPU, decode nonsense, crash or hang. So the trial is
another process with a deadline, which renders a small picture by the backend and compares it with what Pillow makes
of it. Nothing of it stays behind: no CUDA in the process that asks, no memory on the GPU. Page-locking, which a worker
of a GPU does beside, is tried in the same way, under the name "page-locking".
"""

from __future__ import annotations

import ctypes
import io
import mmap
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, NoReturn
from uuid import UUID

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from headrace.pipeline import cuda, gpus, isolated
from headrace.pipeline.backend import BACKENDS, Backend, BackendFailed, Options, make
from headrace.pipeline.gpus import Gpu
from headrace.pipeline.isolated import Isolated
from headrace.pipeline.probe import probe
from headrace.pipeline.spec import Decode
from headrace.pipeline.transforms import CenterCrop, Resize, plan

#: Seconds for a trial: importing DALI takes one, from a cold disk many, and the start of CUDA several. Together with
#: those that `gpus.look` may take less than a Loader waits for its private daemon, or for that one's lock.
TIMEOUT = 25.0
_SIZE = 32  # of the picture that comes out, which goes in larger
#: How far levels may be from Pillow's, on average: decoders and filters of a GPU round differently. A picture that was
#: not decoded, or not resized, is dozens away.
_TOLERANCE = 3.0
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


def run(
    name: str, devices: Sequence[Gpu] = (), *, hw_decoder_load: float = 0.0, timeout: float = TIMEOUT
) -> list[Trial]:
    """Try a backend, on all of these GPUs at once.

    Args:
        name: of the backend.
        devices: a trial for each; without any there is one, of what needs no GPU.
        hw_decoder_load: as in `Options`.
        timeout: seconds until a trial counts as hung.
    """
    places = [(str(gpu.number), gpu.uuid) for gpu in devices] or [("0", "")]
    with ExitStack() as stack:
        running = [
            stack.enter_context(
                closing(Isolated(__name__, [name, number, uuid, str(hw_decoder_load)], Trial, timeout=timeout))
            )
            for number, uuid in places
        ]
        return [_result(each) for each in running]


def _result(running: Isolated[Trial]) -> Trial:
    try:
        return running.result()
    except isolated.Failed as failed:
        return Trial(trouble=f"a trial of it {failed}")


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


def confused(device: int, uuid: str, load: Callable[[str], Any] = ctypes.CDLL) -> str:
    """That CUDA's GPU of this number is not the one that NVML has told about, or "". Numbers may differ where a GPU is
    parted (MIG) or has failed; then it might be one that others use.

    Args:
        uuid: what NVML says.
        load: as of `headrace.pipeline.cuda.Device`.
    """
    try:
        told = UUID(uuid.removeprefix("GPU-").removeprefix("MIG-"))
    except ValueError:  # it has not said, or in a form of long ago
        return ""
    try:
        with closing(cuda.Device(device, load)) as gpu:
            seen = gpu.uuid
    except cuda.CudaError as error:
        return f"CUDA: {error}"
    if seen == told:
        return ""
    return (
        f"what CUDA counts as GPU {device} is another one, {seen}, and not {uuid}: set CUDA_VISIBLE_DEVICES to the "
        "UUIDs of those to use, as nvidia-smi -L prints them"
    )


def main(argv: list[str]) -> NoReturn:
    name, number, uuid, load = isolated.attach(argv)
    gpus.count_by_bus()
    options = Options(device=int(number), hw_decoder_load=float(load))
    if trouble := confused(options.device, uuid):
        isolated.answer(Trial(trouble=trouble))
    isolated.answer(lock(options.device) if name == PAGE_LOCKING else render(name, options))


if __name__ == "__main__":
    main(sys.argv)
