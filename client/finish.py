"""From the levels in a slot to the pixels of a batch: cast, normalise, lay out.

One formula, y = fl32(fl32(x·a) + b) with a = 1/(255·std) and b = -mean/std, both rounded once from float64; float16
and bfloat16 round y to the nearest, ties to even. Neither a fused multiply-add nor (x/255 - mean)/std gives the same
last bit, so nothing else may be used anywhere.

The work is done beside a main thread that may keep the interpreter busy, and each return from NumPy then waits up to
5 ms for it. So a run of rows takes a handful of calls, whatever its length, and there is no loop over pictures.
Torch is not used here: it would start threads of its own, which take the cores away from the workers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.output import Output

#: Bytes of levels that are looked up at a time, so that 32 pictures of 224 by 224 are two blocks; the indices take
#: four times as many.
_BLOCK = 5 << 19


def constants(output: Output) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """a and b of the formula, float32 (3,) each."""
    mean, std = np.array(output.mean), np.array(output.std)
    return (1.0 / (255.0 * std)).astype(np.float32), (-mean / std).astype(np.float32)


def to_bfloat16(y: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of bfloat16 nearest to finite `y`, ties to even; same shape."""
    bits = y.view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)


class Finisher:
    """Finishes runs of pictures of one size into one form.

    Attributes:
        dtype: of the memory that is written; bfloat16, which NumPy lacks, is written as its bits in int16.
    """

    def __init__(self, output: Output, height: int, width: int) -> None:
        self.output = output
        self._size = (height, width)
        a, b = constants(output)
        self.dtype: np.dtype[Any]
        if output.dtype == "float32":
            self.dtype = np.dtype(np.float32)
            if output.layout == "NCHW":
                self._a, self._b = a.reshape(3, 1, 1), b.reshape(3, 1, 1)
            else:  # one constant per byte of a picture: the inner loop of NumPy is then a whole picture long
                self._a, self._b = (np.tile(v, height * width).reshape(height, width, 3) for v in (a, b))
        elif output.dtype == "uint8":
            self.dtype = np.dtype(np.uint8)
        else:
            levels = np.arange(256, dtype=np.float32)[:, None] * a + b
            rounded = levels.astype(np.float16).view(np.int16) if output.dtype == "float16" else to_bfloat16(levels)
            self.dtype = np.dtype(np.float16 if output.dtype == "float16" else np.int16)
            self._levels: NDArray[np.int16] = rounded.view(np.int16)
            self._pairs = _pair_table(self._levels)
            self._block = max(1, _BLOCK // (3 * height * width))
            self._indices = np.empty((0,), np.intp)
            self._scratch = np.empty((0,), np.int16)

    @property
    def row_bytes(self) -> int:
        """Bytes of a finished picture."""
        height, width = self._size
        return 3 * height * width * self.dtype.itemsize

    def rows(self, memory: NDArray[np.uint8], count: int) -> NDArray[Any]:
        """`memory` as `count` rows: (count, 3, H, W) for NCHW, else (count, H, W, 3)."""
        height, width = self._size
        shape = (3, height, width) if self.output.layout == "NCHW" else (height, width, 3)
        return memory[: count * self.row_bytes].view(self.dtype).reshape(count, *shape)

    def finish(self, levels: NDArray[np.uint8], out: NDArray[Any]) -> None:
        """Write pictures into rows of a batch.

        Args:
            levels: uint8 (n, H, W, 3), contiguous.
            out: as many of the rows that `rows` gave.
        """
        planes = self.output.layout == "NCHW"
        if self.dtype.itemsize == 2:
            for first in range(0, len(levels), self._block):
                part = slice(first, first + self._block)
                self._look_up(levels[part], out[part], planes=planes)
            return
        np.copyto(out, levels.transpose(0, 3, 1, 2) if planes else levels)
        if self.dtype == np.float32:
            # Not np.multiply(levels, a, out): casting in small buffers costs more than this pass of its own.
            np.multiply(out, self._a, out=out)
            np.add(out, self._b, out=out)

    def _look_up(self, levels: NDArray[np.uint8], out: NDArray[Any], *, planes: bool) -> None:
        """Two bytes in, two numbers of 16 bits out, by a table: NumPy rounds to 16 bits three times slower."""
        flat = levels.reshape(-1)
        if planes and self._scratch.size < flat.size:
            self._scratch = np.empty(flat.size, np.int16)
        target = self._scratch[: flat.size] if planes else out.view(np.int16).reshape(-1)
        even = flat.size // 6 * 6
        if self._indices.size < even // 2:
            self._indices = np.empty(even // 2, np.intp)
        indices = self._indices[: even // 2]
        np.add(flat[:even].view(np.uint16).reshape(-1, 3), _PHASES, out=indices.reshape(-1, 3))
        np.take(self._pairs, indices, out=target[:even].view(np.uint32), mode="clip")
        if even < flat.size:  # an odd number of pixels leaves the last one without a partner
            target[even:] = self._levels[flat[even:], [0, 1, 2]]
        if planes:
            np.copyto(out.view(np.int16), target.reshape(levels.shape).transpose(0, 3, 1, 2))


#: Two pixels are six bytes or three pairs; a pair is looked up in the part of the table for its place among the three.
_PHASES = np.array([0, 1 << 16, 2 << 16], np.intp)


def _pair_table(levels: NDArray[np.int16]) -> NDArray[np.uint32]:
    """For each of the three pairs of channels and each two levels, the two numbers side by side."""
    first, second = np.arange(1 << 16, dtype=np.uint16).view(np.uint8).reshape(-1, 2).T
    parts = [np.stack([levels[first, one], levels[second, other]], axis=1) for one, other in ((0, 1), (2, 0), (1, 2))]
    return np.ascontiguousarray(np.concatenate(parts)).view(np.uint32).reshape(-1)
