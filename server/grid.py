"""The pictures at an address as a grid: what a trainer gets, to look at."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from headrace.errors import ConfigError, HeadraceError
from headrace.pipeline import machine
from headrace.pipeline.backend import BackendFailed
from headrace.pipeline.index import Index
from headrace.pipeline.ledger import Ledger
from headrace.pipeline.render import ChunkRenderer
from headrace.pipeline.spec import Stream, Workers
from headrace.slots import Ring, Status

_CAPTION = 14  # pixels below each picture
_GAP = 2
_NARROWEST = 96  # pixels that a caption needs, whatever the picture's width
_ACROSS = 1600  # pixels of a row of several pictures
_MAX_PIXELS = 1 << 27


def draw(
    stream: Stream, index: Index, workers: Workers, epoch: int, position: int, number: int, output: Path
) -> list[str]:
    """Render the positions and write them as a PNG.

    Returns:
        For each picture its position, index, label, status and path, with tabs between.

    Raises:
        ConfigError: the file cannot be written, or would be too large.
        DatasetError: a sample cannot be read.
        HeadraceError: the backend fails.
    """
    layout = stream.layout(index)
    stop = min(position + number, len(index))
    width, height = max(layout.width, _NARROWEST) + _GAP, layout.height + _CAPTION + _GAP
    columns = min(stop - position, max(1, _ACROSS // width))
    rows = -(-(stop - position) // columns)
    if columns * width * rows * height > _MAX_PIXELS:
        raise ConfigError(
            f"-n {number}: the grid would have {columns * width}x{rows * height} pixels, over the limit of "
            f"{_MAX_PIXELS}: ask for fewer pictures"
        )
    canvas = Image.new("RGB", (columns * width, rows * height), "white")
    lines = []
    try:
        file = output.open("wb")  # before the work, which may take a while
    except OSError as error:
        raise ConfigError(f"-o {output}: cannot be written: {error.strerror}") from error
    engine = machine.make(workers)
    ring = Ring.create(layout, 1)
    view = ring.views[0]
    renderer, convicted = ChunkRenderer(stream, index, engine), Ledger(index).convicted
    with file:
        for p in range(position, stop):
            chunk, row = divmod(p, layout.chunk)
            if p == position or row == 0:
                wanted = range(row, min(layout.chunk, stop - chunk * layout.chunk))
                try:
                    rejects = {r.row: r for r in renderer.render(epoch, chunk, view, wanted, convicted).rejects}
                except BackendFailed as failed:
                    raise HeadraceError(f"the backend fails: {failed}") from failed
            i = int(view.indices[row])
            label = index.label_shown(i)
            y, x = divmod(p - position, columns)
            canvas.paste(Image.fromarray(np.array(view.images[row])), (x * width, y * height))
            caption = _caption(f"{p} #{i} {_names(index, label)}", width - _GAP, good=view.status[row] == Status.OK)
            canvas.paste(caption, (x * width, y * height + layout.height))
            state = "ok" if row not in rejects else f"rejected ({rejects[row].stage}: {rejects[row].reason})"
            lines.append(f"{p}\t{i}\t{label}\t{' '.join(state.split())}\t{index.shown(i)}")
        canvas.save(file, "PNG")
    del view
    ring.close()
    engine.close()
    return lines


def _names(index: Index, label: str) -> str:
    """The label with names for the numbers of classes."""
    if index.labels_text or not index.classes:
        return label
    return ", ".join(index.classes[int(number)] for number in label.split(",") if number)


def _caption(text: str, width: int, *, good: bool) -> Image.Image:
    """The text on a strip of its own, which cuts off what is too long."""
    strip = Image.new("RGB", (width, _CAPTION), "white")
    ImageDraw.Draw(strip).text((1, 0), " ".join(text.split()), fill="black" if good else "red")
    return strip
