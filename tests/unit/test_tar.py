"""What a tar holds and where: as Python's tarfile says it, and an error wherever a tar is not whole."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tars import packed

from headrace.pipeline import tar as module
from headrace.pipeline.tar import Tar, TarError

Members = list[tuple[bytes, int, int]]


def read(data: bytes) -> tuple[Members, dict[str, int]]:
    """Members and what was left out of a tar with these bytes."""
    fd = os.memfd_create("tar")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        tar = Tar(fd, len(data))
        members = list(tar.members())
        for name, offset, size in members:
            assert tar.read(offset, size) == data[offset : offset + size], name
        return members, dict(tar.left_out)
    finally:
        os.close(fd)


def refusal(data: bytes) -> str:
    with pytest.raises(TarError) as caught:
        read(data)
    return str(caught.value)


def theirs(data: bytes) -> Members:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:", errors="surrogateescape") as tar:
        return [(os.fsencode(m.name), m.offset_data, m.size) for m in tar if m.isreg()]


def header(name: bytes, size: bytes = b"00000000003\0", kind: bytes = b"0", magic: bytes = b"ustar\x0000") -> bytearray:
    """A header by hand, with the right checksum."""
    block = bytearray(512)
    block[: len(name)] = name
    block[124:136] = size
    block[156:157] = kind
    block[257 : 257 + len(magic)] = magic
    return summed(block)


def summed(block: bytearray, signed: bool = False) -> bytearray:
    block[148:156] = b" " * 8
    total = sum(block) - (256 * sum(b > 127 for b in block) if signed else 0)
    block[148:156] = b"%06o\0 " % total
    return block


def block(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


END = bytes(1024)
ONE = bytes(header(b"a.jpg")) + block(b"abc")

# -- the forms of a tar -------------------------------------------------------------------------------------

NAMES = [
    "a.jpg",
    "x/b c.jpg",
    "tab\t.jpg",
    "new\nline.jpg",
    "ü/é.png",
    "\udcff\udc80.gif",
    "d" * 99,
    "d/" * 60 + "e.jpg",
]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_those_that_tarfile_finds(form: int) -> None:
    files = {name: name.encode("utf-8", "surrogateescape") * 40 for name in NAMES}
    if form != tarfile.USTAR_FORMAT:
        files |= {"n" * 300: b"long", "f/" * 500 + "x.jpg": b"", "é" * 200 + ".jpg": bytes(513)}
    data = packed(files, form)
    members, left_out = read(data)
    assert members == theirs(data) and left_out == {}
    assert [os.fsdecode(name) for name, _, _ in members] == list(files)


@pytest.mark.skipif(shutil.which("tar") is None, reason="there is no tar program")
@pytest.mark.parametrize("form", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_members_are_those_that_the_tar_program_wrote(home: Path, form: str) -> None:
    long = "n" * (60 if form in ("v7", "ustar") else 200) + ".jpg"
    for file in ("a/1.jpg", "a/2.cls", f"b/{long}", "b/\udcff.jpg"):
        (home / file).parent.mkdir(exist_ok=True)
        (home / file).write_bytes(os.fsencode(file) * 99)
    done = subprocess.run(["tar", "-C", home, "-c", f"--format={form}", "a", "b"], capture_output=True, check=True)
    members, left_out = read(done.stdout)
    assert members == theirs(done.stdout) and len(members) == 4 and left_out == {"folder": 2}
    for name, offset, size in members:
        assert done.stdout[offset : offset + size] == name * 99


a_path = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=120).map(
    lambda name: name.strip("/") or "x"
)


@given(st.dictionaries(a_path, st.binary(max_size=1500), max_size=12), st.sampled_from([1, 2]), st.integers(600, 5000))
@settings(max_examples=60)
def test_members_of_any_names_and_sizes_are_those_of_tarfile(files: dict[str, bytes], form: int, window: int) -> None:
    data = packed(files, form)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_WIDE", window)
        patch.setattr(module, "_NARROW", 512)
        patch.setattr(module, "_NEAR", 700)
        members, _ = read(data)
    assert members == theirs(data) and len(members) == len(files)


def test_a_tar_without_members_is_one() -> None:
    assert read(bytes(10240)) == ([], {})
    assert read(bytes(512)) == ([], {})


def test_the_old_form_without_a_magic_is_read() -> None:
    old = bytes(header(b"a.jpg", b"          3 ", b"\0", magic=b"")) + block(b"abc")
    folder = bytes(header(b"folder/", b"          0\0", b"\0", magic=b""))
    assert read(folder + old + END) == ([(b"a.jpg", 1024, 3)], {"folder": 1})


def test_a_checksum_over_signed_bytes_is_right_too() -> None:
    odd = summed(header(b"\xff\xfe\xe9.jpg"), signed=True)
    assert read(bytes(odd) + block(b"abc") + END)[0] == [(b"\xff\xfe\xe9.jpg", 512, 3)]


def test_sizes_in_base_256_and_in_twelve_digits_are_read() -> None:
    assert read(bytes(header(b"a", b"\x80" + (3).to_bytes(11, "big"))) + block(b"abc") + END)[0] == [(b"a", 512, 3)]
    assert read(bytes(header(b"a", b"000000000003")) + block(b"abc") + END)[0] == [(b"a", 512, 3)]


def test_a_member_beyond_8_gib_is_found_without_reading_it(home: Path) -> None:
    size = 9 << 30
    with (home / "big.tar").open("wb") as file:
        file.write(header(b"big.jpg", b"\x80" + size.to_bytes(11, "big")))
        file.seek(512 + size)
        file.write(ONE + END)
    with (home / "big.tar").open("rb") as file:
        tar = Tar(file.fileno(), 512 + size + len(ONE + END))
        assert list(tar.members()) == [(b"big.jpg", 512, size), (b"a.jpg", 1024 + size, 3)]


def test_the_prefix_is_part_of_the_name_only_where_the_form_has_one() -> None:
    posix, gnu, star = header(b"a.jpg"), header(b"a.jpg", magic=b"ustar  \0"), header(b"a.jpg")
    for made in (posix, gnu, star):
        made[345:350] = b"12345"
    star[476:488], star[508:512] = b"00000000001\0", b"tar\0"
    names = [read(bytes(summed(made)) + block(b"abc") + END)[0][0][0] for made in (posix, gnu, star)]
    assert names == [b"12345/a.jpg", b"a.jpg", b"12345/a.jpg"]


def pax(*records: tuple[bytes, bytes], kind: bytes = b"x") -> bytes:
    body = b""
    for keyword, value in records:
        record = b" " + keyword + b"=" + value + b"\n"
        length = len(record) + 1
        while len(b"%d" % length) + len(record) != length:
            length += 1
        body += b"%d" % length + record
    return bytes(header(b"pax", b"%011o\0" % len(body), kind)) + block(body)


def test_a_pax_header_gives_the_next_member_its_name_and_size_and_no_other() -> None:
    wrong = bytes(header(b"cut", b"00000000000\0")) + block(b"x" * 700)
    data = pax((b"path", b"a=b\nc/\xff.jpg"), (b"size", b"700"), (b"mtime", b"1.5")) + wrong + ONE + END
    assert read(data)[0] == [(b"a=b\nc/\xff.jpg", 1536, 700), (b"a.jpg", 3072, 3)]


def test_comments_for_all_members_change_nothing() -> None:
    assert read(pax((b"comment", b"0123abc"), kind=b"g") + ONE + END)[0] == [(b"a.jpg", 1536, 3)]


def test_a_long_link_name_belongs_to_the_link_only() -> None:
    link = bytes(header(b"././@LongLink", b"%011o\0" % 300, b"K")) + block(b"t" * 299 + b"\0")
    data = link + bytes(header(b"l.jpg", b"00000000000\0", b"2")) + ONE + END
    assert read(data) == ([(b"a.jpg", 2048, 3)], {"symbolic link": 1})


# -- what is no regular file --------------------------------------------------------------------------------


def test_what_is_no_regular_file_is_left_out_and_counted() -> None:
    kinds = {b"2": "symbolic link", b"3": "device", b"4": "device", b"5": "folder", b"6": "FIFO", b"V": "volume label"}
    data = b"".join(bytes(header(b"x.jpg", b"00000000000\0", kind)) for kind in kinds)
    assert read(data + ONE + END) == (
        [(b"a.jpg", 512 * 7, 3)],
        {"symbolic link": 1, "device": 2, "folder": 1, "FIFO": 1, "volume label": 1},
    )


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (b"1", "is a hard link to another member (with GNU tar, --hard-dereference writes the file instead)"),
        (b"S", "is a sparse file (with GNU tar, leave out --sparse)"),
        (b"M", "is the rest of a file that begins in another volume"),
        (b"Q", "is of type b'Q', which is not known"),
    ],
)
def test_members_whose_bytes_are_not_simply_there_are_refused_by_name(kind: bytes, says: str) -> None:
    assert refusal(ONE + bytes(header(b"b.jpg", b"00000000000\0", kind)) + END) == f'"b.jpg", at offset 1024, {says}'


@pytest.mark.skipif(shutil.which("tar") is None, reason="there is no tar program")
@pytest.mark.parametrize("form", ["gnu", "posix"])
def test_sparse_files_and_hard_links_of_the_tar_program_are_refused(home: Path, form: str) -> None:
    (home / "a.jpg").write_bytes(b"x")
    os.truncate(home / "a.jpg", 1 << 20)
    os.link(home / "a.jpg", home / "b.jpg")

    def made(*options: str) -> bytes:
        command = ["tar", "-C", str(home), "-c", f"--format={form}", *options]
        return subprocess.run(command, capture_output=True, check=True).stdout

    for options in (["--sparse"], ["--sparse-version=0.0"], ["--sparse-version=0.1"])[: 1 if form == "gnu" else 3]:
        assert "is a sparse file" in refusal(made(*options, "a.jpg"))
    assert '"b.jpg", at offset' in refusal(made("a.jpg", "b.jpg")) and "hard link" in refusal(made("a.jpg", "b.jpg"))
    assert len(read(made("--hard-dereference", "a.jpg", "b.jpg"))[0]) == 2


# -- damage -------------------------------------------------------------------------------------------------

WHOLE = packed({"a.jpg": b"x" * 700, "b" * 200: b"y" * 100, "c.jpg": b"z" * 512})


def test_a_tar_that_is_cut_anywhere_is_an_error_with_the_offset() -> None:
    end = len(WHOLE.rstrip(b"\0"))
    first_zeros = end + -end % 512
    for length in range(first_zeros + 512):
        said = refusal(WHOLE[:length])
        if length >= 512:
            assert said.startswith("is cut") and "offset" in said, (length, said)
    for length in range(first_zeros + 512, len(WHOLE), 100):
        assert len(read(WHOLE[:length])[0]) == 3


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty"),
        (ONE[:700], "is cut: it ends at offset 700 without the zeros that end a tar"),
        (ONE[:514], 'is cut: "a.jpg", at offset 0, has 3 bytes, of which 2 are there'),
        (ONE, "is cut: it ends at offset 1024 without the zeros that end a tar"),
        (ONE + ONE[:100], "is cut within a header, at offset 1024"),
        (ONE + END[:100], "is cut within a header, at offset 1024"),
        (pax((b"path", b"a.jpg"))[:520], "is cut: an extended header, at offset 0, has"),
        (pax((b"path", b"a.jpg")) + END, "ends at offset 1024 behind an extended header, without the member"),
        (ONE + b"garbage".ljust(512) + END, "is damaged: there is no header at offset 1024, where one must be"),
        (ONE + END + ONE + END, "goes on behind its end, at offset 2048: are these two tars, one behind the other?"),
        (ONE + bytes(512) + ONE + END, "goes on behind its end, at offset 1536"),
        (ONE + bytes(20000) + b"x", "goes on behind its end, at offset 21024"),
        (bytes(header(b"a", b"0000000000x\0")) + END, "is damaged: the header at offset 0 has no number for the size"),
        (bytes(header(b"a", b"\xff" * 12)) + END, "is damaged: the header at offset 0 has no number for the size"),
        (bytes(header(b"a", b"0o17\0" + bytes(7))) + END, "is damaged: the header at offset 0 has no number"),
        (
            bytes(header(b"a", b"\x80" + b"\xff" * 11)) + END,
            'is cut: "a", at offset 0, has 309485009821345068724781055',
        ),
        (
            bytes(header(b"x", b"%011o\0" % (1 << 21), b"L")) + bytes(1 << 22),
            "an extended header, at offset 0, has 2097152 bytes; 1048576 are allowed",
        ),
        (bytes(header(b"x", b"00000000005\0", b"x")) + block(b"hello") + ONE, "has no record at its byte 0"),
        (bytes(header(b"x", b"00000000012\0", b"x")) + block(b"99 path=a\n") + ONE, "has no record at its byte 0"),
        (pax((b"size", b"-1")) + ONE + END, "has no number for the size, but b'-1'"),
        (pax((b"path", b"all"), kind=b"g") + ONE + END, "gives every member one path or size"),
        (pax((b"GNU.sparse.major", b"1"), (b"GNU.sparse.name", b"s.jpg")) + ONE, '"s.jpg", at offset 0, is a sparse'),
        (b"\xff\xd8\xff" + bytes(2000), "is no tar, but JPEG"),
        (b"PK\x03\x04" + bytes(2000), "is no tar, but zip"),
        (b"hello", "is no tar, but text: 'hello'"),
        (gzip.compress(WHOLE), "is compressed (gzip); samples are read at offsets, so gunzip it"),
        (bz2.compress(WHOLE), "is compressed (bzip2); samples are read at offsets, so bunzip2 it"),
        (lzma.compress(WHOLE), "is compressed (xz); samples are read at offsets, so unxz it"),
    ],
)
def test_tar_damage_is_named_with_its_offset(data: bytes, says: str) -> None:
    assert says in refusal(data)


def test_any_flipped_bit_of_a_header_is_noticed() -> None:
    for at in range(500):
        damaged = bytearray(ONE + END)
        damaged[at] ^= 1
        said = refusal(bytes(damaged))
        assert "is no tar" in said, at


@given(st.binary(max_size=3000))
@settings(max_examples=50)
def test_bytes_behind_a_member_are_zeros_members_or_an_error(data: bytes) -> None:
    try:
        members, _ = read(ONE + data)
    except TarError:
        return
    assert members[0] == (b"a.jpg", 512, 3) and not data.strip(b"\0")


def test_a_file_that_shrinks_while_it_is_read_is_an_error(home: Path) -> None:
    (home / "t.tar").write_bytes(ONE + END)
    with (home / "t.tar").open("rb") as file:
        tar = Tar(file.fileno(), 2048)
        os.truncate(home / "t.tar", 514)
        with pytest.raises(TarError, match="is cut"):
            list(tar.members())
        with pytest.raises(TarError, match="is cut: it ends at offset 514, while it is read"):
            tar.read(512, 3)


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    real = os.pread

    def switch() -> None:
        monkeypatch.setattr(os, "pread", lambda fd, size, offset: real(fd, min(size, 300), offset))

    return switch


def test_reads_that_come_in_pieces_are_put_together(in_pieces: Callable[[], None]) -> None:
    in_pieces()
    assert read(WHOLE)[0] == theirs(WHOLE)
