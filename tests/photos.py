"""Sample pictures, made on the spot: small, seeded, and with what cameras do to files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

CLASSES = ("meadow", "sea", "town")
PER_CLASS = 16

_PALETTES = {
    "meadow": ((70, 130, 40), (190, 220, 240)),
    "sea": ((20, 70, 120), (230, 200, 160)),
    "town": ((90, 80, 75), (200, 205, 210)),
}
_ORIENTATION = 0x0112


def landscape(name: str, seed: int, height: int, width: int) -> NDArray[np.uint8]:
    """A picture of a class: ground and sky, some blobs before them, and the noise of a sensor; uint8 [H, W, 3]."""
    rng = np.random.default_rng([seed, CLASSES.index(name)])
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    y, x = y / height, x / width
    ground, sky = (np.array(colour, np.float32) for colour in _PALETTES[name])
    horizon = rng.uniform(0.35, 0.65) + 0.05 * np.sin(2 * np.pi * (x * rng.uniform(1, 4) + rng.uniform()))
    blend = 1 / (1 + np.exp((y - horizon) * 40))
    picture = ground + blend[..., None] * (sky - ground)
    for _ in range(6):
        cy, cx, radius = rng.uniform(0, 1), rng.uniform(0, 1), rng.uniform(0.03, 0.15)
        inside = np.clip((radius - np.hypot(y - cy, x - cx)) * 60, 0, 1)[..., None]
        picture += inside * (rng.uniform(0, 255, 3).astype(np.float32) - picture)
    picture += rng.normal(0, 6, picture.shape).astype(np.float32)
    levels: NDArray[np.uint8] = np.clip(np.rint(picture), 0, 255).astype(np.uint8)
    return levels


def make(folder: Path) -> Path:
    """Writes `PER_CLASS` JPEGs into a folder per class: sizes, qualities, subsampling, grey and turned ones mixed."""
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
        for i in range(PER_CLASS):
            rng = np.random.default_rng([i, CLASSES.index(name), 1])
            height, width = (int(v) for v in rng.integers(96, 321, 2))
            picture = Image.fromarray(landscape(name, i, height, width))
            if i % 8 == 3:
                picture = picture.convert("L")
            exif = Image.Exif()
            if i % 8 == 5:
                exif[_ORIENTATION] = 1 + (i + CLASSES.index(name)) % 8
            picture.save(
                folder / name / f"{i:03}.jpg",
                quality=int(rng.integers(70, 96)),
                subsampling=int(rng.integers(0, 3)) if picture.mode == "RGB" else -1,
                progressive=i % 8 == 6,
                exif=exif,
            )
    return folder


def links(source: Path, folder: Path, count: int) -> Path:
    """A class folder tree with `count` hard links of the pictures of `source`, dealt out in turn."""
    files = sorted(source.glob("*/*"), key=lambda file: (file.name, file.parent.name))  # class after class in turn
    for name in {file.parent.name for file in files[:count]}:
        (folder / name).mkdir(parents=True)
    for i in range(count):
        file = files[i % len(files)]
        os.link(file, folder / file.parent.name / f"{i:06}{file.suffix}")
    return folder
