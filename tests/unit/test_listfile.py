"""What a list names: any path, label and value that can be written down, and the numbers of lines that are no good."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import DatasetError
from headrace.pipeline import files, rows
from headrace.pipeline.backend import make
from headrace.pipeline.dataset import open_index
from headrace.pipeline.folder import list_folder
from headrace.pipeline.index import Index, Listing, Paths, shown
from headrace.pipeline.listfile import list_file
from headrace.pipeline.render import ChunkRenderer
from headrace.pipeline.spec import Config, Dataset
from headrace.slots import Ring, Status


@pytest.fixture
def root(home: Path) -> Path:
    made = home / "data"
    made.mkdir()
    for name in ("a.jpg", "b.jpg", "deep/c.png"):
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_bytes(name.encode())
    return made


def write(root: Path, text: str | bytes, name: str = "list.csv") -> Path:
    (root / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return root / name


def jsonl(*values: object) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def listed(file: Path, **options: Any) -> Listing:
    return list_file(Dataset(list=file, **options))


def pieces(paths: Paths) -> list[bytes]:
    return [paths.blob[a:b] for a, b in itertools.pairwise(paths.offsets.tolist())]


def paths(listing: Listing) -> list[str]:
    return [shown(path) for path in pieces(listing.paths)]


def values(listing: Listing) -> list[Any]:
    return [] if listing.texts is None else [msgspec.msgpack.decode(text) for text in pieces(listing.texts)]


def refusal(file: Path, **options: Any) -> str:
    with pytest.raises(DatasetError) as caught:
        listed(file, **options)
    message = str(caught.value)
    assert message.startswith(shown(os.fsencode(file)))
    return message


# -- CSV ------------------------------------------------------------------------------------------------------


def test_a_csv_line_is_a_sample_with_path_label_and_further_values(root: Path) -> None:
    listing = listed(write(root, 'path,label,note\nb.jpg,dog,1\ndeep/c.png,cat,"two, words"\nb.jpg,dog,\n'))
    assert paths(listing) == ["b.jpg", "deep/c.png", "b.jpg"]
    assert (listing.classes, listing.labels.values.tolist()) == (["cat", "dog"], [1, 0, 1])
    assert (listing.columns, values(listing)) == (["note"], [["1"], ["two, words"], [""]])
    assert listing.sizes.tolist() == [5, 10, 5]
    assert listing.mtimes_ns.tolist()[1] == (root / "deep/c.png").stat().st_mtime_ns
    assert (listing.root, listing.notices, listing.counts) == (os.fsencode(root), [], {})


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_csv_of_any_system_is_read(root: Path, end: str, mark: str) -> None:
    listing = listed(write(root, end.join([f"{mark}path,label", "", "a.jpg,1", "", '"b.jpg",2', ""])))
    assert (paths(listing), listing.labels.values.tolist()) == (["a.jpg", "b.jpg"], [1, 2])
    assert paths(listed(write(root, end.join(["path,label", "a.jpg,1"])))) == ["a.jpg"], "no line's end at the end"


def test_columns_say_which_is_which(root: Path) -> None:
    file = write(root, "label,x,file,y\n3,1.5,a.jpg,2\n4,2.5,b.jpg,3\n")
    listing = listed(file, columns={"path": "file", "label": ["x", "y"]})
    assert listing.labels.values.tolist() == [[1.5, 2], [2.5, 3]] and listing.labels.values.dtype == np.float32
    assert (listing.columns, values(listing)) == (["label"], [["3"], ["4"]])
    listing = listed(file, columns={"path": "file", "label": "x"}, labels="text")
    assert listing.labels.text and values(listing) == [["1.5", "3", "2"], ["2.5", "4", "3"]]


def test_a_list_without_labels_has_minus_one(root: Path) -> None:
    for file in (
        write(root, "path\na.jpg\nb.jpg\n"),
        write(root, jsonl({"path": "a.jpg"}, {"path": "b.jpg"}), "l.jsonl"),
    ):
        listing = listed(file)
        assert (listing.labels.values.tolist(), listing.classes, listing.texts) == ([-1, -1], [], None)
        with pytest.raises(DatasetError, match="classes: chooses by the names of classes, but this list has no labels"):
            listed(file, classes=["a"])
        assert '"label"' in refusal(file, labels="int")
        assert '"label"' in refusal(file, columns={"label": "label"})


@pytest.mark.parametrize("header", ["path, label", "path,Label"])
def test_a_list_whose_labels_are_called_otherwise_says_that_it_has_none(root: Path, header: str) -> None:
    listing = listed(write(root, f"{header}\na.jpg,x\n"))
    assert listing.labels.values.tolist() == [-1]
    (notice,) = listing.notices
    assert notice.startswith('each label is -1, for there is no "label"') and f'"{header[5:]}"' in notice


# -- JSON Lines -------------------------------------------------------------------------------------------------


def test_a_json_line_is_a_sample_with_whatever_else_it_holds(root: Path) -> None:
    text = jsonl(
        {"path": "a.jpg", "label": ["x", "y"], "box": [1, 2.5, None], "more": {"k": True}},
        {"label": [], "path": "b.jpg"},
        {"path": "a.jpg", "label": ["y"], "late": "é", "box": 3},
    )
    listing = listed(write(root, "\n" + text.replace("\n", "\r\n\n"), "l.jsonl"))
    assert paths(listing) == ["a.jpg", "b.jpg", "a.jpg"] and listing.classes == ["x", "y"]
    assert listing.labels.offsets is not None and listing.labels.offsets.tolist() == [0, 2, 2, 3]
    assert listing.labels.values.tolist() == [0, 1, 1]
    assert listing.columns == ["box", "more", "late"]
    assert values(listing) == [[[1, 2.5, None], {"k": True}, None], [None, None, None], [3, None, "é"]]


def test_json_lines_may_have_several_numbers_as_label_and_other_names(root: Path) -> None:
    text = jsonl({"img": "a.jpg", "x": 1, "y": 2, "label": "l"}, {"y": 4, "x": 3, "img": "b.jpg"})
    listing = listed(write(root, text, "l.ndjson"), columns={"path": "img", "label": ["y", "x"]})
    assert listing.labels.values.tolist() == [[2, 1], [4, 3]]
    assert (listing.columns, values(listing)) == (["label"], [["l"], [None]])


@pytest.mark.parametrize("name", ["l.jsonl", "l.JSON", "l.ndjson", "list", "list.txt", "l.manifest"])
def test_json_lines_are_known_by_ending_or_content(root: Path, name: str) -> None:
    assert paths(listed(write(root, '\ufeff {"path": "a.jpg"}\n', name))) == ["a.jpg"]
    if "." not in name or name.endswith((".txt", ".manifest")):
        assert paths(listed(write(root, "path\na.jpg\n", name))) == ["a.jpg"]


# -- parity, purity, bad input ----------------------------------------------------------------------------------


def as_list(folder: Path, file: Path) -> Path:
    """The listing of a folder as a CSV file."""
    index = list_folder(Dataset(folder=folder))
    with file.open("w", newline="", encoding="utf-8", errors="surrogateescape") as out:
        writer = csv.writer(out)
        writer.writerow(["path", "label"])
        for path, label in zip(pieces(index.paths), index.labels.values.tolist(), strict=True):
            writer.writerow([path.decode("utf-8", "surrogateescape"), index.classes[label]])
    return file


def test_list_parity_with_the_folder_of_the_same_files(photos: Path, home: Path) -> None:
    listing = listed(as_list(photos, home / "l.csv"), root=photos)
    folder = list_folder(Dataset(folder=photos))
    assert listing.fingerprint() == folder.fingerprint()
    assert listing.mtimes_ns.tolist() == folder.mtimes_ns.tolist() and listing.root == folder.root


def test_list_parity_of_chunks_byte_by_byte_with_the_folder_of_the_same_files(photos: Path, home: Path) -> None:
    sources = [{"folder": str(photos)}, {"list": str(as_list(photos, home / "l.csv")), "root": str(photos)}]
    epochs = []
    for source in sources:
        transforms = [{"random_resized_crop": {"size": 24}}, "random_horizontal_flip"]
        stream = {"dataset": source, "shuffle": True, "chunk": 20, "transforms": transforms}
        spec = Config.load({"streams": {"s": stream}}).streams["s"]
        backend = make("pillow")
        with contextlib.closing(open_index(spec.dataset, home / "cache")) as index:
            ring = Ring.create(spec.layout(index), 1)
            renderer, view, epoch = ChunkRenderer(spec, index, backend), ring.views[0], []
            for chunk in range(renderer.chunks):
                renderer.render(1, chunk, view)
                n = renderer.rows(chunk)
                assert (view.status[:n] == Status.OK).all()
                epoch.append([f[:n].tobytes() for f in (view.images, view.labels, view.indices)])
            epochs.append((spec.fingerprints(index.data_fingerprint), epoch))
            del view
            ring.close()
        backend.close()
    assert epochs[0] == epochs[1]


def test_list_parity_with_what_the_csv_module_writes(root: Path) -> None:
    odd = [
        "a,b.jpg",
        'q"u"ote.jpg',
        " lead.jpg",
        "trail.jpg ",
        "tab\t.jpg",
        "new\nline.jpg",
        "cr\r.jpg",
        "é.jpg",
        "'.jpg",
    ]
    for name in odd:
        (root / name).touch()
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL):
        out = io.StringIO(newline="")
        csv.writer(out, quoting=quoting).writerows([["path", "label"], *([name, f" {name}"] for name in odd)])
        listing = listed(write(root, out.getvalue()))
        assert [path.decode() for path in pieces(listing.paths)] == odd
        assert [listing.classes[i] for i in listing.labels.values.tolist()] == [f" {name}" for name in odd]


def test_list_purity_of_the_listing_whoever_was_first(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(root, "path,label\n" + "".join(f"{n},{i}\n" for i, n in enumerate(["a.jpg", "deep/c.png"] * 300)))
    once = listed(file)
    monkeypatch.setattr(files, "BATCH", 7)
    monkeypatch.chdir("/")
    again = listed(file)
    assert once.fingerprint() == again.fingerprint()
    assert once.mtimes_ns.tolist() == again.mtimes_ns.tolist() and once.sizes.tolist() == [5, 10] * 300


BAD_CSV = [
    ("path,label\na.jpg\n", "line 2: has 1 field, but the header has 2"),
    ("path,label\na.jpg,1,2\n", "line 2: has 3 fields, but the header has 2"),
    ("path,label\n,1\n", "line 2: the path is empty"),
    ("path,label\na.jpg,\n", "line 2: the label is empty"),
    (
        "path,label\na.jpg,1\nb.jpg,x\n",
        'line 3: label "x" is the name of a class, but that of line 2, "1", is a number',
    ),
    ('path,label\n"a.jpg,1\nb.jpg,2\n', "line 2: a quote opens here and is not closed"),
    ('path,label\na.jpg,1\n"b".jpg,2\n', "line 3: something follows a closing quote"),
    ('path,label\n"x\ny",1,2\na.jpg\n', "line 2: has 3 fields, but the header has 2\n  line 4: has 1 field"),
    ("path,label\na\0.jpg,1\n", r'line 2: "a\u0000.jpg" is no path: it holds a NUL byte'),
    ("path,label\n../data/a.jpg,1\n", "line 2: ../data/a.jpg lies outside"),
    ("path,label\ndeep/../../x,1\n", "line 2: deep/../../x lies outside"),
    ("path,label\n/etc/passwd,1\n", "line 2: /etc/passwd lies outside"),
    ("path,label,note\na.jpg,1,\udce9\n", "line 2: a value is not UTF-8"),
    ("path,label\na.jpg,caf\udce9\n", 'line 2: label "caf\\udce9" is not UTF-8: it holds the byte 0xe9'),
    ("path,label,note\na.jpg,1," + "x" * (1 << 20) + "\n", "line 2: label and further values take 1048582 bytes"),
    ("path,label,note\na.jpg,1," + "x" * ((1 << 20) + 1) + "\n", "line 2: a field is larger than 1048576 characters"),
    ("path,label\nnot.jpg,1\n", "line 2: not.jpg: it does not exist"),
    ("path,label\na.jpg/x,1\n", "line 2: a.jpg/x: it does not exist"),
    ("path,label\ndeep,1\n", "line 2: deep: a folder, not a regular file"),
    ("path,label\n.,1\n", "line 2: .: a folder, not a regular file"),
    ("path,label\n" + "x" * 300 + ",1\n", "its name is too long"),
    ("", "has no header"),
    ("\n\n", "has no header"),
    ("path,label\n", "has no samples (no lines but the header)"),
    ("path,path\na.jpg,b.jpg\n", 'the header has the column "path" 2 times'),
    ("path," + ",".join(map(str, range(1025))) + "\n", 'too many columns: "1024" would be a column more than 1024'),
    ("file,label\na.jpg,1\n", 'has no column "path"; there is "file", "label". `columns: {path: NAME}`'),
    (
        "path;label\na.jpg;1\n",
        'there is "path;label". `columns: {path: NAME}` says which it is; fields are separated by',
    ),
    ("path,caf\udce9\na.jpg,1\n", "the name of the column"),
    ('"path,label\na.jpg,1\n', "line 1: a quote opens here and is not closed"),
]


@pytest.mark.parametrize(("text", "says"), BAD_CSV)
def test_list_bad_input_is_named_with_its_line(root: Path, text: str, says: str) -> None:
    assert says in refusal(write(root, text.encode("utf-8", "surrogateescape")))


BAD_JSON = [
    ('{"path": "a.jpg", "label": 1}\n[]\n', 'line 2: is [], and not an object such as {"path": "a.jpg", "label": 3}'),
    ('{"path": "a.jpg"\n', "line 1: is no JSON: expecting ',' delimiter at column 17"),
    ("a.jpg,1\n", "line 1: is no JSON: expecting value at column 1"),
    ('{"label": 1}\n', 'line 1: has no "path", only "label"'),
    ("{}\n", 'line 1: has no "path"'),
    ('{"path": 3}\n', 'line 1: 3 is no path, but "path" says so'),
    ('{"path": "a.jpg", "label": 1}\n{"path": "a.jpg", "x": 1}\n', 'line 2: has no "label", only "x"'),
    ('{"path": "a.jpg"}\n{"path": "a.jpg", "label": 1}\n', 'line 2: has "label", but the lines before it have none'),
    ('{"path": "a.jpg", "x": {"y": 1, "y": 2}}\n', 'line 1: has the key "y" more than once'),
    ('{"path": "a.jpg", "x": NaN}\n', "line 1: NaN is no JSON"),
    ('{"path": "a.jpg", "x": -Infinity}\n', "line 1: -Infinity is no JSON"),
    ('{"path": "a.jpg", "x": 1e999}\n', "line 1: the number 1e999 is too large"),
    ('{"path": "a.jpg", "x": 9223372036854775808}\n', "line 1: the number 9223372036854775808 does not fit into 64"),
    ('{"path": "a.jpg", "x": -1' + "0" * 9000 + "}\n", "does not fit into 64 bits"),
    ('{"path": "a.jpg", "x": "\\ud800"}\n', "line 1: a value is not UTF-8"),
    ('{"path": "\\ud800"}\n', 'line 1: "\\ud800" is no path'),
    ('{"path": "a.jpg", "x": ' + "[" * 100000 + "]" * 100000 + "}\n", "line 1: is nested too deeply"),
    ('{"path": "a.jpg", "label": null}\n', "line 1: the label is null"),
    ('[{"path": "a.jpg"}]\n', "is one JSON array; JSON Lines have an object on each line"),
]


@pytest.mark.parametrize(("text", "says"), BAD_JSON)
def test_list_bad_input_in_json_is_named_with_its_line(root: Path, text: str, says: str) -> None:
    assert says in refusal(write(root, text, "l.jsonl"))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("path,label\n".encode("utf-16"), "is UTF-16; save it as UTF-8"),
        (b"\x1f\x8b\x08rest", "is compressed; unpack it"),
        (b"PK\x03\x04rest", "is a spreadsheet or a ZIP file"),
        (b"PAR1rest", "is a Parquet file"),
    ],
)
def test_a_file_of_another_kind_is_refused_by_what_it_is(root: Path, data: bytes, says: str) -> None:
    assert says in refusal(write(root, data))


def test_a_line_without_end_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_LINE_LIMIT", 50)
    assert "line 3 is longer than 50 characters" in refusal(write(root, "path\na.jpg\n" + "x" * 51 + "\nb.jpg\n"))


def test_ten_bad_lines_are_named_and_the_others_counted(root: Path) -> None:
    message = refusal(write(root, "path,label\n" + "a.jpg,1\n,2\n" * 23))
    assert ": 23 lines are no good:\n  line 3: the path is empty\n  line 5: " in message
    assert message.endswith("line 21: the path is empty\n  and 13 more") and message.count("\n") == 11
    message = refusal(write(root, "path,label\n" + "a.jpg,1\nno.jpg,2\n" * 23))
    assert "23 lines are no good, for what they name cannot be a sample (`allow_missing: true` leaves" in message
    assert message.endswith("line 21: no.jpg: it does not exist\n  and 13 more")


@pytest.mark.parametrize(("end", "whole"), [("\n", True), ("\r\n", True), ("\r", True), ("", False)])
def test_a_last_line_without_an_end_is_said_as_the_list_may_be_cut(root: Path, end: str, whole: bool) -> None:
    for text, name in ((f"path,label{end or chr(10)}a.jpg,1{end}", "l.csv"), ('{"path": "a.jpg"}' + end, "l.jsonl")):
        notices = listed(write(root, text, name)).notices
        assert notices == ([] if whole else ["its last line has no end: is the list cut, or still being written?"])
    assert "has no samples" in refusal(write(root, "", "l.jsonl"))


def test_a_list_that_is_no_readable_file_is_an_error(root: Path) -> None:
    os.mkfifo(root / "fifo.csv")
    (root / "loop.csv").symlink_to("loop.csv")
    for name, says in (
        ("absent.csv", "no such file or directory"),
        ("deep", "it is not a regular file"),
        ("fifo.csv", "it is not a regular file"),
        ("loop.csv", "too many levels of symbolic links"),
    ):
        assert f"cannot read the list: {says}" in refusal(root / name)
    with pytest.raises(DatasetError, match="/nowhere: cannot read the data set: no such file"):
        listed(write(root, "path\na.jpg\n"), root=root / "nowhere")
    with pytest.raises(DatasetError, match="a.jpg: cannot read the data set: it is not a folder"):
        listed(write(root, "path\na.jpg\n"), root=root / "a.jpg")


def test_a_list_that_changes_while_it_is_read_is_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, real = write(root, "path\na.jpg\n"), rows.lines_of

    def meanwhile(*args: Any) -> Iterator[str]:
        yield from real(*args)
        with file.open("a") as out:
            out.write("b.jpg\n")

    monkeypatch.setattr("headrace.pipeline.listfile.lines_of", meanwhile)
    assert "was changed while it was read; try again" in refusal(file)


# -- paths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "means"),
    [
        ("./a.jpg", "a.jpg"),
        (".//deep/./c.png", "deep/c.png"),
        ("deep//c.png", "deep/c.png"),
        ("{root}/a.jpg", "a.jpg"),
        ("{root}//./deep/c.png", "deep/c.png"),
        ("deep/../a.jpg", "deep/../a.jpg"),
        ("{root}/deep/../a.jpg", "deep/../a.jpg"),
    ],
)
def test_paths_are_relative_to_the_root_however_they_are_written(root: Path, written: str, means: str) -> None:
    listing = listed(write(root, f"path\n{written.format(root=root)}\n"))
    assert paths(listing) == [means] and listing.sizes.tolist() == [len(means.rpartition("../")[2])]


def test_a_root_may_be_elsewhere_and_reached_over_a_link(root: Path, home: Path) -> None:
    (home / "lists").mkdir()
    (home / "link").symlink_to(root)
    file = write(home / "lists", f"path\na.jpg\n{root}/b.jpg\n{home}/link/deep/c.png\n")
    listing = listed(file, root=home / "link")
    assert (listing.root, paths(listing)) == (os.fsencode(root), ["a.jpg", "b.jpg", "deep/c.png"])
    assert "lies outside" in refusal(file, root=root), "the link is another name, which nobody has given"
    assert paths(listed(write(home / "lists", f"path\n{root}/b.jpg\n".lstrip()), root=Path("/"))) == [
        f"{root}/b.jpg"[1:]
    ]


def test_links_in_the_root_may_lead_anywhere(root: Path, home: Path) -> None:
    (home / "elsewhere.jpg").write_bytes(b"elsewhere")
    (root / "l.jpg").symlink_to(home / "elsewhere.jpg")
    assert listed(write(root, "path\nl.jpg\n")).sizes.tolist() == [9]


def test_bytes_that_are_not_utf8_are_good_in_a_path(root: Path) -> None:
    name = b"caf\xe9 \xff.jpg"
    with open(os.path.join(os.fsencode(root), name), "wb") as file:
        file.write(b"1234")
    for list_ in (
        write(root, b"path,label\n" + name + b",1\n"),
        write(root, b'{"path": "' + name + b'"}\n', "l.jsonl"),
    ):
        listing = listed(list_)
        assert pieces(listing.paths) == [name] and listing.sizes.tolist() == [4]


a_component = st.binary(min_size=1, max_size=12).filter(
    lambda name: not {0, 0x2F} & set(name) and name not in (b".", b"..", b"l.csv", b"l.jsonl")
)
odd = st.lists(
    st.sampled_from([b" ", b"\t", b",", b'"', b"\n", b"\r", b"\xff", b"'", b"a", b"\\", b";", b"#"]), min_size=1
)
any_name = a_component | odd.map(b"".join).filter(lambda name: len(name) < 200)


@given(st.lists(any_name, min_size=1, max_size=6), st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_of_any_name_is_listed_from_csv_and_from_json_with_its_label(
    home: Path, names: list[bytes], data: st.DataObject
) -> None:
    root = home / "weird"
    root.mkdir()
    try:
        for name in names:
            with open(os.path.join(os.fsencode(root), name), "wb") as file:
                file.write(name)
        texts = [name.decode("utf-8", "surrogateescape") for name in names]
        labels = [data.draw(st.integers(-(1 << 63), (1 << 63) - 1)) for _ in names]
        out = io.StringIO(newline="")
        # Unless told to, the writer leaves a "\r" without quotes where lines end in "\n".
        form: dict[str, Any] = data.draw(st.sampled_from([{}, {"lineterminator": "\n", "quoting": csv.QUOTE_ALL}]))
        csv.writer(out, **form).writerows([["label", "path"], *zip(labels, texts, strict=True)])
        lines = jsonl(*({"path": text, "label": label} for text, label in zip(texts, labels, strict=True)))
        for list_ in (
            write(root, out.getvalue().encode("utf-8", "surrogateescape"), "l.csv"),
            write(root, lines, "l.jsonl"),
        ):
            listing = listed(list_)
            assert pieces(listing.paths) == names
            assert listing.sizes.tolist() == [len(name) for name in names]
            assert listing.labels.values.tolist() == labels
    finally:
        shutil.rmtree(root)


GOOD = (
    b'path,label,note\r\na.jpg,1,"x, ""y"""\r\n"b.jpg",-2.5,\xc3\xa9\r\ndeep/../a.jpg,3e2,\r\n',
    b'{"path": "a.jpg", "label": [1, 2.5], "k": {"z": null}}\n{"path": "b.jpg", "label": [-3, 4], "m": "\\u00e9"}\n',
    b"path,label\na.jpg,x|y\nb.jpg,\n",
)


