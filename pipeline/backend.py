"""The seam between parameters and pixels: what a backend is, and which there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.stages import Lap, unmeasured

if TYPE_CHECKING:  # who only asks for a name need not know pictures
    from headrace.pipeline.probe import BadPicture, Picture
    from headrace.pipeline.transforms import Params


class BackendFailed(Exception):
    """The backend itself does not work here or works no more: no driver, no memory, a broken library. It says nothing
    about the pictures, which another backend may render.
    """


@dataclass(frozen=True, slots=True)
class Options:
    """What a backend may be told beside what to render.

    Attributes:
        device: number of the GPU, of a backend that uses one.
        threads: that decode at once.
        hw_decoder_load: share of a batch that the GPU's JPEG engine takes, 0 to 1. Strictly between, which pictures it
            takes depends on their batch, and so does how they look.
        batch: pictures that are worked on at once, at most, by a backend that does that.
        batch_pixels: of these, decoded as a whole, if they are several.
        gpu_parts: whether a GPU decodes just the part that is seen, as a CPU does. For measurements alone: nothing says
            that it gives the pixels of the whole, and nvImageCodec 0.9 crashed on some GPUs (its issue 55).
    """

    device: int = 0
    threads: int = 1
    hw_decoder_load: float = 0.0
    batch: int = 8
    batch_pixels: int = 1 << 24
    gpu_parts: bool = False


class Backend(Protocol):
    """Turns encoded pictures and their parameters into pixels. It draws no random numbers and keeps nothing: the
    same picture and parameters give the same bytes, whatever was rendered before, as long as `render_id` is the same.
    """

    @property
    def render_id(self) -> str:
        """Everything that the bytes depend on beside the arguments: backend, device class, versions of libraries."""

    def render(
        self,
        pictures: Sequence[Picture],
        params: Params,
        out: Sequence[NDArray[np.uint8]],
        begin: Callable[[Sequence[int]], None],
        lap: Lap = unmeasured,
    ) -> list[BadPicture | None]:
        """Render `pictures[i]` by row `i` of `params` into `out[i]`.

        Args:
            pictures: their images are taken; each can be rendered once. Their `whole` may be set.
            params: one row per picture.
            out: uint8 (height, width, 3) each, RGB; whatever stood there is overwritten, of a bad picture with black.
            begin: called with the pictures that are worked on from now on, those of the call before not any more, so
                that whoever finds the process dead knows whom to suspect.
            lap: called at the end of each stage with its name, for how many pictures that was, and how many bytes came
                of it: `decode`, `resize`, `colour`, `write`, or `render` for several of them in one.

        Returns:
            A verdict (stage "decode") per picture, None for a good one. A bad picture never raises.

        Raises:
            BackendFailed: nothing is said about the pictures, and anything may stand in `out`.
        """

    def close(self) -> None:
        """Give everything back. May be called twice."""


def _pillow(options: Options) -> Backend:
    from headrace.pipeline.pillow import PillowBackend

    return PillowBackend()


def _dali(options: Options, gpu: bool) -> Backend:
    try:
        from headrace.pipeline.dali import DaliBackend
    except Exception as error:  # it loads a dozen libraries, and whatever they raise: DALI does not work here
        raise BackendFailed(
            f"DALI cannot be imported ({type(error).__name__}: {error}). It comes with the extra headrace[dali], and "
            "for CUDA 12 with headrace[dali-cuda12]"
        ) from error
    return DaliBackend(options, gpu=gpu)


def _dali_cpu(options: Options) -> Backend:
    return _dali(options, gpu=False)


def _dali_gpu(options: Options) -> Backend:
    return _dali(options, gpu=True)


def _fake(options: Options) -> Backend:
    from headrace.pipeline.fake import FakeBackend

    return FakeBackend()


#: Every backend by the name that a configuration uses; a library is imported when its backend is made.
BACKENDS: dict[str, Callable[[Options], Backend]] = {
    "pillow": _pillow,
    "dali-cpu": _dali_cpu,
    "dali-gpu": _dali_gpu,
    "fake": _fake,
}


def make(name: str, options: Options = Options()) -> Backend:
    """A new backend. What "auto" is, says `headrace.pipeline.machine`.

    Raises:
        ValueError: there is no such backend; names those there are.
        BackendFailed: it does not work here.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend: {name!r} is not one of {', '.join(BACKENDS)}")
    return BACKENDS[name](options)
