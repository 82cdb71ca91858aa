"""The backend on DALI, on a CPU core or on a GPU.

On a GPU all is done there, by the graph of `graph.py`. On a CPU DALI decodes, and of a picture that was found good no
more than the window. Then it is resampled by who is faster at it, which is Pillow but for windows that shrink to a
tenth of their pixels, and coloured by `paint`, as by the Pillow backend.

Which pictures DALI renders is told by their content alone: JPEGs of eight bits, grey or YCbCr, in Huffman coding, whose
markers leave no doubt that all of it is there. All others are Pillow's share, which belongs to this renderer: the
render id names what they depend on too.

A verdict is that of Pillow's whole decode, with the checks of `headrace.pipeline.jpeg`, whoever renders. What DALI
refuses Pillow decodes to say whether it is good. If it is, DALI's pixels stand, or where DALI refuses it also alone,
Pillow's: so who renders a picture depends on nothing but the picture.
`decode.dct_scaling`, which permits to decode less, is made use of in Pillow's share only.
"""

from __future__ import annotations

import ctypes
import gc
import io
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

# DALI reads these as it is loaded. What would be printed for each damaged picture is told as its verdict; and large
# blocks of host memory are not to be kept in a pool, which remembers the largest picture for good.
os.environ.setdefault("DALI_NVIMGCODEC_LOG_LEVEL", "0")
os.environ.setdefault("DALI_MALLOC_POOL_THRESHOLD", "0")

import nvidia.dali as dali

from headrace.pipeline import dali_colour, graph, jpeg
from headrace.pipeline.backend import BackendFailed, Options
from headrace.pipeline.canvas import Canvas, levels
from headrace.pipeline.colour import Step
from headrace.pipeline.cuda import CudaError, Device
from headrace.pipeline.graph import Executor, Form
from headrace.pipeline.paint import paint
from headrace.pipeline.pillow import PillowBackend, decode, show
from headrace.pipeline.probe import BadPicture, Picture
from headrace.pipeline.transforms import Params
from headrace.pipeline.view import View
from headrace.protocol import IMPURE
from headrace.stages import Lap, unmeasured

# All that was imported stays, so it need not be gone through in search of cycles each time a pipeline is let go of:
# of a collection's twenty milliseconds nearly none are left.
gc.freeze()

#: Pipelines that are kept; one takes ten milliseconds to build, and some threads.
_PIPELINES = 8

#: Pixels after which memory that is free goes back to the system, which takes some ten milliseconds. Until then glibc
#: keeps so many bytes of it, for which the kernel would else look for pages and clear them with each picture; blocks
#: from that size on never stay.
_TIDY_PIXELS = 1 << 31
_KEPT_BYTES = 64 << 20
_KEPT_BLOCK = 32 << 20

#: Pixels of the window for one of the result, from which on DALI's bilinear filter is as fast as Pillow's on a CPU or
#: faster: by a little where results are small, where below it takes longer; with the other filters nothing is gained. A
#: window at the picture's own border is Pillow's, which weighs what there is.
_COARSE = 10

_NEARLY = 4  # levels
_PROGRESSIVE = 2  # and before it baseline and extended, both in Huffman coding
_NAMED = re.compile(r"sample #(\d+)")
_OUT_OF_MEMORY = re.compile(r"memory|bad_?alloc|CUDA", re.IGNORECASE)

_STDERR = threading.Lock()

Rows = list[int]


class _Refused(Exception):
    """DALI does not render these pictures."""


