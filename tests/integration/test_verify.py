"""`headrace verify`: what it lists is what a run rejects, file by file and reason by reason."""

from __future__ import annotations

import csv
import hashlib
import io
import os
import pty
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pictures import encode, noise
from PIL import Image
from service import stream

import headrace
from headrace.server.findings import COLUMNS

HEADRACE = [sys.executable, "-m", "headrace.server"]
HEAD = ",".join(COLUMNS)
LIMITS = {"max_pixels": 200_000, "max_file_bytes": 100_000}

Rows = list[tuple[str, int, str, str, str]]


def verify(config: Path, *arguments: object, status: int) -> tuple[str, str]:
    """Standard output and standard error of a run that ends with this status."""
    command = [*HEADRACE, "verify", str(config), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, timeout=100, check=False)
    out, err = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == status, err
    assert "Traceback" not in err
    return out, err


def rows(text: str) -> Rows:
    head, *lines = csv.reader(io.StringIO(text, newline=""))
    assert tuple(head) == COLUMNS
    return [(name, int(index), path, stage, reason) for name, index, path, stage, reason in lines]


def write(home: Path, streams: dict[str, Any], name: str = "headrace", **more: Any) -> Path:
    file = home / f"{name}.yaml"
    file.write_text(yaml.safe_dump({"workers": {"processes": 1}, "streams": streams, **more}, sort_keys=False))
    return file


