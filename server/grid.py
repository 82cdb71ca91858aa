"""The pictures at an address as a grid: what a trainer gets, to look at."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from headrace.pipeline.backend import make
from headrace.pipeline.index import Index
from headrace.pipeline.render import ChunkRenderer
from headrace.pipeline.spec import Stream
from headrace.slots import Ring, Status

_CAPTION = 14  # pixels below each picture
_GAP = 2


def draw(stream: Stream, index: Index, backend: str, epoch: int, position: int, number: int, output: Path) -> list[str]:
    """Render the positions and write them as a PNG.

    Returns:
        For each picture its position, index, label, status and path, with tabs between.

    Raises:
        DatasetError: a sample cannot be read.
    """
    layout = stream.layout
    stop = min(position + number, len(index))
    columns = min(stop - position, max(1, 1600 // (layout.width + _GAP)))
    rows = -(-(stop - position) // columns)
    cell = (layout.width + _GAP, layout.height + _GAP + _CAPTION)
    canvas = Image.new("RGB", (columns * cell[0], rows * cell[1]), "white")
    pen = ImageDraw.Draw(canvas)
    lines = []
    renderer = ChunkRenderer(stream, index, engine := make(backend))
    ring = Ring.create(layout, 1)
    view = ring.views[0]
    for p in range(position, stop):
        chunk, row = divmod(p, layout.chunk)
        if p == position or row == 0:
            wanted = range(row, min(layout.chunk, stop - chunk * layout.chunk))
            rejects = {r.row: r for r in renderer.render(epoch, chunk, view, wanted).rejects}
        at = divmod(p - position, columns)
        x, y = at[1] * cell[0], at[0] * cell[1]
        canvas.paste(Image.fromarray(np.array(view.images[row])), (x, y))
        i, label = int(view.indices[row]), int(view.labels[row])
        name = index.classes[label] if 0 <= label < len(index.classes) else str(label)
        good = view.status[row] == Status.OK
        pen.text((x + 1, y + layout.height), f"{p} #{i} {name}", fill="black" if good else "red")
        state = "ok" if good else f"rejected ({rejects[row].stage}: {rejects[row].reason})"
        lines.append(f"{p}\t{i}\t{label}\t{state}\t{index.shown(i)}")
    del view
    ring.close()
    engine.close()
    canvas.save(output, "PNG")
    return lines