class DaliBackend:
    """See the module.

    Args:
        options: of how many threads, and of a GPU which.
        gpu: whether to work on a GPU.
        through: whether DALI does it all, or decodes only; None: where it is faster, which is on a GPU.

    Raises:
        BackendFailed: it does not work here.
    """

    def __init__(self, options: Options, *, gpu: bool = False, through: bool | None = None) -> None:
        self._executor = Executor(
            device=options.device if gpu else None,
            batch=options.batch,
            threads=options.threads,
            hw_decoder_load=options.hw_decoder_load,
        )
        self._cpu = not gpu
        if self._cpu:
            _keep()
        self._through = gpu if through is None else through
        self._parts = not gpu or options.gpu_parts
        self._batch_pixels = options.batch_pixels
        self._gpu = _gpu(options.device) if gpu else None
        self._pillow = PillowBackend()
        self._canvas = Canvas()
        self._pipelines: dict[Form, Any] = {}
        self._untidied = 0
        self.render_id = "/".join(self._identity(options))
        self._check()

    def _identity(self, options: Options) -> Iterator[str]:
        yield "dali-cpu" if self._gpu is None else "dali-gpu"
        yield _versions()
        if self._gpu is not None:
            try:
                yield self._gpu.kind
            except CudaError as error:
                raise BackendFailed(f"CUDA: {error}") from error
            if 0 < options.hw_decoder_load < 1:
                yield f"{IMPURE}{options.hw_decoder_load}"
            elif options.hw_decoder_load:
                yield "jpeg-engine"  # which rounds otherwise than the decoder on the cores
        yield self._pillow.render_id

    def render(
        self,
        pictures: Sequence[Picture],
        params: Params,
        out: Sequence[NDArray[np.uint8]],
        begin: Callable[[Sequence[int]], None],
        lap: Lap = unmeasured,
    ) -> list[BadPicture | None]:
        views = [View.of(picture, params, i) for i, picture in enumerate(pictures)]
        task = _Task(pictures, params, out, begin, lap, [None] * len(pictures), views)
        batches: dict[Form, Rows] = {}
        for i, picture in enumerate(pictures):
            if _for_dali(picture):
                batches.setdefault(self._form(task, i, part=picture.whole), []).append(i)
            else:
                self._by_pillow(task, i)
        for form, rows in batches.items():
            for batch in _cut(rows, [task.pixels(i) for i in rows], self._executor.batch, self._batch_pixels):
                self._batch(task, form, batch)
        return task.verdicts

    def close(self) -> None:
        self._pipelines.clear()
        if self._gpu is not None:
            with suppress(CudaError):
                self._gpu.close()

    def _form(self, task: _Task, i: int, part: bool) -> Form:
        params, view, part = task.params, task.views[i], part and self._parts
        if self._through:
            fill, colour = params.fill if params.framed else None, dali_colour.form(params.colour)
            return Form(part, view.transpose, params.size, params.interpolation, fill, colour)
        if params.interpolation == "bilinear" and math.prod(view.step) >= _COARSE and view.margin >= max(view.step):
            return Form(part, view.transpose, params.size, params.interpolation, None, ())
        return Form(part, False, None, params.interpolation, None, ())

    def _batch(self, task: _Task, form: Form, rows: Rows) -> None:
        """Render, and take apart what DALI refuses."""
        task.begin(rows)
        try:
            self._run(task, form, rows)
        except _Refused as refused:
            culprit = _culprit(rows, str(refused))
            if culprit is None:
                for i in rows:
                    self._batch(task, form, [i])
                return
            if self._by_pillow(task, culprit):
                self._alone(task, culprit)
            if rest := [i for i in rows if i != culprit]:
                self._batch(task, form, rest)

    def _alone(self, task: _Task, i: int) -> None:
        """Have DALI render what Pillow found good, and has rendered; if it refuses, leave it at that."""
        try:
            self._run(task, self._form(task, i, part=False), [i], judged=True)
        except _Refused:
            self._check()

    def _by_pillow(self, task: _Task, i: int) -> bool:
        """Whether the picture is good."""
        [task.verdicts[i]] = self._pillow.render(
            [task.pictures[i]], task.params.take(np.array([i])), [task.out[i]], lambda _: task.begin([i]), task.lap
        )
        return task.verdicts[i] is None

    def _run(self, task: _Task, form: Form, rows: Rows, judged: bool = False) -> None:
        """Fill the rows' pixels; of pictures that were decoded as a whole, say whether they are good.

        Args:
            judged: they are known to be.

        Raises:
            _Refused: nothing was written.
        """
        fed = graph.inputs(form, self._executor, [task.views[i] for i in rows], [task.pictures[i].data for i in rows])
        fed |= dali_colour.inputs(task.steps(rows)) if form.colour else {}
        images, *last = self._outputs(form, fed, [task.out[i] for i in rows])
        corners = [pixel.tobytes() for pixel in last[0]] if last and not judged else []
        pixels = sum(task.out[i].nbytes for i in rows) if form.size else sum(image.nbytes for image in images)
        task.lap("render" if form.size else "decode", len(rows), pixels)
        for k, i in enumerate(rows if self._gpu is None else ()):
            start = None if form.size else tuple(fed["start"][k].tolist())
            image = images[k] if self._through else self._finished(task, i, images[k], start)
            task.out[i][...] = image
            task.lap("write", nbytes=task.out[i].nbytes)
        if self._cpu:
            self._tidy(form, sum(task.pixels(i) for i in rows))
        for i, corner in zip(rows, corners, strict=bool(corners)):
            self._judge(task, i, corner)

    def _finished(
        self, task: _Task, i: int, image: NDArray[np.uint8], start: tuple[int, int] | None
    ) -> NDArray[np.uint8]:
        """What Pillow and `paint` make of the decoded window, which starts there (y, x); None: it is resampled."""
        colour = task.params.colour
        if start is None and not colour:
            return image
        shown = self._canvas.image(image)
        if start is not None:
            shown = show(shown, task.views[i], task.params, offset=start[::-1])
            task.lap("resize", nbytes=task.out[i].nbytes)
        if colour:
            shown = paint(shown, colour, i)
            task.lap("colour", nbytes=task.out[i].nbytes)
        return levels(shown)

    def _tidy(self, form: Form, pixels: int) -> None:
        """After a batch of so many pixels."""
        if pixels > self._batch_pixels:
            # The pipeline would keep the memory of a giant; and it refers to itself.
            self._pipelines.pop(form, None)
            gc.collect()
        self._untidied += pixels
        if self._untidied > _TIDY_PIXELS:
            # Blocks of ever other sizes leave gaps between them: hundreds of MB in an hour.
            self._untidied = 0
            _trim()

    def _judge(self, task: _Task, i: int, last: bytes) -> None:
        picture = task.pictures[i]
        if not self._cpu:  # whose decoders may round otherwise
            last = bytes(128 if abs(level - 128) <= _NEARLY else level for level in last)
        if jpeg.may_end_early(picture.data, last):
            task.begin([i])
            try:
                decode(picture)
            except BadPicture as bad:
                task.out[i][...] = 0
                task.verdicts[i] = bad.with_traceback(None)
                return
        picture.good = picture.whole = True

    def _outputs(
        self, form: Form, fed: dict[str, Any], into: Sequence[NDArray[np.uint8]] = ()
    ) -> list[Sequence[NDArray[np.uint8]]]:
        """An array per picture, good until the next call: DALI's own memory.

        Args:
            into: of a GPU, where its pictures are to go; there are then no arrays of them.

        Raises:
            _Refused: the pictures, or some of them.
            BackendFailed: the device has no memory, or is gone.
        """
        try:
            outputs = self._ran(form, fed)
            if self._gpu is None or not into:
                return [_arrays(output) for output in outputs]
            images, *others = outputs
            self._gpu.fetch([(to.ctypes.data, images[k].data_ptr(), to.nbytes) for k, to in enumerate(into)])
            return [(), *(_arrays(output) for output in others)]
        except CudaError as error:
            raise BackendFailed(f"CUDA: {error}") from error
        except MemoryError as error:
            raise BackendFailed("DALI: out of memory") from error
        except RuntimeError as error:
            text = str(error).rpartition("encountered:")[2].strip()  # before it come lines of our own source
        if self._gpu is not None:
            gc.collect()  # it refers to itself, and how much of a GPU's memory it keeps, Python does not see
        if _OUT_OF_MEMORY.search(text):
            raise BackendFailed(f"DALI: {_point(text)}")
        raise _Refused(text)

    def _ran(self, form: Form, fed: dict[str, Any]) -> tuple[Any, ...]:
        """The outputs of the form's pipeline."""
        # Kept again only once it has run: after an error it is good for nothing, or it holds inputs still, which the
        # next pictures would be taken for.
        pipeline = self._pipelines.pop(form, None) or graph.build(form, self._executor)
        with _silence() if self._cpu else nullcontext():
            outputs: tuple[Any, ...] = pipeline.run(**fed)
        self._pipelines[form] = pipeline  # the last one used comes last
        if len(self._pipelines) > _PIPELINES:
            self._pipelines.pop(next(iter(self._pipelines)))
            if self._gpu is not None:
                gc.collect()
        return outputs

    def _check(self) -> None:
        """
        Raises:
            BackendFailed: DALI refuses a picture that is known to be good.
        """
        form = Form(False, False, (8, 8) if self._through else None, "bilinear", None, ())
        view = View((0.0, 0.0, 8.0, 8.0), (8, 8), (8, 8), False, False, False)
        try:
            images, _ = self._outputs(form, graph.inputs(form, self._executor, [view], [_known()]))
        except _Refused as refused:
            raise BackendFailed(f"DALI refuses a picture that is known to be good: {_point(str(refused))}") from None
        finally:
            self._pipelines.pop(form, None)
        if not 60 < np.mean(images[0]) < 90:
            raise BackendFailed("DALI decodes a picture that is known to be good, and it is another one")


