"""One epoch by each CPU backend, through a daemon to a Loader: the same samples and labels in the same order, and
pictures as close as `docs/parity.md` says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from service import Daemon, stream

from headrace import Loader

SIZE = 96
#: The aim of that page: of the mean, and of what 99.9 % of the values reach.
MEAN, MOST = 0.25, 3


@pytest.fixture
def folder(request: pytest.FixtureRequest, photos: Path) -> Path:
    """Photos of full size where the extra samples are at hand."""
    try:
        extra: Path = request.getfixturevalue("extra_samples")
    except pytest.skip.Exception:
        return photos
    return extra / "photos"


def epoch(home: Path, name: str, description: dict[str, Any]) -> tuple[list[int], list[int], Any, set[str]]:
    """Indices, labels and pictures in the order of their delivery, and who rendered them."""
    with (
        Daemon(home, {"train": description}, backend=name, name=name) as daemon,
        Loader(daemon.address, batch_size=16, output="numpy", dtype="uint8", layout="NHWC") as loader,
    ):
        batches = list(loader)
        assert not any(batch.rejects for batch in batches)
        indices = [index for batch in batches for index in batch.indices.tolist()]
        labels = [label for batch in batches for label in batch.labels.tolist()]
        return indices, labels, np.concatenate([batch.images for batch in batches]), set(loader.stats()["render_ids"])


def test_an_epoch_is_the_same_by_either_backend_but_for_the_last_levels(folder: Path, home: Path) -> None:
    description = stream(folder, size=SIZE)
    description["transforms"] += [
        {"color_jitter": {"brightness": 0.3, "saturation": 0.3}},
        {"random_erasing": {"p": 0.5}},
    ]
    indices, labels, pictures, ids = epoch(home, "pillow", description)
    their_indices, their_labels, theirs, their_ids = epoch(home, "dali-cpu", description)
    assert (their_indices, their_labels) == (indices, labels)
    assert sorted(indices) == list(range(len(indices))) and indices != sorted(indices)
    assert [render_id.split("/")[0] for render_id in (*ids, *their_ids)] == ["pillow", "dali-cpu"]
    apart = np.abs(pictures.astype(np.int16) - theirs)
    assert apart.mean() <= MEAN
    assert np.quantile(apart, 0.999) <= MOST
