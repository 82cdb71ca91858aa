"""The list of `headrace verify`, and the file that it goes to."""

from __future__ import annotations

import csv
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.errors import ConfigError, HeadraceError
from headrace.server.findings import COLUMNS, Finding, Target, table

FINDINGS: list[Finding] = [
    ("train", 0, r"a\tb\nc\\d.jpg", "decode", 'cut "short", after 3 rows'),
    ("val, small", 12, "ünï✓.png", "probe", "two\nlines\rand a half"),
]


def test_the_list_is_csv_with_a_head_and_comes_back_as_it_was() -> None:
    text = "".join(f"{line}\n" for line in table(FINDINGS))
    assert text.startswith("stream,index,path,stage,reason\n")
    rows = list(csv.reader(io.StringIO(text, newline="")))
    assert rows == [list(COLUMNS), *([str(value) for value in finding] for finding in FINDINGS)]


def test_a_list_of_nothing_is_its_head() -> None:
    assert list(table([])) == ["stream,index,path,stage,reason"]


def test_a_file_is_made_with_the_mode_of_any_new_file(home: Path) -> None:
    before = os.umask(0o027)
    try:
        Target(home / "r.csv", []).write(["a", "ü"])
    finally:
        os.umask(before)
    assert (home / "r.csv").read_bytes() == "a\nü\n".encode()
    assert stat.S_IMODE((home / "r.csv").stat().st_mode) == 0o640


def test_a_name_may_be_as_long_as_the_disk_allows(home: Path) -> None:
    Target(home / ("é" * 127), []).write(["a"])
    assert (home / ("é" * 127)).read_text() == "a\n"


def test_an_older_list_is_replaced_at_once_or_not_at_all(home: Path) -> None:
    file = home / "r.csv"
    Target(file, []).write(table(FINDINGS[:1]))
    before = file.read_bytes()
    names = set(os.listdir(home))

    def breaks() -> Iterator[str]:
        yield from table(FINDINGS)
        assert file.read_bytes() == before  # nothing of the new one is there yet
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Target(file, []).write(breaks())
    assert file.read_bytes() == before
    assert set(os.listdir(home)) == names
    Target(file, []).write(table(FINDINGS))
    assert file.read_bytes() != before
    assert set(os.listdir(home)) == names


def test_a_link_stays_and_what_it_leads_to_is_replaced(home: Path) -> None:
    (home / "real").mkdir()
    (home / "r.csv").symlink_to(home / "real" / "list.csv")
    Target(home / "r.csv", []).write(["x"])
    assert (home / "r.csv").is_symlink()
    assert (home / "real" / "list.csv").read_text() == "x\n"


@pytest.mark.parametrize("content", ["path,label\n", "stream,index,path", "\x89PNG", "streams:\n"])
def test_a_file_that_is_something_else_is_not_replaced(home: Path, content: str) -> None:
    (home / "r.csv").write_text(content)
    with pytest.raises(ConfigError, match="it exists and is no list of `headrace verify`"):
        Target(home / "r.csv", [])
    assert (home / "r.csv").read_text() == content


def test_what_is_no_file_is_not_written(home: Path) -> None:
    os.mkfifo(home / "fifo")
    for path in (home, home / "fifo", Path("/dev/null")):
        with pytest.raises(ConfigError, match="is no list"):
            Target(path, [])


def test_a_folder_that_does_not_exist_is_named_before_anything_is_done(home: Path) -> None:
    with pytest.raises(ConfigError, match="missing is no folder that may be written to"):
        Target(home / "missing" / "r.csv", [])


def test_nothing_is_written_into_a_data_set(home: Path) -> None:
    (home / "data" / "a").mkdir(parents=True)
    (home / "link").symlink_to(home / "data" / "a")
    for folder in (home / "data", home / "data" / "a", home / "link", home / "data" / "a" / ".."):
        with pytest.raises(ConfigError, match="belongs to the data set .*/data, which is never written to"):
            Target(folder / "r.csv", [home / "data"])
    with pytest.raises(ConfigError, match="belongs to the data set"):
        Target(home / "list.csv", [home / "list.csv"])
    Target(home / "data2.csv", [home / "data"]).write(["beside it"])


def test_a_file_that_cannot_be_written_is_said(home: Path) -> None:
    target = Target(home / "r.csv", [])
    (home / "r.csv").mkdir()
    with pytest.raises(HeadraceError, match=r"r\.csv: cannot be written: Is a directory"):
        target.write(["x"])
    assert set(os.listdir(home)) == {"home", "tmp", "cache", "run", "r.csv"}