@dataclass(slots=True)
class _Task:
    """The arguments of a call of `render`, and what comes of it."""

    pictures: Sequence[Picture]
    params: Params
    out: Sequence[NDArray[np.uint8]]
    begin: Callable[[Sequence[int]], None]
    lap: Lap
    verdicts: list[BadPicture | None]
    views: list[View]

    def steps(self, rows: Rows) -> tuple[Step, ...]:
        """The colour steps of some pictures."""
        return self.params.take(np.array(rows)).colour

    def pixels(self, i: int) -> int:
        """As many as the whole picture has."""
        return self.pictures[i].width * self.pictures[i].height


def _for_dali(picture: Picture) -> bool:
    """Whether DALI is to render the picture: by its content."""
    if picture.whole or picture.format not in ("JPEG", "MPO"):
        return picture.whole
    head = jpeg.header(picture.data)
    frame = head.frame
    if frame is None or frame.precision != 8 or frame.process > _PROGRESSIVE or head.colours == "other":
        return False
    # DALI looks no further than to the last row, and not at what is missing before it.
    whole = jpeg.closed(picture.data) and jpeg.missing_parts(picture.data) is None
    return whole and (frame.width, frame.height) == picture.stored


def _culprit(rows: Rows, text: str) -> int | None:
    """Whom DALI's words accuse; nobody, if there are several and none is named."""
    if len(rows) == 1:
        return rows[0]
    named = _NAMED.search(text)
    return rows[int(named[1])] if named is not None and int(named[1]) < len(rows) else None


