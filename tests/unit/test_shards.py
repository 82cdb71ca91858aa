"""What tar shards list, as the tars say it; an error by TAR/member wherever WebDataset would guess; exact bytes."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tars
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError, DatasetError
from headrace.pipeline import shards as module
from headrace.pipeline.dataset import open_index, open_source
from headrace.pipeline.folder import EXTENSIONS
from headrace.pipeline.index import Index, Listing, shown
from headrace.pipeline.probe import BadPicture
from headrace.pipeline.shards import ShardSource, expand, list_shards, shards_root
from headrace.pipeline.spec import Dataset, Decode

Members = dict[str, bytes] | list[tuple[str, bytes]]

FORMS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)


@pytest.fixture
def root(home: Path) -> Path:
    made = home / "data"
    made.mkdir()
    return made


def described(**options: Any) -> Dataset:
    return Dataset(**options)


def put(root: Path, *contents: Members) -> str:
    """Tars `t-0.tar`, `t-1.tar` … with these members; their pattern."""
    for i, members in enumerate(contents):
        tars.write(root / f"t-{i}.tar", members)
    return f"{root}/t-{{0..{len(contents) - 1}}}.tar"


def listed(root: Path, *contents: Members, **options: Any) -> Listing:
    return list_shards(described(shards=put(root, *contents), **options))


def refusal(root: Path, *contents: Members, **options: Any) -> list[str]:
    """Lines of the error."""
    with pytest.raises(DatasetError) as caught:
        listed(root, *contents, **options)
    return str(caught.value).splitlines()


def trouble(root: Path, *contents: Members, **options: Any) -> str:
    """The only problem of these tars."""
    head, line = refusal(root, *contents, **options)
    assert head == f"{root}: 1 problem in its tar files:"
    return line.strip()


def paths(listing: Listing) -> list[str]:
    offsets = listing.paths.offsets.tolist()
    return [shown(listing.paths.blob[a:b]) for a, b in zip(offsets, offsets[1:], strict=False)]


def texts(listing: Listing) -> list[list[Any]]:
    assert listing.texts is not None
    offsets = listing.texts.offsets.tolist()
    return [msgspec.msgpack.decode(listing.texts.blob[a:b]) for a, b in zip(offsets, offsets[1:], strict=False)]


def js(value: object) -> bytes:
    return json.dumps(value).encode()


# -- which tars ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("t.tar", ["t.tar"]),
        ("t-{0..3}.tar", ["t-0.tar", "t-1.tar", "t-2.tar", "t-3.tar"]),
        ("t-{008..011}.tar", ["t-008.tar", "t-009.tar", "t-010.tar", "t-011.tar"]),
        ("{8..11}", ["8", "9", "10", "11"]),
        ("{08..11}", ["08", "09", "10", "11"]),
        ("{8..011}", ["008", "009", "010", "011"]),
        ("{2..0}", ["2", "1", "0"]),
        ("{7..7}", ["7"]),
        ("{a,b,}x", ["ax", "bx", "x"]),
        ("{a,b}/{1..2}", ["a/1", "a/2", "b/1", "b/2"]),
        ("{x}{}{1..}{..2}{a..c}{1..2", ["{x}{}{1..}{..2}{a..c}{1..2"]),
        ("{{1..2}}", ["{1}", "{2}"]),
        ("a{b{c,d}", ["a{bc", "a{bd"]),
    ],
)
def test_braces_stand_for_runs_of_numbers_and_for_alternatives(pattern: str, names: list[str]) -> None:
    assert list(expand(pattern)) == names


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize("pattern", ["{000000..000101}", "{9..101}", "{098..101}", "x{a,b}y{3..1}z{0,1}", "{1..010}"])
def test_ranges_are_those_of_the_shell(pattern: str) -> None:
    said = subprocess.run(["bash", "-c", f"echo {pattern}"], capture_output=True, text=True, check=True).stdout
    assert list(expand(pattern)) == said.split()


@pytest.mark.parametrize("pattern", ["{0..1000000}", "{0..999}{0..1000}", "{0..999999999999}", "{0..999999}{a,b}"])
def test_a_pattern_for_more_than_a_million_tars_is_an_error(pattern: str) -> None:
    with pytest.raises(DatasetError, match=r"tar files, over the limit of 1000000"):
        list(expand(pattern))


def test_tars_follow_in_the_order_given_and_samples_in_that_of_the_tar(root: Path) -> None:
    put(root, {"b.jpg": b"", "a.jpg": b""}, {"c.jpg": b""}, {"a.jpg": b""})
    dataset = described(shards=[f"{root}/t-{{2..1}}.tar", f"{root}/t-0.tar"])
    assert paths(list_shards(dataset)) == ["t-2.tar/a.jpg", "t-1.tar/c.jpg", "t-0.tar/b.jpg", "t-0.tar/a.jpg"]


def test_paths_are_relative_to_the_folder_that_the_tars_have_in_common(root: Path) -> None:
    tars.write(root / "x/a/t.tar", {"k.jpg": b""})
    tars.write(root / "x/b/c/t.tar", {"k.jpg": b""})
    os.symlink(root, root.parent / "link")
    dataset = described(shards=f"{root.parent}/link/x/{{a,b/c}}/t.tar")
    assert shards_root(dataset) == list_shards(dataset).root == os.fsencode(root / "x")
    assert paths(list_shards(dataset)) == ["a/t.tar/k.jpg", "b/c/t.tar/k.jpg"]


def test_dots_in_a_path_lead_where_the_system_says(root: Path, home: Path) -> None:
    tars.write(home / "elsewhere/t.tar", {"right.jpg": b""})
    tars.write(root / "t.tar", {"wrong.jpg": b""})
    (home / "elsewhere/deep").mkdir()
    os.symlink(home / "elsewhere/deep", root / "link")
    for shards in (f"{root}/link/../t.tar", [f"{root}/link/../t.tar", str(put(root, {"a.jpg": b""}))]):
        assert paths(list_shards(described(shards=shards)))[0].endswith("t.tar/right.jpg")
    assert paths(list_shards(described(shards=f"{root}/{{,./}}t.tar".replace("{,./}", "")))) == ["t.tar/wrong.jpg"]
    with pytest.raises(DatasetError, match=r"/t.tar: is the same file as t.tar; give it once"):
        list_shards(described(shards=f"{root}/{{,link/../../data/}}t.tar"))


def test_slashes_beyond_one_say_nothing(root: Path) -> None:
    pattern = put(root, {"a.jpg": b""})
    for path in (f"/{pattern}", f"//{pattern}", pattern.replace("/", "//")):
        assert paths(list_shards(described(shards=path))) == ["t-0.tar/a.jpg"]


def test_the_same_tar_twice_is_an_error(root: Path) -> None:
    pattern = put(root, {"a.jpg": b""}, {"b.jpg": b""})
    with pytest.raises(DatasetError, match=r"t-1.tar: given twice, the second time by .*t-\{1,0\}.tar"):
        list_shards(described(shards=[pattern, f"{root}/t-{{1,0}}.tar"]))
    os.symlink("t-0.tar", root / "l.tar")
    with pytest.raises(DatasetError, match=r"l.tar: is the same file as t-0.tar; give it once"):
        list_shards(described(shards=[pattern, f"{root}/l.tar"]))


def test_shards_bad_input_of_tars_that_are_not_there_or_none_is_named_ten_at_once(root: Path) -> None:
    pattern = put(root, {"a.jpg": b""})
    (root / "folder").mkdir()
    os.mkfifo(root / "fifo")
    os.symlink("self", root / "self")
    head, *lines = refusal_of([pattern, f"{root}/{{gone,folder,fifo,self,t-0.tar/x,t-*.tar}}"])
    assert head == f"{root}: 6 problems in its tar files:"
    assert [line.strip() for line in lines] == [
        "gone: there is no such file",
        "folder: it is no regular file",
        "fifo: it is no regular file",
        "self: too many links, or a link to itself",
        "t-0.tar/x: there is no such file",
        "t-*.tar: there is no such file; `shards` knows braces, such as {000000..000099}, and no *",
    ]
    head, *lines = refusal_of([f"{root}/x-{{0..99}}.tar"])
    assert head.endswith("100 problems in its tar files:") and len(lines) == 11 and lines[-1] == "  and 90 more"
    assert lines[0] == "  x-0.tar: there is no such file"


def refusal_of(patterns: list[str]) -> list[str]:
    with pytest.raises(DatasetError) as caught:
        list_shards(described(shards=patterns))
    return str(caught.value).splitlines()


def test_a_tar_that_may_not_be_read_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern, real = put(root, {"a.jpg": b""}), os.open

    def opened(path: Any, *args: Any, **options: Any) -> int:
        if os.fsdecode(path).endswith("t-0.tar"):
            raise OSError(number, os.strerror(number))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", opened)
    number = errno.EACCES
    with pytest.raises(DatasetError, match=r"t-0.tar: no permission to read it"):
        list_shards(described(shards=pattern))
    number = errno.EIO
    with pytest.raises(DatasetError, match=r"data/t-0.tar: cannot open this tar: input/output error"):
        list_shards(described(shards=pattern))


# -- samples ------------------------------------------------------------------------------------------------


def rule(name: str) -> tuple[str, str]:
    """WebDataset's: "the key is the name up to the first dot behind the last slash"."""
    match = re.fullmatch(r"((?:.*/|)[^.]+)[.]([^/]*)", name, re.DOTALL)
    assert match is not None
    return match[1], match[2].lower()


