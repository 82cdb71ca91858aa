"""The same files in the same order are the same epoch, whether a folder, a list or tar shards bring them."""

from __future__ import annotations

import csv
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tars
from service import Daemon, Trainer, Truth, merged, stream

from headrace import Loader

ODD = ("two words", "tab\tand\nline", "ü ß", "\udcff\udc80", 'quote"d, comma', "-", "long " * 40)


@dataclass
class Sample:
    path: str  # relative to the folder
    label: str
    data: bytes
    further: dict[str, Any]


@pytest.fixture(scope="module")
def samples(photos: Path, session_home: Path) -> list[Sample]:
    """In the order of the folder `session_home/sources`, which holds them."""
    root = session_home / "sources"
    shutil.copytree(photos, root)
    (root / "sea").rename(root / "sea.v1")
    for i, name in enumerate(ODD):
        (root / "town" / f"{i:03}.jpg").rename(root / "town" / f"{name}.jpg")
    (root / "meadow/003.jpg").write_bytes(b"not a picture")
    (root / "sea.v1/005.jpg").write_bytes((root / "sea.v1/005.jpg").read_bytes()[:900])
    made = []
    for folder in sorted(os.listdir(root)):
        for i, name in enumerate(sorted(os.listdir(root / folder))):
            further: dict[str, Any] = {"caption": f"{i}. größer", "box": [i, 0.5, None], "even": i % 2 == 0}
            if i % 3:
                further["rare"] = {"deep": [name.isascii()]}
            made.append(Sample(f"{folder}/{name}", folder, (root / folder / name).read_bytes(), further))
    return made


@pytest.fixture
def root(samples: list[Sample], session_home: Path) -> Path:
    return session_home / "sources"


def write_csv(path: Path, root: Path, samples: list[Sample]) -> dict[str, Any]:
    with path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        out = csv.writer(file)
        out.writerow(["path", "label"])
        out.writerows([sample.path, sample.label] for sample in samples)
    return {"list": str(path), "root": str(root)}


def write_json(path: Path, root: Path, samples: list[Sample]) -> dict[str, Any]:
    with path.open("w", encoding="utf-8", errors="surrogateescape") as file:
        for sample in samples:
            line = {"path": sample.path, "label": sample.label, **sample.further}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    return {"list": str(path), "root": str(root)}


def write_shards(folder: Path, samples: list[Sample], *, further: bool = False, ending: str = "cls") -> dict[str, Any]:
    for t, first in enumerate(range(0, len(samples), 20)):
        members = []
        for i, sample in enumerate(samples[first : first + 20]):
            key = f"{sample.label}/{i:02} {Path(sample.path).stem}".replace(".", "_")
            members.append((f"{key}.jpg", sample.data))
            members.append((f"{key}.{ending}", sample.label.encode()))
            if further:
                members.append((f"{key}.json", json.dumps(sample.further).encode()))
        tars.write(folder / f"{t:04}.tar", members)
    return {"shards": f"{folder}/{{0000..{t:04}}}.tar"}


def epoch(address: str, name: str, epochs: int = 2) -> list[Any]:
    """Everything that a Loader hands out but names, batch after batch."""
    got = []
    with Loader(address, stream=name, batch_size=7, output="numpy", dtype="uint8", layout="NHWC") as loader:
        for _ in range(epochs):
            for batch in loader:
                images, labels = batch
                rejects = [(reject.index, reject.position, reject.stage, reject.reason) for reject in batch.rejects]
                shown = labels if isinstance(labels, list) else (str(labels.dtype), labels.tolist())
                got.append((images.tobytes(), images.shape, shown, batch.indices.tolist(), rejects, batch.extra))
        assert len(got) == epochs * len(loader) and loader.num_samples == 48
    return got


def streams(**datasets: dict[str, Any]) -> dict[str, Any]:
    return {name: stream(Path("unused")) | {"dataset": dataset} for name, dataset in datasets.items()}


def test_folder_list_and_shards_of_the_same_files_are_the_same_epochs(
    root: Path, samples: list[Sample], home: Path
) -> None:
    described = streams(
        folder={"folder": str(root)},
        csv=write_csv(home / "list.csv", root, samples),
        shards=write_shards(home / "plain", samples),
    )
    with Daemon(home, described, slots=4) as daemon:
        folder, listed, shards = (epoch(daemon.address, name) for name in described)
    assert folder == listed == shards
    assert sum(len(batch[4]) for batch in folder) == 4, "two bad files in two epochs"
    assert {label for batch in folder for label in batch[2][1]} == {0, 1, 2}


def test_list_and_shards_deliver_the_same_further_values_and_texts(
    root: Path, samples: list[Sample], home: Path
) -> None:
    lines = write_json(home / "list.jsonl", root, samples)
    described = streams(
        list=lines,
        shards=write_shards(home / "values", samples, further=True),
        list_texts=lines | {"labels": "text"},
        shards_texts=write_shards(home / "texts", samples, further=True, ending="txt"),
    )
    with Daemon(home, described, slots=4) as daemon:
        listed, shards, listed_texts, shards_texts = (epoch(daemon.address, name) for name in described)
    assert listed == shards and listed_texts == shards_texts
    assert [batch[0] for batch in listed] == [batch[0] for batch in listed_texts]
    for _, _, labels, indices, _, extra in listed_texts:
        assert list(extra) == ["caption", "box", "even", "rare"]
        for row, i in enumerate(indices):
            assert labels[row] == samples[i].label
            assert {name: extra[name][row] for name in extra} == {"rare": None, **samples[i].further}


def test_an_epoch_of_shards_is_resumed_shared_and_rendered_alike(samples: list[Sample], home: Path) -> None:
    with Daemon(home, streams(train=write_shards(home / "plain", samples)), slots=4) as daemon:
        with Trainer(daemon.address, home / "a.jsonl", batch_size=5, steps=4) as trainer:
            trainer.wait()
        with Trainer(daemon.address, home / "a.jsonl", batch_size=5) as trainer:
            trainer.wait()
        ranks = [
            Trainer(daemon.address, home / f"{r}.jsonl", rank=r, world_size=3, batch_size=5).start() for r in range(3)
        ]
        for rank in ranks:
            rank.wait()
    truth = Truth(daemon.config, home / "cache").rows(0)
    assert trainer.rows() == truth == merged(ranks)


def test_classes_and_limit_choose_the_same_of_every_source(root: Path, samples: list[Sample], home: Path) -> None:
    chosen = {"classes": ["town", "meadow"], "limit": 20}
    ordered = [s for label in chosen["classes"] for s in samples if s.label == label]  # type: ignore[attr-defined]
    described = streams(
        list=write_csv(home / "list.csv", root, ordered) | chosen, shards=write_shards(home / "some", ordered) | chosen
    )
    whole = streams(list=write_csv(home / "whole.csv", root, ordered[:20]))["list"]
    with Daemon(
        home, {**described, "whole": whole | {"dataset": whole["dataset"] | {"classes": chosen["classes"]}}}
    ) as daemon:
        got = []
        for name in (*described, "whole"):
            with Loader(daemon.address, stream=name, batch_size=20, output="numpy", dtype="uint8") as loader:
                assert loader.classes == chosen["classes"] and loader.num_samples == 20
                (batch,) = loader
                got.append((np.asarray(batch[0]).tobytes(), batch[1].tolist(), batch.indices.tolist()))
    assert got[0] == got[1] == got[2]