def _point(text: str) -> str:
    """Of what DALI says: behind it come a stack trace, or paths, and what has become of the pipeline."""
    return text.partition("\n")[0].rstrip(". ")


def _cut(rows: Rows, pixels: Sequence[int], most: int, most_pixels: int) -> Iterator[Rows]:
    """Into batches that are bounded in pictures and in pixels."""
    batch: Rows = []
    total = 0
    for i, more in zip(rows, pixels, strict=True):
        if batch and (len(batch) == most or total + more > most_pixels):
            yield batch
            batch, total = [], 0
        batch.append(i)
        total += more
    if batch:
        yield batch


def _gpu(number: int) -> Device:
    """
    Raises:
        BackendFailed: there is none, or it does not work.
    """
    try:
        return Device(number)
    except CudaError as error:
        raise BackendFailed(f"CUDA: {error}") from error


def _arrays(output: Any) -> list[NDArray[np.uint8]]:
    """Of a list of tensors, without a copy where they are on the CPU."""
    here = output.as_cpu()
    return [np.asarray(here[k]) for k in range(len(here))]


#: Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def _keep() -> None:
    with suppress(AttributeError):  # of a libc that is not glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BLOCK)


def _trim() -> None:
    with suppress(AttributeError):  # of a libc that is not glibc
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def _silence() -> Iterator[None]:
    """Nothing gets to stderr: there libjpeg says a line for each oddity of a picture, which nobody could name.

    Stderr is the process's, so of several threads one at a time is in here.
    """
    with _STDERR:
        try:
            stderr = os.dup(2)
        except OSError:  # there is none
            yield
            return
        try:
            with suppress(OSError):  # no descriptor is left: better some lines than no pictures
                nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
                os.dup2(nowhere, 2)
                os.close(nowhere)
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def _known() -> bytes:
    """A JPEG of one colour."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (50, 75, 100)).save(buffer, "JPEG")
    return buffer.getvalue()


def _versions() -> str:
    for package in ("nvidia-nvimgcodec-cu13", "nvidia-nvimgcodec-cu12"):
        try:
            return f"{dali.__version__}/nvimgcodec-{metadata.version(package)}"
        except metadata.PackageNotFoundError:
            pass
    return str(dali.__version__)