@given(
    st.sampled_from(GOOD),
    st.lists(st.tuples(st.integers(0, 120), st.integers(0, 3), st.binary(max_size=3)), max_size=4),
    st.sampled_from(["l.csv", "l.jsonl", "l"]),
    st.sampled_from(["auto", "class", "classes", "int", "float", "text"]),
    st.booleans(),
)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_list_is_a_listing_or_an_error_that_names_it(
    root: Path, text: bytes, edits: list[tuple[int, int, bytes]], name: str, labels: str, allow: bool
) -> None:
    for at, length, new in edits:
        text = text[:at] + new + text[at + length :]
    file = write(root, text, name)
    try:
        listing = listed(file, labels=labels, allow_missing=allow)
    except DatasetError as error:
        assert str(error).startswith(shown(os.fsencode(file)))
    else:
        count = len(listing.paths)
        assert count == len(listing.sizes) == len(listing.mtimes_ns) > 0
        assert (
            listing.texts is None
            or [len(v) for v in values(listing)] == [len(listing.columns) + listing.labels.text] * count
        )
        Index.in_memory(listing, "key").close()
    finally:
        file.unlink()


# -- files that cannot be samples -----------------------------------------------------------------------------------


def test_what_cannot_be_a_sample_is_left_out_named_and_counted_where_that_is_allowed(root: Path) -> None:
    os.mkfifo(root / "fifo.jpg")
    (root / "dangling.jpg").symlink_to("gone")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root / "socket.jpg"))
    names = ["a.jpg", "no\n.jpg", "fifo.jpg", "dangling.jpg", "socket.jpg", "deep", "b.jpg"]
    out = io.StringIO(newline="")
    csv.writer(out).writerows([["path", "label", "n"], *([name, i, i] for i, name in enumerate(names))])
    file = write(root, out.getvalue())
    message = refusal(file)
    listing = listed(file, allow_missing=True)
    (root / "socket.jpg").unlink()
    assert paths(listing) == ["a.jpg", "b.jpg"] and listing.labels.values.tolist() == [0, 6]
    assert values(listing) == [["0"], ["6"]] and listing.sizes.tolist() == [5, 5]
    reasons = [
        (3, "no\\n.jpg", "it does not exist"),
        (5, "fifo.jpg", "a FIFO, not a regular file"),
        (6, "dangling.jpg", "what it links to does not exist"),
        (7, "socket.jpg", "a socket, not a regular file"),
        (8, "deep", "a folder, not a regular file"),
    ]
    assert listing.notices == [f"left out line {line}, {name}: {why}" for line, name, why in reasons]
    assert listing.counts == {why: 1 for _, _, why in reasons}
    assert [f"  line {line}: {name}: {why}" for line, name, why in reasons] == message.split("\n")[1:]


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv to give root's rights up")
def test_a_file_that_may_not_be_read_cannot_be_a_sample(root: Path) -> None:
    (root / "a.jpg").chmod(0)
    file = write(root, "path\nb.jpg\na.jpg\n")
    code = (
        "import sys; from pathlib import Path; from headrace.pipeline.spec import Dataset;"
        "from headrace.pipeline.listfile import list_file;"
        "print(list_file(Dataset(list=Path(sys.argv[1]), allow_missing=True)).notices)"
    )
    command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", sys.executable, "-c", code, str(file)]
    said = subprocess.run(command, stdout=subprocess.PIPE, timeout=60, check=True, text=True).stdout
    assert said == "['left out line 3, a.jpg: no permission to read it']\n"


