"""The finishing pass of a GPU as one Triton kernel, which reads each byte once and writes each number once.

Imported only where Triton is to be tried. `TRITON_INTERPRET=1`, set before, runs it on the CPU, for tests. It has never
run on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

#: What one program writes: numbers of a picture, or pixels of it where planes are written. Of pixels each thread has
#: four, whose bytes it reads one by one: of more a warp's loads would lie further apart. Reckoned, and not measured.
_NUMBERS, _PIXELS = 1024, 512


# Not annotated: a kernel may name nothing but what Triton knows.
@triton.jit  # type: ignore[untyped-decorator]
def _number(x, a, b, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    if KIND == "uint8":
        return x
    else:
        y = x.to(tl.float32) * a + b  # two roundings: the launch forbids to fuse them
        if KIND == "float32":
            return y
        elif KIND == "float16":
            return y.to(tl.float16)
        else:  # bfloat16 by its bits, to the nearest, ties to even: what interprets a kernel would cut them off
            bits = y.to(tl.uint32, bitcast=True)
            return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)


@triton.jit  # type: ignore[untyped-decorator]
def _finish(  # type: ignore[no-untyped-def]
    levels,
    rows,
    out,
    pixels,
    a0,
    a1,
    a2,
    b0,
    b1,
    b2,
    GATHER: tl.constexpr,
    PLANES: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    size = 3 * pixels
    span = pixels if PLANES else size
    blocks = tl.cdiv(span, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    source = tl.load(rows + row) if GATHER else row
    at = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = at < span
    picture = levels + source * size
    target = out + row * size
    if PLANES:
        for channel in tl.static_range(3):
            x = tl.load(picture + 3 * at + channel, mask=inside)
            a = a0 if channel == 0 else (a1 if channel == 1 else a2)
            b = b0 if channel == 0 else (b1 if channel == 1 else b2)
            tl.store(target + channel * pixels + at, _number(x, a, b, KIND), mask=inside)
    else:
        x = tl.load(picture + at, mask=inside)
        channel = at % 3
        a = tl.where(channel == 0, a0, tl.where(channel == 1, a1, a2))
        b = tl.where(channel == 0, b0, tl.where(channel == 1, b1, b2))
        tl.store(target + at, _number(x, a, b, KIND), mask=inside)


def finish(levels: Any, rows: Any, out: Any, a: list[float], b: list[float], *, planes: bool) -> None:
    """Submit the pass to the current stream of the tensors' device.

    Args:
        levels: uint8 (m, H, W, 3), contiguous.
        rows: int64 (n,), which of them; None: the first n.
        out: (n, 3, H, W) with `planes`, else (n, H, W, 3), contiguous; uint8 takes the levels as they are.
        a, b: the formula's, numbers of float32, three each.
        planes: whether each channel lies by itself.
    """
    pixels = levels.shape[1] * levels.shape[2]
    span, block = (pixels, _PIXELS) if planes else (3 * pixels, _NUMBERS)
    grid = (len(out) * triton.cdiv(span, block),)
    kind = str(out.dtype).removeprefix("torch.")
    _finish[grid](
        levels, levels if rows is None else rows, out.view(torch.uint16) if kind == "bfloat16" else out, pixels, *a, *b,
        GATHER=rows is not None, PLANES=planes, KIND=kind, BLOCK=block, enable_fp_fusion=False,
    )  # fmt: skip