def bad_files(photo: bytes) -> dict[str, bytes]:
    """One of each kind that is no picture, only half of one, or over `LIMITS`."""
    jpeg, png = encode(noise(96, 128), "JPEG", quality=90), encode(noise(80, 60))
    return {
        "empty.jpg": b"",
        "text.jpg": b"no picture at all\n" * 40,
        "page.png": b"<!DOCTYPE html><html><body>404</body></html>",
        "pointer.jpg": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1\n",
        "new.heic": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64),
        "zeros.jpg": bytes(5000),
        "head only.jpg": jpeg[:200],
        "cut.jpg": jpeg[: len(jpeg) * 2 // 3],
        "cut and closed.jpg": jpeg[: len(jpeg) * 2 // 3] + b"\xff\xd9",
        "photo.jpg": photo[: len(photo) // 2],
        "cut.png": png[: len(png) // 2],
        "damaged.png": png[:40] + bytes(200) + png[240:],
        "cut.webp": encode(noise(64, 64), "WEBP")[:600],
        "float.tif": encode(Image.fromarray(np.linspace(0, 1, 600, dtype=np.float32).reshape(20, 30)), "TIFF"),
        "many pixels.png": encode(Image.new("RGB", (500, 401))),
        "many bytes.bmp": encode(noise(200, 200), "BMP"),
        r"odd\name" + "\n\t\udcff.jpg": b"\xff\xd8\xff",
    }


@pytest.fixture
def mixed(photos: Path, home: Path) -> Path:
    """Good photos in three classes and bad files of every kind among them."""
    folder = home / "mixed"
    bad = bad_files((photos / "sea" / "000.jpg").read_bytes())
    for name in ("meadow", "sea", "town"):
        (folder / name).mkdir(parents=True)
        for file in sorted((photos / name).iterdir())[:8]:
            os.link(file, folder / name / file.name)
    for i, (name, data) in enumerate(bad.items()):
        (folder / ("meadow", "sea", "town")[i % 3] / name).write_bytes(data)
    return folder


def rejected(config: Path, epochs: int) -> list[Rows]:
    """What a Loader gets rejected in each epoch, by line of the listing."""
    folder: str = yaml.safe_load(config.read_text())["streams"]["train"]["dataset"]["folder"]
    root = os.path.realpath(folder)
    with headrace.Loader(config, batch_size=5, output="numpy", max_bad=1.0, on_bad_sample="mask") as loader:
        return [
            sorted(
                ("train", r.index, r.path.removeprefix(f"{root}/"), r.stage, r.reason)
                for batch in loader
                for r in batch.rejects
            )
            for _ in range(epochs)
        ]


# -- agreement ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chunk", "processes", "serving"), [(1, 3, 1), (7, 1, 2), (32, 2, 3)])
def test_what_is_listed_is_what_a_run_rejects_in_every_epoch(
    mixed: Path, home: Path, chunk: int, processes: int, serving: int
) -> None:
    # Scaled decoding passes over rows and frequencies, but over no damage.
    streams = {"train": stream(mixed, chunk=chunk, seed=chunk, decode=LIMITS | {"dct_scaling": chunk == 7})}
    out, _ = verify(write(home, streams, workers={"processes": processes}), status=1)
    listed = rows(out)
    assert len(listed) == len(bad_files(b"")) and {row[3] for row in listed} == {"read", "probe", "decode"}
    epochs = rejected(write(home, streams, "serving", workers={"processes": serving}), 2)
    assert epochs == [listed, listed]


def test_over_the_hard_samples_it_lists_what_has_to_be_rejected_and_what_a_run_rejects(
    extra_samples: Path, home: Path
) -> None:
    hard = extra_samples / "hard"
    if not (hard / "INDEX.tsv").is_file():
        pytest.skip("no hard samples")
    config = write(home, {"train": stream(hard, dataset={"folder": str(hard), "allow_empty": True})})
    listed = rows(verify(config, status=1)[0])
    assert rejected(config, 1) == [listed]
    with (hard / "INDEX.tsv").open(encoding="utf-8") as file:
        table = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        verdicts = {row["path"]: row["verdict"] for row in table}
    found = {verdicts.get(row[2]) for row in listed}
    assert "decode" not in found
    names = {line.split("\t")[2] for line in ls(config)}
    assert {path for path in names if verdicts.get(path) == "reject"} <= {row[2] for row in listed}


def ls(config: Path) -> list[str]:
    done = subprocess.run([*HEADRACE, "ls", str(config), "train"], capture_output=True, timeout=60, check=True)
    return done.stdout.decode().splitlines()


def test_a_list_and_shards_of_the_files_are_judged_line_by_line_as_the_folder_is(mixed: Path, home: Path) -> None:
    files = [line.split("\t")[2] for line in ls(write(home, {"train": stream(mixed)}))]
    files = [name for name in files if "\\" not in name]
    twice = [*files, *reversed(files)]
    (home / "all.csv").write_text("".join(f"{line}\n" for line in ["path", *twice]))
    with tarfile.open(home / "all.tar", "w") as tar:
        for i, name in enumerate(files):
            tar.add(mixed / name, f"{i:03}.{name.rpartition('.')[2]}")
    sources: dict[str, Any] = {
        "folder": {"folder": str(mixed)},
        "list": {"list": str(home / "all.csv"), "root": str(mixed)},
        "shards": {"shards": str(home / "all.tar")},
    }
    config = write(home, {name: stream(mixed, dataset=at, decode=LIMITS) for name, at in sources.items()})
    assert "never written to" in verify(config, "-o", home / "all.csv", status=2)[1]
    assert verify(config, "-o", home / "rejects.csv", status=1)[0] == ""  # beside them is not in them
    found = {name: [row for row in rows((home / "rejects.csv").read_text()) if row[0] == name] for name in sources}
    of = {row[2]: (row[3], row[4]) for row in found["folder"] if "\\" not in row[2]}
    assert len(of) == len(bad_files(b"")) - 1
    assert [(row[1], row[2]) for row in found["list"]] == [(i, name) for i, name in enumerate(twice) if name in of]
    assert all((row[3], row[4]) == of[row[2]] for row in found["list"])
    shards = {files[row[1]]: (row[3], row[4]) for row in found["shards"]}
    assert shards == of
    assert all(row[2].startswith("all.tar/") for row in found["shards"])


# -- what it prints and leaves ----------------------------------------------------------------------------------


def test_a_good_data_set_is_status_0_and_an_empty_list(photos: Path, home: Path) -> None:
    out, err = verify(write(home, {"train": stream(photos)}), status=0)
    assert out == f"{HEAD}\n"
    assert "stream train: 48 samples, all good" in err


def test_a_data_set_of_bad_files_only_is_listed_whole(home: Path) -> None:
    (home / "bad" / "a").mkdir(parents=True)
    for name, data in bad_files(b"\xff\xd8").items():
        (home / "bad" / "a" / name).write_bytes(data)
    config = write(home, {"train": stream(home / "bad", decode=LIMITS)})
    assert len(rows(verify(config, status=1)[0])) == len(bad_files(b""))


def test_with_o_the_list_goes_to_the_file_alone_and_has_the_paths_of_ls(mixed: Path, home: Path) -> None:
    config = write(home, {"train": stream(mixed, decode=LIMITS)})
    printed, _ = verify(config, status=1)
    out, err = verify(config, "-o", home / "rejects.csv", status=1)
    assert out == ""
    assert (home / "rejects.csv").read_text() == printed
    listed = rows(printed)
    lines = {int(line.split("\t")[0]): line.split("\t")[2] for line in ls(config)}
    assert [(row[1], row[2]) for row in listed] == [(i, lines[i]) for i in sorted(row[1] for row in listed)]
    count = len(bad_files(b""))
    (said,) = re.findall(r"stream train: (\d+) samples, found: (.*)", err)
    assert int(said[0]) == 24 + count
    assert sum(int(number) for number in re.findall(r"\d+", said[1])) == count


def test_all_streams_are_verified_or_the_one_that_is_named(mixed: Path, photos: Path, home: Path) -> None:
    streams = {"good": stream(photos), "bad": stream(mixed, decode=LIMITS), "again": stream(mixed, seed=1)}
    config = write(home, streams)
    every = rows(verify(config, status=1)[0])
    assert list(dict.fromkeys(row[0] for row in every)) == ["bad", "again"]
    # Without limits two files less are bad.
    assert sum(row[0] == "bad" for row in every) == sum(row[0] == "again" for row in every) + 2
    assert rows(verify(config, "--stream", "again", status=1)[0]) == [row for row in every if row[0] == "again"]


def test_a_wrong_configuration_or_stream_is_status_2(photos: Path, home: Path) -> None:
    config = write(home, {"train": stream(photos)})
    assert 'there is no "trian", did you mean train?' in verify(config, "--stream", "trian", status=2)[1]
    assert "no such file" in verify(home / "missing.yaml", status=2)[1]
    assert "Usage" in verify(config, "--wrong", status=2)[1]


def test_the_data_set_is_left_as_it_was_and_the_cache_without_progress(mixed: Path, home: Path) -> None:
    def state() -> dict[Path, tuple[str, int]]:
        files = [mixed, *mixed.rglob("*")]
        data = {file: file.read_bytes() if file.is_file() else b"" for file in files}
        return {file: (hashlib.sha256(data[file]).hexdigest(), file.stat().st_mtime_ns) for file in files}

    before = state()
    config = write(home, {"train": stream(mixed)})
    for place in (mixed / "rejects.csv", mixed / "sea" / "rejects.csv"):
        assert "never written to" in verify(config, "-o", place, status=2)[1]
    verify(config, status=1)
    assert state() == before
    assert [file.suffix for file in (home / "cache" / "headrace").iterdir()] == [".index"]


def test_a_cache_in_the_data_set_is_not_used_and_the_run_says_so(mixed: Path, home: Path) -> None:
    config = write(home, {"train": stream(mixed)}, cache_dir=str(mixed / "sea"))
    out, err = verify(config, status=1)
    assert rows(out)
    assert "this run starts anew if it is interrupted" in err
    assert not list(mixed.rglob("*.index")) and not list(mixed.rglob("*.verify*"))


def test_files_that_changed_since_they_were_indexed_are_errors_and_all_others_are_judged(
    mixed: Path, home: Path
) -> None:
    config = write(home, {"train": stream(mixed, decode=LIMITS)})
    before = rows(verify(config, status=1)[0])  # which makes the index
    grown, touched, cut = (mixed / "sea" / f"00{i}.jpg" for i in range(3))
    replace_in_place(grown, grown.read_bytes() + b"\0")
    replace_in_place(cut, cut.read_bytes()[:-1])
    replace_in_place(touched, touched.read_bytes())
    out, err = verify(config, status=1)
    after = rows(out)
    errors = {row[2]: row[4] for row in after if row[3] == "error"}
    assert set(errors) == {f"sea/00{i}.jpg" for i in range(3)}
    assert all("changed since it was indexed" in reason and "--reindex" in reason for reason in errors.values())
    assert "size" in errors["sea/000.jpg"] and "modified" in errors["sea/001.jpg"]
    assert [row for row in after if row[3] != "error"] == before
    assert "3 error" in err


def replace_in_place(file: Path, data: bytes) -> None:
    """Other content under the same name; the photo it was linked to stays what it is."""
    folder = file.parent.stat()
    file.unlink()
    file.write_bytes(data)
    os.utime(file.parent, ns=(folder.st_atime_ns, folder.st_mtime_ns))


def test_who_reads_only_the_head_of_the_list_disturbs_nothing(mixed: Path, home: Path) -> None:
    config = write(home, {"train": stream(mixed)})
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [*HEADRACE, "verify", str(config)], stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False
        )
    finally:
        os.close(writer)
    assert done.returncode == 1
    assert b"Broken pipe" not in done.stderr and b"Traceback" not in done.stderr


def test_a_list_that_cannot_be_written_is_not_lost(mixed: Path, home: Path) -> None:
    config = write(home, {"train": stream(mixed)})
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*HEADRACE, "verify", str(config)], stdout=full, stderr=subprocess.PIPE, timeout=60, check=False
        )
    assert done.returncode == 1
    assert b"headrace: standard output: No space left on device" in done.stderr
    out, err = verify(config, status=1)  # nothing is judged a second time
    count = len(ls(config))
    assert f"goes on where an interrupted run was, after {count} of {count} samples" in err
    assert rows(out)


def test_on_a_terminal_it_shows_how_far_it_is(mixed: Path, home: Path) -> None:
    config = write(home, {"train": stream(mixed)})
    ours, theirs = pty.openpty()
    shown = b""
    try:
        with subprocess.Popen([*HEADRACE, "verify", str(config)], stdout=subprocess.PIPE, stderr=theirs) as process:
            os.close(theirs)
            try:
                while data := os.read(ours, 4096):
                    shown += data
            except OSError:
                pass  # EIO: its other end is closed
            assert process.stdout is not None
            out = process.stdout.read()
    finally:
        os.close(ours)
    assert process.returncode == 1
    assert b"verifying train" in shown
    assert b"\x1b" not in out and rows(out.decode())
