"""Finishing on a device: a batch's levels, there in one piece, into its pictures. The formula is that of `finish`.

One Triton kernel does it where Triton works, which is tried once with a few pictures; plain torch does it elsewhere, in
calls that round as often: torch computes one operation after the other, so nothing is fused.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, Protocol

import numpy as np

from headrace.finish import constants
from headrace.output import Output

log = logging.getLogger(__name__)

#: Bytes of levels that plain torch works on at a time, and what it takes for them beside the batch: gathered, and as
#: float32.
_BLOCK = 8 << 20
WORKING = 5 * _BLOCK


class Pass(Protocol):
    """The finishing pass, on the current stream of the tensors' device."""

    def __call__(self, levels: Any, rows: Any, out: Any) -> None:
        """
        Args:
            levels: tensor of uint8 (m, H, W, 3), contiguous.
            rows: tensor of int64 (n,), which of them; None: the first n.
            out: tensor, (n, 3, H, W) for NCHW, else (n, H, W, 3), contiguous.
        """


def plain(output: Output, device: Any) -> Pass:
    """The pass in plain torch, for tensors on that torch device."""
    import torch

    a, b = (torch.from_numpy(values).to(device) for values in constants(output))
    planes = output.layout == "NCHW"
    if planes:
        a, b = a.reshape(3, 1, 1), b.reshape(3, 1, 1)

    def finish(levels: Any, rows: Any, out: Any) -> None:
        step = max(1, _BLOCK // max(1, levels[0].numel()))
        for first in range(0, len(out), step):
            target = out[first : first + step]
            part = levels[first : first + len(target)] if rows is None else levels[rows[first : first + step]]
            if planes:
                part = part.permute(0, 3, 1, 2)
            if out.dtype == torch.uint8:
                target.copy_(part)
            elif out.dtype == torch.float32:
                target.copy_(part).mul_(a).add_(b)
            else:
                target.copy_(part.float().mul_(a).add_(b))

    return finish


def fused(output: Output) -> Pass:
    """The pass as one Triton kernel.

    Raises:
        ImportError: there is no Triton.
    """
    from headrace.fused import finish

    a, b = (values.tolist() for values in constants(output))
    return partial(finish, a=a, b=b, planes=output.layout == "NCHW")


def choose(output: Output, height: int, width: int, device: Any) -> tuple[str, Pass]:
    """The pass for pictures of one size on that torch device, and its name: `triton` or `torch`.

    On a GPU this compiles and tries the kernel, and waits for it. A Triton that does not work, for want of a C compiler
    say, or that gives other bits, is left alone, and the log says why.
    """
    ours = plain(output, device)
    if device.type != "cuda":
        return "torch", ours
    try:
        kernel = fused(output)
        with _current(device):  # Triton launches there, wherever the tensors are
            if _agree(kernel, ours, output, height, width, device):
                return "triton", kernel
        why = "its numbers differ from plain torch's"
    except Exception as error:
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    log.warning("Triton does not work on %s (%s): plain torch finishes the batches", device, why)
    return "torch", ours


def _current(device: Any) -> Any:
    import torch

    return torch.cuda.device(device)


def _agree(kernel: Pass, other: Pass, output: Output, height: int, width: int, device: Any) -> bool:
    """Whether both give the same, of every level, with and without rows left out."""
    import torch

    pictures = 2 + 256 // (height * width)
    levels = torch.from_numpy(np.resize(np.arange(256, dtype=np.uint8).repeat(3), (pictures, height, width, 3)))
    levels = levels.to(device)
    kept = torch.arange(pictures - 1, 0, -1, device=device)
    for rows, count in ((None, pictures), (kept, pictures - 1)):
        shape = (count, 3, height, width) if output.layout == "NCHW" else (count, height, width, 3)
        first, second = (torch.zeros(shape, dtype=getattr(torch, output.dtype), device=device) for _ in range(2))
        kernel(levels, rows, first)
        other(levels, rows, second)
        if not torch.equal(first, second):
            return False
    return True
