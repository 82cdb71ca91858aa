"""MixUp and CutMix: the rows of a finished batch and their labels, mixed in pairs.

What is drawn comes from the table of uniform numbers, row p of it for the batch that begins at position p, so a batch
is a function of stream, epoch, first position and rows. As torchvision does it: each row is paired with the one before
it, the first with the last, all with one λ. Here only rows that are `valid` take part, and with fewer than two none do.

λ is of the distribution Beta(α, α), from the row's first two numbers u and v:

    w = u^(1/α),   c = cos 2πv,   λ = (1 + c·√(1 - w) / √(c² + w·(1 - c²))) / 2

This is Bailey's polar way to Student's t of 2α degrees of freedom ("Polar generation of random variates with the
t-distribution", Mathematics of Computation 62, 1994), T = c·√(2α(1 - w)/w), put into λ = (1 + T/√(2α + T²)) / 2, which
is Beta(α, α): exact for every α > 0, without rejection. λ is rounded to a multiple of 2⁻²⁴. So λ and 1 - λ are numbers
of float32, and a last bit in which mathematics libraries differ is lost, but for one draw in 10⁸ or so.

The functions take arrays, and tensors on any device; none has been on a GPU yet. On the host the Loader uses them on
arrays, in the thread that finishes: torch would start threads of its own, and each call may wait for the interpreter,
so they are few. On a device it submits them behind finishing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.draws import uniforms
from headrace.errors import ConfigError
from headrace.finish import to_bfloat16
from headrace.output import CutMix, MixUp
from headrace.slots import SlotLayout

#: Bytes of pictures that are mixed at a time; twice as many are taken for them beside the batch.
_BLOCK = 5 << 20
WORKING = 2 * _BLOCK


def beta(alpha: float, u: float, v: float) -> float:
    """λ of Beta(alpha, alpha) from two uniform numbers, by the formula above: from 0 to 1, a multiple of 2⁻²⁴."""
    w = u ** (1 / alpha)
    c = math.cos(2 * math.pi * v)
    share = c * math.sqrt(1 - w) / math.sqrt(c * c + w * (1 - c * c))
    return round((1 + share) / 2 * 2**24) / 2**24


@dataclass(frozen=True, slots=True)
class Mixture:
    """How the pairs of one batch are mixed.

    Attributes:
        weight: of a row itself in its label, and of all its pixels where there is no box; its partner's is 1 - weight.
        box: `(x1, y1, x2, y2)`: the pixels x1 … x2 - 1, y1 … y2 - 1 are the partner's; None for MixUp.
    """

    weight: float
    box: tuple[int, int, int, int] | None = None


def cut(share: float, x: int, y: int, height: int, width: int) -> Mixture:
    """The box around (x, y) that leaves `share` of a picture outside it, cut at the picture's edges, as torchvision
    rounds it; the weight is what it then leaves."""
    half = 0.5 * math.sqrt(1 - share)
    dx, dy = int(half * width), int(half * height)
    x1, y1, x2, y2 = max(x - dx, 0), max(y - dy, 0), min(x + dx, width), min(y + dy, height)
    return Mixture(1 - (x2 - x1) * (y2 - y1) / (width * height), (x1, y1, x2, y2))


@dataclass(frozen=True, slots=True)
class Mixing:
    """What a Loader mixes, and how its batches look.

    Attributes:
        mixup, cutmix: one of them or both; of both it is one for each batch, with even chances.
        seed: of the stream.
        classes: columns of a label.
        planes: whether pictures are (3, H, W), not (H, W, 3).
    """

    mixup: MixUp | None
    cutmix: CutMix | None
    seed: int
    classes: int
    planes: bool

    def draw(self, epoch: int, first: int, height: int, width: int) -> Mixture:
        """The mixture of the batch that begins at position `first`.

        Tables, by the widths of their rows: "mixup" 2, for λ; "cutmix" 4, for λ, x and y; "mix" 1, below ½ for MixUp.
        """

        def row(name: str, numbers: int) -> list[float]:
            return uniforms(self.seed, epoch, name, first, 1, numbers)[0].tolist()  # type: ignore[no-any-return]

        if self.cutmix is None or (self.mixup is not None and row("mix", 1)[0] < 0.5):
            assert self.mixup is not None
            return Mixture(beta(self.mixup.alpha, *row("mixup", 2)))
        u, v, x, y = row("cutmix", 4)
        return cut(beta(self.cutmix.alpha, u, v), int(x * width), int(y * height), height, width)


def check_labels(layout: SlotLayout, classes: int, *, text: bool) -> None:
    """
    Args:
        layout: of the stream's chunks.
        classes: how many the stream names.
        text: whether labels are texts.

    Raises:
        ConfigError: labels are no classes, so they cannot be mixed.
    """
    one = layout.label_dtype == "int64" and not layout.label_width
    several = layout.label_dtype == "float32" and layout.label_width == classes
    if text or not classes or not (one or several):
        kind = "texts" if text else "vectors of numbers" if layout.label_width else "numbers"
        raise ConfigError(
            f"mixup, cutmix: the stream's labels are {kind}, and only classes can be mixed: with `labels: class` or "
            "`labels: classes` its dataset has them. Or leave mixing out: mixup=False, cutmix=False"
        )


def mix(images: Any, labels: Any, valid: NDArray[np.bool_], mixing: Mixing, *, epoch: int, first: int) -> Any:
    """Mix the pictures of a batch in place.

    Args:
        images: n pictures, float32, float16, or bfloat16, of which an array holds the bits in int16; arrays or tensors.
        labels: int64 (n,), or float32 (n, classes).
        valid: bool (n,), on the host: the rows that take part.
        mixing: what is mixed.
        epoch, first: the batch's epoch and first position.

    Returns:
        the labels, float32 (n, classes), beside `images`: of a row alone 1 for its class, or as it was.
    """
    height, width = images.shape[2:] if mixing.planes else images.shape[1:3]
    mixture = mixing.draw(epoch, first, height, width)
    partners = pair(valid)
    if mixture.box is None:
        blend(images, partners, mixture.weight)
    else:
        paste(images, partners, mixture.box, planes=mixing.planes)
    return mix_labels(labels, partners, mixture.weight, mixing.classes)


def pair(valid: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The partner of each row, int64 (n,): the valid row before it, of the first the last; itself where it has none."""
    partners = np.arange(len(valid))
    rows = np.flatnonzero(valid)
    partners[rows] = np.roll(rows, 1)
    return partners


