"""What people meet who feed pictures to training, each as a whole kind.

one damaged file among many                  here; test_hard, test_loader_daemon
errors that do not say which file            here; test_files
files repaired in place                      test_files: a data set is never written to; test_verify
bad files in a row, last, or only            here; test_loader_daemon: only bad files are a prompt error
four inks; turned; grey, palette, alpha      test_hard: inks, orientation, png; test_pillow: turned or as stored
fine patterns when shrunk                    test_pillow: stripes become grey, parity with torchvision; test_resume
samples that ranks do not divide             here; test_resume, test_steps, test_assembly
an empty last batch                          here; test_assembly
the same order in each epoch                 here; test_loader_daemon
the same random crops in each worker         here; test_equality
subsets by ranks                             here
a state in the middle of an epoch            here; test_resume, test_equality, test_trainers
what a killed daemon leaves                  test_endings, test_kills, test_packaging: nothing under a name in /dev/shm
errors that cannot cross a border            here; test_errors
descriptors of kept batches                  test_endings; test_loader_daemon: fifty epochs
classes without pictures                     here; test_layouts
blanks, commas and line ends in names        here; test_listfile, test_cli
dots in names                                here; test_shards: keys end at the first dot behind the last slash
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from layouts import ALL_POWERFUL, POWERLESS
from pictures import encode, noise, quadrants
from service import Daemon, Trainer, Truth

from headrace import Batch, Loader
from headrace.errors import ConfigError, DatasetError, TooManyRejects
from headrace.server import cli

SIZE = 16
JPEG = encode(quadrants(), "JPEG", quality=95)
CUT = JPEG[:-40]
TEXT = b"this is a text file\n"


def stream(dataset: dict[str, Any] | Path, **more: Any) -> dict[str, Any]:
    source = {"folder": str(dataset)} if isinstance(dataset, Path) else dataset
    return {"dataset": source, "chunk": 4, "transforms": [{"resize": {"size": [SIZE, SIZE]}}]} | more


def put(file: Path, data: bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return file


def numbered(folder: Path, count: int, classes: int = 2) -> Path:
    """So many different pictures, dealt out to the classes in turn."""
    for i in range(count):
        put(folder / f"class{i % classes}" / f"{i:03}.jpg", encode(noise(24, 32, seed=i), "JPEG"))
    return folder


def linked(file: Path, folder: Path, count: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        os.link(file, folder / f"{i:04}{file.suffix}")


@pytest.fixture(scope="module")
def data(session_home: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=session_home))


@pytest.fixture(scope="module")
def daemon(data: Path) -> Iterator[Daemon]:
    """A stream for each of the data sets below, and two workers whom modes bind."""
    linked(put(data / "text.jpg", TEXT), data / "row" / "bad", 1200)
    linked(put(data / "good.jpg", JPEG), data / "row" / "good", 4)
    for name, content in {"a/1": JPEG, "b/1": TEXT, "b/2": CUT, "c/1": JPEG, "c/2": JPEG, "d/1": TEXT}.items():
        put(data / "mixed" / f"{name}.jpg", content)
    numbered(data / "photos", 26)
    shutil.copytree(data / "photos", data / "spoiled")
    for file in sorted((data / "spoiled").glob("*/*"))[24:]:  # what the first of four ranks gets last
        file.write_bytes(TEXT)
    linked(put(data / "one.jpg", encode(noise(48, 64), "JPEG")), data / "same" / "x", 40)
    cut = {"x/cut.png": encode(noise(64, 96))[:5000], "x/page.jpg": b"<html>404</html>", "z/caf\udce9.jpg": CUT}
    for name, content in cut.items():
        put(data / "named" / name, content)
    for i in range(30):
        put(data / "named" / "y" / f"{i:02}.jpg", JPEG)
    crops = [{"random_resized_crop": {"size": SIZE}}, "random_horizontal_flip"]
    streams = {
        "row": stream(data / "row", chunk=64),
        "mixed": stream(data / "mixed"),
        "one": stream({"folder": str(data / "photos"), "limit": 1}),
        "ten": stream({"folder": str(data / "photos"), "limit": 10}),
        "photos": stream(data / "photos", shuffle=True),
        "spoiled": stream(data / "spoiled"),
        "same": stream(data / "same", transforms=crops),
        "named": stream(data / "named"),
        "chosen": stream(chosen(data), shuffle=True),
        "class": stream({"folder": str(data / "photos"), "classes": ["class1"]}),
    }
    made = Daemon(data, streams, workers=2, slots=4)
    made.start(prefix=["setpriv", POWERLESS] if ALL_POWERFUL else [])
    try:
        with open_loader(made, "one") as loader:
            next(iter(loader))  # so that its workers are no test's
        yield made
    finally:
        made.stop()


def chosen(data: Path) -> dict[str, Any]:
    """A list of every other picture, the last first."""
    files = sorted((data / "photos").glob("*/*"))[::-2]
    with (data / "chosen.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label", "number"])
        rows.writerows([file.relative_to(data / "photos"), file.parent.name, file.stem] for file in files)
    return {"list": str(data / "chosen.csv"), "root": str(data / "photos")}


def open_loader(daemon: Daemon, name: str, **more: Any) -> Loader:
    usual = {"batch_size": 8, "output": "numpy", "dtype": "uint8", "layout": "NHWC", "rank": 0, "world_size": 1}
    return Loader(daemon.address, stream=name, **(usual | more))


def ranks(daemon: Daemon, name: str, count: int, epochs: int, **more: Any) -> list[list[list[Batch]]]:
    """What each rank gets in each epoch: [epoch][rank][step]."""
    got: list[list[list[Batch]]] = [[] for _ in range(epochs)]
    for rank in range(count):
        with open_loader(daemon, name, rank=rank, world_size=count, **more) as loader:
            for epoch in got:
                epoch.append(list(loader))
    return got


def valid(batches: list[Batch]) -> list[int]:
    return [int(i) for batch in batches for i in batch.indices[batch.valid]]


def pictures(batches: list[Batch]) -> list[str]:
    return [hashlib.sha256(image).hexdigest() for batch in batches for image in batch.images]


# -- bad files ------------------------------------------------------------------------------------------------


def test_many_bad_files_in_a_row_are_passed_over_one_by_one(daemon: Daemon) -> None:
    with open_loader(daemon, "row", max_bad=1.0, batch_size=64) as loader:
        batches = list(loader)
        counts = loader.stats()["epochs"][0]
    assert valid(batches) == [1200, 1201, 1202, 1203]
    assert Counter(r.index for batch in batches for r in batch.rejects) == dict.fromkeys(range(1200), 1)
    assert (counts["delivered"], counts["rejected"]) == (4, 1200)
    log = daemon.log.read_text()
    assert log.count("stream row: bad picture: ") == 100 and "`headrace verify` lists them" in log


@pytest.mark.parametrize("policy", ["skip", "mask", "replace"])
def test_many_bad_files_in_a_row_end_the_epoch_soon_unless_asked_otherwise(daemon: Daemon, policy: str) -> None:
    with open_loader(daemon, "row", on_bad_sample=policy) as loader:
        batches = iter(loader)
        with pytest.raises(TooManyRejects, match="row/bad/00"):
            for _ in range(4):  # 16 may be bad
                next(batches)


@pytest.mark.parametrize("policy", ["skip", "mask", "replace"])
def test_a_bad_file_at_the_end_takes_nobody_elses_place_unseen(daemon: Daemon, policy: str) -> None:
    with open_loader(daemon, "mixed", on_bad_sample=policy) as loader:
        [batch] = loader
    assert valid([batch]) == [0, 3, 4] and sorted(r.index for r in batch.rejects) == [1, 2, 5]
    assert len(batch.valid) == (3 if policy == "skip" else 6)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_every_reject_names_file_index_and_reason_in_the_logs_of_both(
    daemon: Daemon, data: Path, home: Path, transport: str
) -> None:
    with Trainer(daemon.address, home / "a.jsonl", stream="named", transport=transport) as trainer:
        trainer.wait()
    log = daemon.log.read_text()
    for name, index in (("x/cut.png", 0), ("x/page.jpg", 1), (r"z/caf\xe9.jpg", 32)):
        assert log.count(f"stream named: bad picture: {data}/named/{name} (index {index}): ") == 1
    said = trainer.record.with_suffix(".log").read_text()
    assert f"{data}/named/x/cut.png (index 0, position 0): decode: PNG" in said
    assert f"{data}/named/x/page.jpg (index 1, position 1): probe: not a picture that is decoded, but HTML" in said
    assert rf"{data}/named/z/caf\xe9.jpg (index 32, position 32): decode: JPEG" in said
    assert [reject[0] for batch in trainer.batches for reject in batch["rejects"]] == [0, 1, 32]


def test_what_cannot_be_read_any_more_ends_the_trainer_by_name(daemon: Daemon, data: Path, home: Path) -> None:
    closed = data / "named" / "y" / "29.jpg"
    closed.chmod(0)
    try:
        with Trainer(daemon.address, home / "a.jsonl", stream="named", epochs=9) as trainer:
            assert trainer.process is not None and trainer.process.wait(60) == 1
    finally:
        closed.chmod(0o644)
    for log in (trainer.record.with_suffix(".log"), daemon.log):
        assert f"sample 31, {closed}: cannot be read" in log.read_text()


def test_an_error_about_a_name_that_is_no_text_reaches_the_trainer(daemon: Daemon, data: Path) -> None:
    file, kept = data / "named" / "z" / "caf\udce9.jpg", data / "kept"
    with open_loader(daemon, "named") as loader:
        loader.set_epoch(20)
        file.rename(kept)
        try:
            with pytest.raises(DatasetError) as caught:
                list(loader)
        finally:
            kept.rename(file)
    assert rf"{data}/named/z/caf\xe9.jpg: changed since it was indexed: it does not exist" in str(caught.value)


def test_two_damaged_files_among_forty_photos_cost_two_pictures(
    extra_samples: Path, hard_samples: Path, home: Path
) -> None:
    photos = sorted((extra_samples / "photos").glob("*/*"))[:40]
    for i, file in enumerate(photos):
        put(home / "data" / "ab"[i // 20] / f"{i}{file.suffix}", file.read_bytes())
    for name in ("jpeg_truncated/cut_50pct.jpg", "jpeg_corrupt/bad_huffman_counts.jpg"):
        put(home / "data" / "b" / f"30-{Path(name).name}", (hard_samples / name).read_bytes())
    listed = sorted((home / "data").glob("*/*"))
    bad = [i for i, file in enumerate(listed) if "-" in file.name]
    with Daemon(home, {"s": stream(home / "data", shuffle=True)}, workers=1, slots=3) as daemon:
        with Trainer(daemon.address, home / "a.jsonl", batch_size=8, epochs=2) as trainer:
            trainer.wait()
        counted = daemon.log.read_text().count("bad picture: ")
    for epoch in range(2):
        batches = [batch for batch in trainer.batches if batch["epoch"] == epoch]
        rows = [row for b in batches for row in zip(b["indices"], b["labels"], b["valid"], strict=True)]
        assert sorted(rows) == [(i, int(i >= 20), True) for i in range(42) if i not in bad]
        assert sorted(reject[0] for b in batches for reject in b["rejects"]) == bad
    assert counted == 2


# -- epochs and ranks -----------------------------------------------------------------------------------------


def test_a_state_goes_on_at_the_very_next_batch_with_another_daemon_and_other_workers(
    daemon: Daemon, data: Path, home: Path
) -> None:
    with open_loader(daemon, "photos", batch_size=3) as loader:
        loader.set_epoch(5)
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = list(batches)
    with (
        Daemon(home, {"photos": stream(data / "photos", shuffle=True)}, workers=1, slots=2) as other,
        open_loader(other, "photos", batch_size=3) as loader,
    ):
        loader.load_state_dict(state)
        again = list(loader)
    assert len(again) == 4 and pictures(again) == pictures(rest)
    assert [(b.indices.tolist(), b.labels.tolist()) for b in again] == [
        (b.indices.tolist(), b.labels.tolist()) for b in rest
    ]


@pytest.mark.parametrize("last_batch", ["drop", "partial", "pad"])
@pytest.mark.parametrize(("name", "samples"), [("one", 1), ("ten", 10), ("photos", 26)])
def test_ranks_share_what_they_do_not_divide_without_overlap(
    daemon: Daemon, name: str, samples: int, last_batch: str
) -> None:
    if last_batch == "drop" and samples < 4 * 3:
        with pytest.raises(ConfigError, match=f"{samples} samples.* 4 "):
            ranks(daemon, name, 4, 1, batch_size=3, last_batch=last_batch)
        return
    for epoch in ranks(daemon, name, 4, 3, batch_size=3, last_batch=last_batch):
        assert len({len(batches) for batches in epoch}) == 1
        seen = Counter(i for batches in epoch for i in valid(batches))
        assert set(seen.values()) == {1}
        assert len(seen) == (samples // 12 * 12 if last_batch == "drop" else samples)
        sizes = {len(batch.valid) for batches in epoch for batch in batches}
        assert sizes <= ({1, 2, 3} if last_batch == "partial" else {3})


@pytest.mark.parametrize("name", ["photos", "spoiled"])
def test_no_rank_gets_an_empty_batch(daemon: Daemon, name: str) -> None:
    for epoch in ranks(daemon, name, 4, 4, batch_size=6, last_batch="partial"):
        assert {len(batches) for batches in epoch} == {2}
        sizes = [len(batch.images) for batches in epoch for batch in batches]
        assert min(sizes) >= 1 and max(sizes) <= 6
        rejected = {r.index for batches in epoch for batch in batches for r in batch.rejects}
        seen = Counter(i for batches in epoch for i in valid(batches))
        assert seen == dict.fromkeys(set(range(26)) - rejected, 1)
        assert len(rejected) == (2 if name == "spoiled" else 0)


def test_each_epoch_has_another_order_and_another_split_and_both_come_again(daemon: Daemon) -> None:
    first, second = (ranks(daemon, "photos", 2, 3, batch_size=4) for _ in range(2))
    orders = [[valid(batches) for batches in epoch] for epoch in first]
    assert orders == [[valid(batches) for batches in epoch] for epoch in second]
    assert all(sorted(a + b) == list(range(26)) for a, b in orders)
    assert len({tuple(a + b) for a, b in orders}) == 3 and len({frozenset(a) for a, _ in orders}) == 3


def test_no_crop_comes_twice_whoever_renders_it(daemon: Daemon, home: Path) -> None:
    with open_loader(daemon, "same") as loader:
        epochs = [pictures(list(loader)) for _ in range(2)]
    assert len(set(epochs[0])) == len(set(epochs[1])) == 40 and not set(epochs[0]) & set(epochs[1])
    truth = Truth(daemon.config, home / "cache", "same")  # by one process
    assert [digest[:16] for digest in epochs[1]] == [digest for _, _, digest in truth.rows(1)]


def test_ranks_share_the_samples_of_a_list_with_its_labels(daemon: Daemon, data: Path) -> None:
    files = sorted((data / "photos").glob("*/*"))[::-2]
    for epoch in ranks(daemon, "chosen", 2, 2, batch_size=4):
        rows = [
            (int(index), int(label), number)
            for batches in epoch
            for batch in batches
            for index, label, ok, number in zip(
                batch.indices, batch.labels, batch.valid, batch.extra["number"], strict=True
            )
            if ok
        ]
        assert sorted(rows) == [(i, int(file.parent.name[-1]), file.stem) for i, file in enumerate(files)]


def test_ranks_share_a_class_that_was_chosen(daemon: Daemon) -> None:
    [epoch] = ranks(daemon, "class", 2, 1, batch_size=4)
    assert [valid(batches) for batches in epoch] == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12]]
    assert {int(label) for batches in epoch for batch in batches for label in batch.labels} == {0}


# -- classes and names ----------------------------------------------------------------------------------------


def test_a_class_of_which_nothing_is_good_keeps_its_number(daemon: Daemon) -> None:
    with open_loader(daemon, "mixed") as loader:
        assert loader.classes == ["a", "b", "c", "d"]
        [batch] = loader
    assert batch.labels.tolist() == [0, 2, 2]


#: All that a name may hold beside letters; each is a file of its own.
NAMES = [
    "a b.jpg", " leading.jpg", "trailing .jpg", "tab\there.jpg", "comma, here.jpg", 'quote"d.jpg', "it's.jpg",
    "label 0.jpg", "#.jpg", "50%.jpg", "back\\slash.jpg", "two\nlines.jpg", "caf\udce9.jpg", "naïve ✓.jpg",
    "{0..9}.jpg", "-n.jpg", "a|b.jpg", "a;b.jpg", "x=1&y.jpg", "[1].jpg", "~.jpg", "$HOME.jpg", "new\r.jpg",
]  # fmt: skip


@pytest.fixture
def names(home: Path) -> Path:
    for i, name in enumerate(NAMES):
        put(home / "names" / f"class {i % 3}" / name, encode(noise(8, 8, seed=i)))
    return home / "names"


def list_of(names: Path, form: str) -> dict[str, Any]:
    files = sorted((os.fspath(file.relative_to(names)) for file in names.glob("*/*")), key=os.fsencode)
    file = names.parent / f"names.{form}"
    if form == "csv":
        with file.open("w", newline="", encoding="utf-8", errors="surrogateescape") as out:
            rows = csv.writer(out)
            rows.writerow(["label", "path"])
            rows.writerows([path.partition("/")[0], path] for path in files)
    else:
        lines = (json.dumps({"path": path, "label": path.partition("/")[0]}, ensure_ascii=False) for path in files)
        file.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogateescape")
    return {"list": str(file), "root": str(names)}


def listing(dataset: dict[str, Any] | Path, home: Path, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """What `ls` prints, in columns, and the digests of an epoch's pictures."""
    config = home / "names.yaml"
    config.write_text(yaml.safe_dump({"streams": {"s": stream(dataset)}}))
    cli.app(["ls", str(config), "s"], standalone_mode=False)
    lines = [line.split("\t") for line in capsys.readouterr().out.split("\n")[:-1]]
    rows = Truth(config, home / "truth", "s").rows(0)
    return [[*line[1:], digest] for line, (_, _, digest) in zip(lines, rows, strict=True)]


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_names_of_any_kind_are_the_same_from_a_list_as_from_the_folder(
    names: Path, home: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from_folder = listing(names, home, capsys)
    assert len(from_folder) == len(NAMES) and len({digest for *_, digest in from_folder}) == len(NAMES)
    assert sorted(listing(list_of(names, form), home, capsys)) == sorted(from_folder)


def test_only_the_last_ending_of_a_files_name_is_its_ending(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("val.v2/a.b.c.jpg", "train.v1/a.jpg", "train.v1/photo.jpg.jpg", "train.v1/Track 2.0 (Clean).jpg"):
        put(home / "dots" / name, encode(noise(8, 8, seed=len(name))))
    assert [line[:2] for line in listing(home / "dots", home, capsys)] == [
        ["0", "train.v1/Track 2.0 (Clean).jpg"],
        ["0", "train.v1/a.jpg"],
        ["0", "train.v1/photo.jpg.jpg"],
        ["1", "val.v2/a.b.c.jpg"],
    ]