def plainly(file: Path) -> list[tuple[str, bytes, bytes | None]]:
    """Member name and bytes of each picture, and its .cls, as tarfile and WebDataset's rule say."""
    with tarfile.open(file, errors="surrogateescape") as tar:
        members = [(m.name, tar.extractfile(m).read()) for m in tar if m.isreg()]  # type: ignore[union-attr]
    samples = []
    for _, group in groupby(members, lambda member: rule(member[0])[0]):
        fields = {rule(name)[1]: (name, data) for name, data in group}
        (picture,) = [ending for ending in fields if ending in EXTENSIONS]
        samples.append((*fields[picture], fields["cls"][1] if "cls" in fields else None))
    return samples


NAMES = [
    "a",
    "x y/b c",
    "tab\tnew\nline",
    "ü/é",
    "\udcff\udc80",
    "train.v1/1",
    "n" * 95,
    "long/" * 60 + "x",
    "-",
    "{1,2}",
]


@pytest.mark.parametrize("form", FORMS)
def test_shards_parity_with_a_plain_reading_of_the_same_tars(root: Path, form: int) -> None:
    names = [name for name in NAMES if form != tarfile.USTAR_FORMAT or len(name) < 100]
    names += ["k" * 300] if form != tarfile.USTAR_FORMAT else []
    files = []
    for t in range(3):
        members = []
        for i, name in enumerate(names):
            pair = [
                (f"{name}.JPG" if i % 2 else f"{name}.png", os.urandom(i * 700)),
                (f"{name}.cls", b"%d\n" % (t + i)),
            ]
            members += pair if i % 3 else pair[::-1]
        files.append(tars.write(root / f"t-{t}.tar", members, form))
    dataset = described(shards=f"{root}/t-{{0..2}}.tar")
    index = open_index(dataset, root.parent / "cache")
    source = open_source(dataset, index, Decode())
    expected = [(file.name, *sample) for file in files for sample in plainly(file)]
    assert len(index) == len(expected) == 3 * len(names)
    for i, (tar, name, data, cls) in enumerate(expected):
        assert index.path(i) == os.fsencode(f"{tar}/{name}")
        assert source.read(i) == data and index.sizes[i] == len(data)
        assert cls is not None and index.labels[i] == int(cls)
    index.close()