def blend(images: Any, partners: NDArray[np.int64], weight: float) -> None:
    """In place, each row x with partner z becomes fl32(fl32(x·weight) + fl32(z·(1 - weight))); float16 and bfloat16
    are computed in float32 and rounded once. A row that is its own partner is left as it is."""
    rows = np.flatnonzero(partners != np.arange(len(partners)))
    if not len(rows):
        return
    own, other = (_beside(values.reshape(-1, 1, 1, 1), images) for values in _weights(partners, weight))
    # From the end, so that the row before is not mixed yet; of the first it is the last, which would be.
    last = images[_beside(rows[-1:], images)]
    step = max(1, _BLOCK // (4 * math.prod(images.shape[1:])))
    for end in range(len(partners), 0, -step):
        block = slice(max(0, end - step), end)
        moved = _wide(images[_beside(partners[block], images)])
        if rows[0] in range(block.start, end):
            moved[int(rows[0]) - block.start] = _wide(last)[0]
        moved *= other[block]
        kept = images[block]
        mixed = _wide(kept)  # of float32 the pictures themselves
        mixed *= own[block]
        mixed += moved
        if mixed is not kept:
            kept[...] = to_bfloat16(mixed).view(np.int16) if kept.dtype == np.int16 else mixed


def paste(images: Any, partners: NDArray[np.int64], box: tuple[int, int, int, int], *, planes: bool) -> None:
    """In place, the box of each row becomes its partner's."""
    x1, y1, x2, y2 = box
    inside = images[..., y1:y2, x1:x2] if planes else images[:, y1:y2, x1:x2]
    inside[...] = inside[_beside(partners, images)]


def mix_labels(labels: Any, partners: NDArray[np.int64], weight: float, classes: int) -> Any:
    """Float32 (n, classes): label·weight + partner's label·(1 - weight), of a class number with 1 in its column."""
    if labels.ndim == 1:
        labels = labels[:, None] == _beside(np.arange(classes), labels)
    own, other = (_beside(values.reshape(-1, 1), labels) for values in _weights(partners, weight))
    return labels * own + labels[_beside(partners, labels)] * other


def _weights(partners: NDArray[np.int64], weight: float) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Of each row and of its partner; 1 and 0 where it is its own."""
    alone = partners == np.arange(len(partners))
    one, zero = np.float32(1), np.float32(0)
    return np.where(alone, one, np.float32(weight)), np.where(alone, zero, np.float32(1 - weight))


def _wide(pictures: Any) -> Any:
    """As float32; what is float32 is not copied."""
    if not isinstance(pictures, np.ndarray):
        return pictures.float()
    if pictures.dtype == np.int16:
        return (pictures.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return pictures.astype(np.float32, copy=False)


def _beside(values: NDArray[Any], where: Any) -> Any:
    """The values where that array or tensor is; nobody waits for a device."""
    if isinstance(where, np.ndarray):
        return values
    import torch

    tensor = torch.from_numpy(values)
    # Torch keeps page-locked memory until it was copied. Of other memory CUDA does not promise on every machine that it
    # may be let go of at once.
    return tensor if where.device.type == "cpu" else tensor.pin_memory().to(where.device, non_blocking=True)