def test_a_list_of_nothing_but_missing_files_is_an_error(root: Path) -> None:
    message = refusal(write(root, "path\nx.jpg\ny.jpg\n"), allow_missing=True)
    assert message.endswith("none of the files that it names can be a sample; line 2, x.jpg: it does not exist")


def test_an_io_error_is_an_error_and_nothing_is_left_out_silently(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, real = write(root, "path\na.jpg\nb.jpg\n"), os.stat

    def broken(path: Any, **options: Any) -> os.stat_result:
        if os.fsencode(path).endswith(b"b.jpg"):
            raise OSError(5, "Input/output error")
        return real(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", broken)
        with pytest.raises(DatasetError, match="b.jpg: cannot index this file: input/output error"):
            listed(file, allow_missing=True)


# -- choices --------------------------------------------------------------------------------------------------------


def test_classes_choose_and_number_and_limit_takes_the_first_of_what_is_left(root: Path) -> None:
    file = write(root, "path,label,n\na.jpg,x,0\nb.jpg,y,1\nb.jpg,z,2\na.jpg,y,3\na.jpg,z,4\n")
    listing = listed(file, classes=["z", "y"], limit=3)
    assert (listing.classes, listing.labels.values.tolist()) == (["z", "y"], [1, 0, 1])
    assert [n for (n,) in values(listing)] == ["1", "2", "3"] and listing.sizes.tolist() == [5, 5, 5]
    assert listing.notices == [
        "left out, because `classes` does not name them: 1 of 5 samples",
        "limit: the first 3 of 4 samples",
    ]
    assert listed(file, limit=2).classes == ["x", "y", "z"], "numbers do not depend on the limit"
    assert 'classes: no label is "q"; there is "x", "y", "z"' in refusal(file, classes=["q"])


def test_limit_counts_samples_not_missing_files_and_looks_at_no_more_than_it_needs(root: Path) -> None:
    file = write(root, "path\na.jpg\nx.jpg\nb.jpg\ny.jpg\na.jpg\n")
    listing = listed(file, limit=2, allow_missing=True)
    assert paths(listing) == ["a.jpg", "b.jpg"] and listing.notices[-1] == "limit: the first 2 of 3 samples"
    assert paths(listed(file, limit=1)) == ["a.jpg"]
    assert "line 3: x.jpg" in refusal(file, limit=2)


def test_extensions_leave_lines_out_and_without_them_every_ending_is_good(root: Path) -> None:
    (root / "noending").touch()
    (root / "x.y").mkdir()
    (root / "x.y/noending").touch()
    file = write(root, "path,label\na.jpg,1\ndeep/c.png,zwei\nnoending,3\nx.y/noending,4\n")
    listing = listed(file, extensions=["JPG"])
    assert (paths(listing), listing.labels.values.tolist()) == (["a.jpg"], [1])
    assert listing.counts == {".png": 1, "without an ending": 2}
    assert listing.notices == ["left out by ending: 2 without an ending, 1 .png"]
    assert len(listed(file, labels="class").paths) == 4
    assert "has no samples (2 without an ending, 1 .jpg, 1 .png)" in refusal(file, extensions=["gif"])


def test_names_that_differ_in_blanks_alone_are_said(root: Path) -> None:
    listing = listed(write(root, "path,label\na.jpg,cat\nb.jpg, cat\na.jpg,dog\n"))
    assert listing.classes == [" cat", "cat", "dog"]
    assert listing.notices == ['classes that differ only in blanks around their names: "cat"']


# -- the index of a list ----------------------------------------------------------------------------------------------


@pytest.fixture
def opened(home: Path) -> Iterator[Any]:
    indexes: list[Index] = []

    def open_(file: Path, **options: Any) -> Index:
        indexes.append(open_index(Dataset(list=file, **options), home / "cache"))
        return indexes[-1]

    yield open_
    for index in indexes:
        index.close()


def test_the_index_is_built_again_when_the_list_changes_and_only_then(root: Path, opened: Any) -> None:
    file = write(root, "path,label\na.jpg,1\n")
    os.utime(file, ns=(10**18, 10**18))
    stamp = os.stat(opened(file).file).st_ino
    (root / "new.jpg").touch()
    assert os.stat(opened(file).file).st_ino == stamp, "what comes into the folder is no sample"
    for text, mtime_ns in (("path,label\na.jpg,12\n", 10**18), ("path,label\na.jpg,34\n", 10**18 + 1)):
        write(root, text)
        os.utime(file, ns=(mtime_ns, mtime_ns))
        index = opened(file)
        assert index.label_shown(0) == text[-3:-1] and os.stat(index.file).st_ino != stamp
        stamp = os.stat(index.file).st_ino


def test_a_list_that_may_still_be_changing_proves_nothing(root: Path, opened: Any) -> None:
    file = write(root, "path,label\na.jpg,1\n")
    now = time.time_ns()
    os.utime(file, ns=(now, now))
    first = os.stat(opened(file).file).st_ino
    write(root, "path,label\na.jpg,2\n")
    os.utime(file, ns=(now, now))
    assert opened(file).label_shown(0) == "2" and first


def test_other_roots_and_options_are_other_indexes(root: Path, home: Path, opened: Any) -> None:
    shutil.copytree(root, home / "copy")
    file = write(home, "path,label\na.jpg,1\n")
    made: list[dict[str, Any]] = [
        {"root": root},
        {"root": home / "copy"},
        {"root": root, "labels": "class"},
        {"root": root, "limit": 1},
    ]
    assert len({opened(file, **options).file for options in made}) == 4
    assert len({opened(file, **options).data_fingerprint for options in made}) == 2


def test_a_cache_beside_the_files_of_a_list_is_written(root: Path, opened: Any, home: Path) -> None:
    index = open_index(Dataset(list=write(root, "path\na.jpg\n")), root / "cache")
    assert index.file is not None and index.file.parent == root / "cache" and not index.notices
    assert stat.S_IMODE(index.file.parent.stat().st_mode) == 0o700
    index.close()


def test_progress_tells_lines_then_files(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BATCH", 100)
    monkeypatch.setattr(files, "_TICK", 0.0)
    seen: list[tuple[int, int]] = []
    file = write(root, "path\n" + "a.jpg\n" * 2500)
    list_file(Dataset(list=file), lambda done, total: seen.append((done, total)))
    lines = [done for done, total in seen if not total]
    assert lines == [0, 1000, 2000] and [s for s in seen if s[1]] == [(n, 2500) for n in range(100, 2501, 100)]


def test_a_listing_can_be_stopped_from_its_progress(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_TICK", 0.0)

    def stop(done: int, total: int) -> None:
        if total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list_file(Dataset(list=write(root, "path\n" + "a.jpg\n" * 2000)), stop)