a_word = st.text(st.characters(codec="utf-8", exclude_characters="/.\0"), min_size=1, max_size=12)
a_key = st.builds(lambda folders, base: "".join(f"{f}/" for f in folders) + base, st.lists(a_word, max_size=2), a_word)


@given(st.lists(a_key, min_size=1, max_size=8, unique=True), st.sampled_from(["jpg", "PNG", "WebP"]))
@settings(max_examples=40)
def test_shards_parity_with_the_documented_rule_for_any_keys(keys: list[str], ending: str) -> None:
    keys = [key for key in keys if not {"__MACOSX", "@eaDir"} & set(key.split("/"))] or ["a"]
    folder = Path(os.environ["TMPDIR"])
    data = tars.packed(
        [m for i, key in enumerate(keys) for m in ((f"{key}.{ending}", b"x"), (f"{key}.cls", b"%d" % i))]
    )
    (folder / "t.tar").write_bytes(data)
    listing = list_shards(described(shards=str(folder / "t.tar")))
    assert listing.labels.values.tolist() == list(range(len(keys)))
    assert paths(listing) == [shown(f"t.tar/{key}.{ending}".encode()) for key in keys]


def test_shards_purity_of_the_listing_whoever_was_first(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = [
        {f"{t}-{i}.jpg": b"x" * i, f"{t}-{i}.json": js({"label": i, f"c{t % 3}": t})} for t in range(60) for i in (0,)
    ]
    first = listed(root, *contents)
    turns, real = threading.Semaphore(0), module._list
    held = threading.Event()

    def slow(tars_root: bytes, name: bytes, *rest: Any) -> Any:
        if name == b"t-0.tar":
            held.wait(20)
        else:
            turns.release()
        shard = real(tars_root, name, *rest)
        if turns._value >= 10:
            held.set()
        return shard

    monkeypatch.setattr(module, "_list", slow)
    again = listed(root, *contents)
    assert held.is_set()
    assert again.paths.blob == first.paths.blob and texts(again) == texts(first)
    assert again.labels.values.tolist() == first.labels.values.tolist() and again.fingerprint() == first.fingerprint()


def test_positions_sizes_and_times_are_those_of_the_tars(root: Path) -> None:
    listing = listed(root, {"a.cls": b"0", "a.jpg": b"12345"}, {"b.jpg": b"", "b.cls": b"1"})
    assert listing.container is not None and listing.positions is not None
    assert listing.container.tolist() == [0, 1] and listing.positions.tolist() == [1536, 512]
    assert listing.sizes.tolist() == [5, 0] and set(listing.mtimes_ns.tolist()) == {tars.OLD * 10**9}
    assert listing.watched_sizes.tolist() == [10240, 10240] and listing.watched.blob == b"t-0.tart-1.tar"


def test_keys_end_at_the_first_dot_behind_the_last_slash(root: Path) -> None:
    listing = listed(root, {"train.v1/a.jpg": b"", "train.v1/a.thumb.jpg": b"", "train.v1/b.jpg": b"", "a.JPEG": b""})
    assert paths(listing) == ["t-0.tar/train.v1/a.jpg", "t-0.tar/train.v1/b.jpg", "t-0.tar/a.JPEG"]
    assert listing.notices == ["members of samples that are not used: 1 .thumb.jpg"]


def test_a_tar_of_the_current_folder_is_listed(root: Path) -> None:
    listing = listed(root, {"./a.jpg": b"", "./a.cls": b"3", "./b/c.jpg": b"", "./b/c.cls": b"4"})
    assert paths(listing) == ["t-0.tar/./a.jpg", "t-0.tar/./b/c.jpg"]
    assert "its key was there before" in trouble(root, {"./a.jpg": b"", "a.png": b""})


def test_hidden_and_system_members_folders_and_names_without_an_ending_are_left_out_and_counted(root: Path) -> None:
    junk = ["._a.jpg", "x/._a.jpg", ".DS_Store", ".git/a.jpg", "__MACOSX/._a.jpg", "__MACOSX/a.jpg", "x/Thumbs.db"]
    junk += ["@eaDir/a.jpg", "README", "dot.", ".hidden.jpg", "..a.jpg"]
    members = [("a.jpg", b""), *((name, b"") for name in junk), ("b.jpg", b"")]
    listing = listed(root, members)
    assert paths(listing) == ["t-0.tar/a.jpg", "t-0.tar/b.jpg"]
    assert listing.counts == {
        "._*": 2,
        "hidden": 4,
        "__MACOSX": 2,
        "Thumbs.db": 1,
        "@eaDir": 1,
        "without an ending": 2,
    }
    assert listing.notices[0].startswith("left out: 4 hidden, 2 ._*, 2 __MACOSX, 2 without an ending, 1 @eaDir")


def test_folders_and_links_are_left_out_and_counted(root: Path) -> None:
    with tarfile.open(root / "t.tar", "w") as tar:
        for name, kind in (("d", tarfile.DIRTYPE), ("l.jpg", tarfile.SYMTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "a.jpg"
            tar.addfile(info)
        tar.addfile(tarfile.TarInfo("a.jpg"))
    listing = list_shards(described(shards=str(root / "t.tar")))
    assert paths(listing) == ["t.tar/a.jpg"] and listing.notices == ["left out: 1 folder, 1 symbolic link"]


def test_members_that_are_not_used_are_counted_by_ending(root: Path) -> None:
    listing = listed(root, {"a.jpg": b"", "a.npy": b"", "a.seg.png": b""}, {"b.jpg": b"", "b.npy": b""})
    assert listing.counts == {".npy": 2, ".seg.png": 1}
    assert listing.notices == ["members of samples that are not used: 2 .npy, 1 .seg.png"]


def test_other_endings_make_other_members_the_picture(root: Path) -> None:
    listing = listed(root, {"a.jpg": b"", "a.data": b"", "b.DATA": b""}, extensions=["data"])
    assert paths(listing) == ["t-0.tar/a.data", "t-0.tar/b.DATA"] and listing.counts == {".jpg": 1}


def test_of_several_pictures_a_whole_ending_chooses_one(root: Path) -> None:
    pair = {"a.b/1.Input.jpg": b"in", "a.b/1.target.jpg": b"target", "a.b/1.cls": b"x"}
    assert "has 0 pictures" not in trouble(root, pair) and "`extensions` may name it" in trouble(root, pair)
    listing = listed(root, pair, extensions=["input.JPG"])
    assert paths(listing) == ["t-0.tar/a.b/1.Input.jpg"] and listing.counts == {".target.jpg": 1}
    assert listed(root, pair, extensions=[".target.jpg"]).sizes.tolist() == [6]


def test_a_tar_without_samples_is_named(root: Path) -> None:
    listing = listed(root, {}, {"a.jpg": b""}, {"x/README": b""})
    assert len(listing.paths) == 1
    assert listing.notices == ["left out: 1 without an ending", "without samples: t-0.tar, t-2.tar"]
    with pytest.raises(DatasetError, match=r"no samples in 2 tar files \(no member at all\)"):
        listed(root, {}, {})


@pytest.mark.parametrize(
    ("members", "says"),
    [
        (
            [("a.jpg", b""), ("b.jpg", b""), ("a.cls", b"")],
            "a.cls: its key was there before: two samples have the same",
        ),
        ([("a.jpg", b""), ("b.jpg", b""), ("a.png", b"")], "a.png: its key was there before"),
        ([("a.jpg", b""), ("a.jpg", b"")], "a.jpg: the sample has another member .jpg"),
        ([("a.jpg", b""), ("a.JPG", b"")], "a.JPG: the sample has another member .jpg"),
        ([("a.jpg", b""), ("a.cls", b"1"), ("a.cls", b"2")], "a.cls: the sample has another member .cls"),
        ([("a.jpg", b""), ("a.x", b""), ("a.x", b"")], "a.x: the sample has another member .x"),
        (
            [("a.jpg", b""), ("a.webp", b"")],
            "a.webp: the sample has 2 pictures, .jpg, .webp; `extensions` says which it is",
        ),
        ([("a.cls", b"1"), ("a.npy", b"")], "a.cls: the sample has no picture, only .cls, .npy"),
        (
            [("235342 Track 2.0 (Clean).jpg", b"")],
            "235342 Track 2.0 (Clean).jpg: the sample has no picture, only .0 (clean).jpg; an ending is all that"
            " follows the first dot of a name, `extensions` may name it",
        ),
        (
            [("x/a.b.c.jpg", b""), ("x/a.jpg", b""), ("x/a.b.d.jpg", b""), ("y.txt", b"")],
            "y.txt: the sample has no picture",
        ),
        (
            [("a.jpg", b""), ("a.json", b"{" + b" " * (1 << 20) + b"}")],
            "a.json: has 1048578 bytes; a label, or further",
        ),
    ],
)
def test_shards_bad_input_of_samples_is_an_error_by_member(root: Path, members: Members, says: str) -> None:
    assert trouble(root, members).startswith(f"t-0.tar/{says}")


def test_all_that_is_wrong_is_told_at_once_ten_by_name_and_the_rest_by_number(root: Path) -> None:
    (root / "cut.tar").write_bytes(tars.packed({"a.jpg": b"x" * 2000})[:1500])
    put(root, {f"{i}.npy": b"" for i in range(7)}, {f"{i}.cls": b"" for i in range(7)})
    head, *lines = refusal_of([f"{root}/{{cut,t-0,t-1}}.tar"])
    assert head == f"{root}: 15 problems in its tar files:" and len(lines) == 11 and lines[-1] == "  and 5 more"
    assert lines[0] == '  cut.tar: is cut: "a.jpg", at offset 0, has 2000 bytes, of which 988 are there'
    assert lines[9].startswith("  t-1.tar/1.cls: the sample has no picture")


def test_a_compressed_tar_is_refused_with_the_remedy(root: Path) -> None:
    pattern = put(root, {"a.jpg": b""})
    (root / "t-0.tar").write_bytes(gzip.compress((root / "t-0.tar").read_bytes()))
    (line,) = refusal_of([pattern])[1:]
    assert line.strip() == "t-0.tar: is compressed (gzip); samples are read at offsets, so gunzip it"


def test_a_tar_that_changes_while_it_is_indexed_is_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern, real = put(root, {"a.jpg": b""}), module._Grouping.run

    def run(self: Any, tar: Any) -> None:
        real(self, tar)
        os.utime(root / "t-0.tar")

    monkeypatch.setattr(module._Grouping, "run", run)
    assert refusal_of([pattern])[1].strip() == "t-0.tar: changed while it was indexed"


# -- labels and further values ------------------------------------------------------------------------------


def with_(ending: str, *values: bytes) -> Members:
    return {name: data for i, v in enumerate(values) for name, data in ((f"{i}.jpg", b""), (f"{i}.{ending}", v))}


@pytest.mark.parametrize(
    ("ending", "values", "options", "labels", "classes"),
    [
        ("cls", [b"7", b" -3\n", b"0"], {}, [7, -3, 0], []),
        ("cls", [b"dog\n", b"cat", b"dog"], {}, [1, 0, 1], ["cat", "dog"]),
        ("cls", ["häuser".encode(), b"\xef\xbb\xbftwo words"], {}, [0, 1], ["häuser", "two words"]),
        ("cls", [b"10", b"9"], {"labels": "class"}, [0, 1], ["10", "9"]),
        ("cls", [b"10", b"9", b"10"], {"classes": ["9"]}, [0], ["9"]),
        ("cls", [b"0.5", b"2"], {"labels": "float"}, [0.5, 2], []),
        ("CLS", [b"1", b"2"], {}, [1, 2], []),
        ("json", [js({"label": 3}), js({"label": 4})], {}, [3, 4], []),
        ("json", [js({"label": "b"}), js({"label": "a"})], {}, [1, 0], ["a", "b"]),
        ("json", [js({"label": 0.25}), js({"label": 1})], {}, [0.25, 1], []),
        ("json", [js({"label": [1, 2.5]}), js({"label": [3, 4]})], {}, [[1, 2.5], [3, 4]], []),
        ("json", [js(5), js(6)], {}, [5, 6], []),
        ("json", [js("b"), js("a")], {}, [1, 0], ["a", "b"]),
        ("json", [js([1, 2]), js([3, 4])], {}, [[1, 2], [3, 4]], []),
        ("json", [js({"y": 1, "z": 2}), js({"z": 4, "y": 3})], {"columns": {"label": "y"}}, [1, 3], []),
        (
            "json",
            [js({"y": 1, "z": 2}), js({"z": 4, "y": 3})],
            {"columns": {"label": ["z", "y"]}},
            [[2, 1], [4, 3]],
            [],
        ),
        ("txt", [b"dog\n", b"cat"], {"labels": "class"}, [1, 0], ["cat", "dog"]),
        ("txt", [b"5\n", b"6"], {"labels": "int"}, [5, 6], []),
    ],
)
def test_labels_are_what_the_targets_say(
    root: Path, ending: str, values: list[bytes], options: dict[str, Any], labels: list[Any], classes: list[str]
) -> None:
    listing = listed(root, with_(ending, *values), **options)
    assert listing.labels.values.tolist() == labels and listing.classes == classes


def test_several_classes_may_stand_in_the_json(root: Path) -> None:
    listing = listed(root, with_("json", js({"label": ["b", "a"]}), js({"label": []}), js({"label": ["c"]})))
    assert listing.classes == ["a", "b", "c"] and listing.labels.offsets is not None
    assert listing.labels.values.tolist() == [0, 1, 2] and listing.labels.offsets.tolist() == [0, 2, 2, 3]


def test_captions_are_labels_that_are_texts(root: Path) -> None:
    listing = listed(root, with_("txt", "eine Straße\n".encode(), b""), {"x.jpg": b"", "x.txt": b" a, b\n"})
    assert listing.labels.text and listing.columns == [] and listing.classes == []
    assert texts(listing) == [["eine Straße\n"], [""], [" a, b\n"]]


def test_values_beside_pictures_without_labels_are_named(root: Path) -> None:
    listing = listed(root, with_("json", js({"class": 1}), js({"class": 2, "label": None})))
    assert listing.labels.values.tolist() == [-1, -1]
    (notice,) = listing.notices
    assert notice == 'each label is -1, for there is no "label"; `columns: {label: NAME}` takes another: "class"'


def test_without_any_target_labels_are_minus_one(root: Path) -> None:
    listing = listed(root, {"a.jpg": b"", "b.jpg": b""})
    assert listing.labels.values.tolist() == [-1, -1] and listing.texts is None
    with pytest.raises(DatasetError, match=r'there are no labels: no .cls, no .json with "label", no .txt'):
        listed(root, {"a.jpg": b""}, labels="int")
    with pytest.raises(DatasetError, match="there are no labels"):
        listed(root, {"a.jpg": b""}, classes=["a"])


def test_what_is_not_the_label_becomes_columns(root: Path) -> None:
    listing = listed(
        root,
        {"a.jpg": b"", "a.cls": b"1", "a.json": js({"w": 3, "label": "x", "deep": {"k": [1, None]}}), "a.txt": b"one"},
        {"b.jpg": b"", "b.cls": b"2", "b.json": js({"new": True, "w": 0.5})},
        {"c.jpg": b"", "c.cls": b"3"},
    )
    assert listing.labels.values.tolist() == [1, 2, 3]
    assert listing.columns == ["w", "label", "deep", "txt", "new"]
    assert texts(listing) == [
        [3, "x", {"k": [1, None]}, "one", None],
        [0.5, None, None, None, True],
        [None, None, None, None, None],
    ]


def test_the_target_that_is_asked_for_is_the_label_and_the_others_are_columns(root: Path) -> None:
    members = {"a.jpg": b"", "a.cls": b"1 ", "a.json": js({"label": "x", "y": 2}), "a.txt": b"one"}
    by_txt = listed(root, members, columns={"label": "txt"})
    assert by_txt.labels.text and by_txt.columns == ["cls", "label", "y"] and texts(by_txt) == [["one", "1 ", "x", 2]]
    by_key = listed(root, members, columns={"label": "y"})
    assert by_key.labels.values.tolist() == [2]
    assert by_key.columns == ["cls", "label", "txt"] and texts(by_key) == [["1 ", "x", "one"]]


def test_text_labels_stand_before_the_columns(root: Path) -> None:
    listing = listed(root, with_("json", js({"label": "x", "w": 1}), js({"label": "y"})), labels="text")
    assert listing.labels.text and texts(listing) == [["x", 1], ["y", None]]


@pytest.mark.parametrize(
    ("members", "options", "says"),
    [
        ([("a.jpg", b""), ("a.cls", b"1"), ("b.jpg", b"")], {}, "b.jpg: the sample has no label: there is no .cls"),
        ([("a.jpg", b""), ("b.jpg", b""), ("b.txt", b"x")], {}, "a.jpg: the sample has no label: there is no .txt"),
        (
            {"a.jpg": b"", "a.cls": b"1", "b.jpg": b"", "b.txt": b""},
            {},
            "b.jpg: the sample has no label: there is no .cls",
        ),
        (
            with_("json", b'{"label": 1}', b'{"x": 1}'),
            {},
            '1.jpg: the sample has no label: there is no .json with "label"',
        ),
        (with_("json", b'{"label": 1}', b'{"label": null}'), {}, "1.jpg: the sample has no label"),
        (
            with_("json", b'{"y": 1}', b"7"),
            {"columns": {"label": "y"}},
            '1.jpg: the sample has no label: there is no .json with "y"',
        ),
        (with_("json", b'{"y": 1}'), {"columns": {"label": ["y", "z"]}}, 'there is no .json with "y" and "z"'),
        (with_("txt", b"x"), {"columns": {"label": "cls"}}, "0.jpg: the sample has no label: there is no .cls"),
        (
            with_("cls", b"1", b"dog"),
            {},
            '1.jpg: label "dog" is the name of a class, but that of t-0.tar/0.jpg, "1", is a',
        ),
        (with_("cls", b" \n"), {}, "0.jpg: the label is empty"),
        (with_("cls", b"\xff"), {}, "0.cls: is no UTF-8, at its byte 0"),
        (with_("txt", b"ab\xc3"), {}, "0.txt: is no UTF-8, at its byte 2"),
        (with_("json", b"{\n'a': 1}"), {}, "0.jpg: its .json is no JSON: expecting property name enclosed in double"),
        (with_("json", b'{"a": "\xff"}'), {}, "0.json: is no UTF-8, at its byte 7"),
        (with_("json", b'{"a": NaN}'), {}, "0.jpg: its .json: NaN is no JSON"),
        (with_("json", b'{"a": 1, "a": 2}'), {}, '0.jpg: its .json: has the key "a" more than once'),
        (with_("json", b""), {}, "0.jpg: its .json is no JSON: expecting value at line 1 column 1"),
        (with_("json", b"[" * 100_000), {}, "0.jpg: its .json is nested too deeply"),
        (with_("json", b'{"label": "\\ud800"}'), {}, '0.jpg: label "\\ud800" is not UTF-8'),
        (with_("json", b'{"label": 1, "a": ["\\ud800"]}'), {}, "0.jpg: a value is not UTF-8"),
        (with_("json", b'{"label": 1, "a": %d}' % 10**30), {}, "0.jpg: its .json: the number 1000000000000000000000"),
        (with_("json", b'{"label": {"a": 1}}'), {}, '0.jpg: label {"a": 1} is neither a number nor a text'),
        (with_("json", b'{"label": 1}'), {"labels": "text"}, "0.jpg: label 1 is no text"),
        (with_("cls", b"1.5"), {"labels": "int"}, '0.jpg: label "1.5" is no whole number'),
        (
            {"a.jpg": b"", "a.cls": b"1", "a.txt": b"", "a.json": b'{"txt": 1}'},
            {},
            'a.jpg: "txt" is a key of its .json, and the',
        ),
        (
            {"a.jpg": b"", "a.cls": b"1", "a.json": js({str(i): i for i in range(1025)})},
            {},
            "would be a column more than 1024",
        ),
    ],
)
def test_shards_bad_input_of_targets_is_an_error_by_member(
    root: Path, members: Members, options: dict[str, Any], says: str
) -> None:
    line = trouble(root, members, **options)
    assert line.startswith("t-0.tar/") and says in line


def test_labels_that_stand_elsewhere_in_another_tar_are_an_error(root: Path) -> None:
    captions, numbers = with_("txt", b"a", b"b"), with_("cls", b"1", b"2")
    head, *lines = refusal(root, captions, numbers)
    assert head.endswith("2 problems in its tar files:")
    assert lines[0] == "  t-1.tar/0.jpg: the sample has a label in .cls, and samples before it have none there"
    assert refusal(root, numbers, captions)[1] == "  t-1.tar/0.jpg: the sample has no label: there is no .cls"
    assert "has a label in .cls" in refusal(root, {"a.jpg": b""}, numbers)[1]


# -- subsets ------------------------------------------------------------------------------------------------


def test_classes_choose_samples_in_their_order_and_limit_the_first_of_them(root: Path) -> None:
    contents = [
        {"a.jpg": b"1", "a.cls": b"dog", "a.txt": b"A", "b.jpg": b"22", "b.cls": b"cat", "b.txt": b"B"},
        {"c.jpg": b"333", "c.cls": b"cow", "c.txt": b"C", "d.jpg": b"4444", "d.cls": b"dog", "d.txt": b"D"},
    ]
    chosen = listed(root, *contents, classes=["dog", "cow"])
    assert paths(chosen) == ["t-0.tar/a.jpg", "t-1.tar/c.jpg", "t-1.tar/d.jpg"]
    assert chosen.labels.values.tolist() == [0, 1, 0] and chosen.classes == ["dog", "cow"]
    assert texts(chosen) == [["A"], ["C"], ["D"]] and chosen.sizes.tolist() == [1, 3, 4]
    assert chosen.container is not None and chosen.container.tolist() == [0, 1, 1]
    assert chosen.notices == ["left out, because `classes` does not name them: 1 of 4 samples"]
    limited = listed(root, *contents, classes=["dog", "cow"], limit=2)
    assert paths(limited) == paths(chosen)[:2] and limited.labels.values.tolist() == [0, 1]
    assert texts(limited) == [["A"], ["C"]] and limited.notices[-1] == "limit: the first 2 of 3 samples"
    with pytest.raises(DatasetError, match=r't-\{0..1\}.tar: classes: no label is "pig"; there is "cat", "cow", "dog"'):
        listed(root, *contents, classes=["pig"])


def test_a_pattern_that_is_none_is_a_wrong_configuration() -> None:
    for value in ("", 5, [], [5], ["a\0b"]):
        with pytest.raises(ConfigError):
            described(shards=value)


# -- progress -----------------------------------------------------------------------------------------------


def test_progress_is_told_within_a_tar_that_takes_long(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = put(root, {f"{i}.jpg": b"" for i in range(600)})
    seen: list[tuple[int, int]] = []
    told, real = threading.Event(), module._Grouping._take

    def take(self: Any, tar: Any, name: bytes, *rest: Any) -> None:
        if name == b"599.jpg":
            told.wait(20)
        real(self, tar, name, *rest)

    def progress(done: int, total: int) -> None:
        seen.append((done, total))
        if done == 512:
            told.set()

    monkeypatch.setattr(module._Grouping, "_take", take)
    list_shards(described(shards=pattern), progress)
    assert told.is_set() and (512, 0) in seen and seen[-1] == (600, 600)


def test_an_interrupted_listing_leaves_no_thread_behind_also_within_a_tar(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = put(root, {f"{i}.jpg": b"" for i in range(2000)}, *({"a.jpg": b""},) * 50)
    interrupted, real = threading.Event(), module._Grouping._take
    taken: list[bytes] = []

    def take(self: Any, tar: Any, name: bytes, *rest: Any) -> None:
        if name == b"600.jpg":
            interrupted.wait(20)
        taken.append(name)
        real(self, tar, name, *rest)

    def progress(done: int, total: int) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(module._Grouping, "_take", take)
    with pytest.raises(KeyboardInterrupt):
        list_shards(described(shards=pattern), progress)
    assert interrupted.is_set() and b"1999.jpg" not in taken


# -- the index, and reading ---------------------------------------------------------------------------------

CONTENTS = [{"a.jpg": b"one", "a.cls": b"0"}, {"b.jpg": b"two two", "b.cls": b"1", "c.jpg": b"", "c.cls": b"2"}]


@pytest.fixture
def opened(root: Path, home: Path) -> Iterator[Callable[..., tuple[Index, ShardSource]]]:
    """`opened(max_file_bytes=…)`: index and reader of two tars, closed after the test."""
    made: list[tuple[Index, ShardSource]] = []
    dataset = described(shards=put(root, *CONTENTS))

    def make(**decode: Any) -> tuple[Index, ShardSource]:
        index = open_index(dataset, home / "cache/headrace")
        source = open_source(dataset, index, Decode(**decode))
        assert isinstance(source, ShardSource)
        made.append((index, source))
        return made[-1]

    yield make
    for index, source in made:
        source.close()
        index.close()


Opened = Callable[..., tuple[Index, ShardSource]]


def test_a_sample_is_its_members_bytes_in_any_order(opened: Opened) -> None:
    index, source = opened()
    assert [source.read(i) for i in (2, 0, 1, 0, 2, 1)] == [b"", b"one", b"two two", b"one", b"", b"two two"]
    assert index.shown_full(1).endswith("/data/t-1.tar/b.jpg")


def test_the_second_opening_maps_the_index_of_the_first(
    opened: Opened, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = opened()
    monkeypatch.setattr(module, "_list", lambda *_: pytest.fail("it was listed again"))
    assert opened()[0].data_fingerprint == first.data_fingerprint


@pytest.mark.parametrize("change", ["another", "touched", "gone"])
def test_a_tar_that_changed_makes_a_new_index(opened: Opened, root: Path, change: str) -> None:
    before, _ = opened()
    match change:
        case "another":
            tars.write(root / "t-0.tar", {"a.jpg": b"other" * 4000, "a.cls": b"7"})  # as old, but longer
            assert opened()[0].labels.tolist() == [7, 1, 2]
        case "touched":
            tars.write(root / "t-0.tar", {"a.jpg": b"One", "a.cls": b"8"})
            os.utime(root / "t-0.tar", (tars.OLD, tars.OLD + 1))
            assert opened()[0].labels.tolist() == [8, 1, 2]
        case "gone":
            (root / "t-0.tar").unlink()
            with pytest.raises(DatasetError, match=r"t-0.tar: there is no such file"):
                opened()
    assert before.labels.tolist() == [0, 1, 2], "the older mapping stays as it was"


def test_a_tar_changed_while_it_was_indexed_is_indexed_again(
    opened: Opened, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.utime(root / "t-0.tar")  # a change within the same tick would leave this mtime as it is
    opened()
    calls: list[bytes] = []
    real = module._list

    def counted(tars_root: bytes, name: bytes, *rest: Any) -> Any:
        calls.append(name)
        return real(tars_root, name, *rest)

    monkeypatch.setattr(module, "_list", counted)
    opened()
    assert sorted(calls) == [b"t-0.tar", b"t-1.tar"]


def test_the_index_of_shards_may_lie_beside_them(root: Path) -> None:
    index = open_index(described(shards=put(root, *CONTENTS)), root / "cache")
    assert index.file is not None and index.notices == []
    index.close()


def grow(tar: Path) -> None:
    with tar.open("ab") as file:
        file.write(bytes(512))


def become_fifo(tar: Path) -> None:
    tar.unlink()
    os.mkfifo(tar)


@pytest.mark.parametrize("kept_open", [False, True])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (grow, "its tar: size 10240 → 10752"),
        (lambda tar: os.truncate(tar, 600), "its tar: size 10240 → 600"),
        (lambda tar: os.utime(tar, (1, 2)), "its tar: modified 2020-09-13 12:26:40.000000000 → 1970-01-01 00:00:02"),
    ],
)
def test_a_tar_that_is_not_what_was_indexed_is_an_error_by_name(
    opened: Opened, root: Path, kept_open: bool, change: Callable[[Path], None], says: str
) -> None:
    _, source = opened()
    if kept_open:
        source.read(2)
    change(root / "t-1.tar")
    for _ in range(2):
        with pytest.raises(DatasetError) as caught:
            source.read(1)
        assert str(caught.value).startswith(f"{root}/t-1.tar/b.jpg: changed since it was indexed: {says}")
    assert source.read(0) == b"one"


@pytest.mark.parametrize(
    ("change", "says"), [(Path.unlink, "does not exist any more"), (become_fifo, "is not a regular file any more")]
)
def test_a_tar_that_is_gone_is_an_error_by_name(
    opened: Opened, root: Path, change: Callable[[Path], None], says: str
) -> None:
    _, source = opened()
    change(root / "t-1.tar")
    with pytest.raises(DatasetError, match=f"t-1.tar/b.jpg: changed since it was indexed: its tar: it {says}"):
        source.read(1)


def test_a_tar_that_was_replaced_while_it_is_open_stays_what_was_indexed(opened: Opened, root: Path) -> None:
    _, source = opened()
    source.read(2)
    tars.write(root / "new.tar", {"b.jpg": b"TWO TWO", "b.cls": b"1", "c.jpg": b"", "c.cls": b"2"})
    os.utime(root / "new.tar")
    (root / "new.tar").rename(root / "t-1.tar")
    assert source.read(1) == b"two two"


def test_a_tar_rewritten_while_it_is_read_is_an_error_and_no_mix(
    opened: Opened, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, source), real = opened(), os.pread

    def rewritten(fd: int, size: int, offset: int) -> bytes:
        data = real(fd, size, offset)
        with (root / "t-1.tar").open("r+b") as file:
            file.write(b"x")
        return data

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", rewritten)
        with pytest.raises(DatasetError, match=r"b.jpg: changed since it was indexed: its tar: modified"):
            source.read(1)


def test_a_member_over_the_limit_is_a_verdict_and_is_not_read(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    _, source = opened(max_file_bytes=5)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", lambda *_: pytest.fail("it was read"))
        with pytest.raises(BadPicture) as caught:
            source.read(1)
    assert (caught.value.stage, caught.value.reason) == ("read", "a file of 7 bytes, but max_file_bytes is 5")
    assert source.read(0) == b"one"


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES])
@pytest.mark.parametrize("call", ["open", "pread", "fstat"])
def test_an_io_error_passes_and_the_next_try_opens_the_tar_anew(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    _, source = opened()
    if call != "open":
        source.read(1)
    else:
        source.read(0)
    opens: list[Any] = []
    real = os.open

    def broken(*args: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, broken)
        with pytest.raises(OSError) as caught:
            source.read(1)
    assert caught.value.errno == number

    def counted(*args: Any, **options: Any) -> int:
        opens.append(args)
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", counted)
        assert source.read(1) == b"two two"
    assert len(opens) == 1


def test_a_bounded_number_of_tars_is_kept_open_and_none_after_close(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_OPEN", 3)
    dataset = described(shards=put(root, *({"a.jpg": b"%d" % i} for i in range(9))))
    index = open_index(dataset, root.parent / "cache")
    before = len(os.listdir("/proc/self/fd"))
    source = open_source(dataset, index, Decode())
    assert isinstance(source, ShardSource)
    for i in (*range(9), 8, 7, 6, 0):
        assert source.read(i) == b"%d" % i
        assert len(os.listdir("/proc/self/fd")) <= before + 3
    assert list(source._open) == [7, 6, 0], "the one that was read from longest ago was closed"
    source.close()
    assert len(os.listdir("/proc/self/fd")) == before and source.read(5) == b"5"
    del source
    assert len(os.listdir("/proc/self/fd")) == before
    index.close()


def test_a_tar_that_others_push_out_while_it_is_read_stays_the_one_that_is_read(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tars of one size and age: a descriptor that had become another one's would pass for the right one."""
    monkeypatch.setattr(module, "_OPEN", 1)
    dataset = described(shards=put(root, *({"a.jpg": b"%d" % i} for i in range(4))))
    index = open_index(dataset, root.parent / "cache")
    source, real = open_source(dataset, index, Decode()), module.pread
    assert isinstance(source, ShardSource)
    others = [1, 2, 3]

    def meanwhile(fd: int, size: int, offset: int) -> bytes:
        if others:
            i = others.pop()
            assert source.read(i) == b"%d" % i
        return real(fd, size, offset)

    monkeypatch.setattr(module, "pread", meanwhile)
    assert source.read(0) == b"0" and not others
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(source.read, [*range(4)] * 50)] == [b"%d" % i for i in range(4)] * 50
    source.close()
    index.close()


def test_reads_that_come_in_pieces_are_put_together(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    (_, source), real = opened(), os.pread
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", lambda fd, size, offset: real(fd, min(size, 2), offset))
        assert source.read(1) == b"two two"
