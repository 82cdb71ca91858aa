"""What an interrupted verification has judged, on disk."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from headrace.server.journal import Journal, Taken
from headrace.server.tally import Found

KEY: dict[str, Any] = {"data": "abc", "chunk": 2, "render_id": "fake/1"}
JUDGED: dict[int, Found] = {3: [], 0: [(1, "probe", 'a "reason", ümläut\n')], 1: [(0, "read", "x"), (1, "worker", "y")]}


@pytest.fixture
def file(home: Path) -> Path:
    return home / "a.verify-1"


def begun(file: Path, key: dict[str, Any] = KEY, **options: bool) -> dict[int, Found]:
    with Journal.open(file, "stream s") as journal:
        return dict(journal.begin(key, **options))


def filled(file: Path) -> None:
    with Journal.open(file, "stream s") as journal:
        assert dict(journal.begin(KEY)) == {}
        for chunk, found in JUDGED.items():
            journal.add(chunk, found)
        assert journal.kept


def test_what_was_judged_is_there_the_next_time(file: Path) -> None:
    filled(file)
    assert begun(file) == JUDGED
    assert begun(file) == JUDGED


def test_what_is_added_later_is_there_too_and_of_a_chunk_the_latest(file: Path) -> None:
    filled(file)
    with Journal.open(file, "stream s") as journal:
        assert dict(journal.begin(KEY)) == JUDGED
        journal.add(3, [(0, "decode", "z")])
        journal.add(9, [])
    assert begun(file) == JUDGED | {3: [(0, "decode", "z")], 9: []}


def test_a_file_that_was_cut_anywhere_loses_only_the_line_that_was_cut(file: Path) -> None:
    filled(file)
    whole = file.read_bytes()
    lines = whole.splitlines(keepends=True)
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        left = dict(list(JUDGED.items())[: max(0, whole[:size].count(b"\n") - 1)])
        with Journal.open(file, "stream s") as journal:
            assert dict(journal.begin(KEY)) == left, size
            journal.add(7, [])
        assert begun(file) == left | {7: []}, size
        assert file.read_bytes() == b"".join(lines[: len(left) + 1]) + b"[7,[]]\n"


@pytest.mark.parametrize(
    "line", [b"\0" * 8, b"[]", b"[1]", b'["1",[]]', b'[1,[[0,"probe"]]]', b"\xff", b"{}", b"[1,[]]]"]
)
def test_a_line_that_is_none_ends_what_is_believed(file: Path, line: bytes) -> None:
    filled(file)
    whole = file.read_bytes()
    file.write_bytes(whole + line + b"\n[8,[]]\n")
    assert begun(file) == JUDGED
    assert file.read_bytes() == whole


@pytest.mark.parametrize("name", KEY)
def test_what_is_about_something_else_is_not_believed(file: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    filled(file)
    assert begun(file, KEY | {name: "other"}) == {}
    assert "started anew" in caplog.text
    assert begun(file) == {}  # it is about the other thing now


def test_who_wants_to_start_anew_does(file: Path) -> None:
    filled(file)
    assert begun(file, restart=True) == {}
    assert begun(file) == {}


def test_a_finished_run_leaves_nothing(file: Path) -> None:
    filled(file)
    with Journal.open(file, "stream s") as journal:
        assert dict(journal.begin(KEY)) == JUDGED
        journal.forget()
    assert not file.exists()
    assert begun(file) == {}


def test_only_one_process_has_it(file: Path) -> None:
    with Journal.open(file, "stream s") as journal:
        for _ in range(2):
            with pytest.raises(Taken, match="stream s: another `headrace verify` is at work on it"):
                Journal.open(file, "stream s")
        journal.forget()
        with Journal.open(file, "stream s") as other:  # the first one has finished; its end must not take this away
            journal.close()
            with pytest.raises(Taken):
                Journal.open(file, "stream s")
            assert other.kept


def test_a_file_that_its_owner_removes_while_the_next_one_waits_is_not_taken(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = fcntl.flock

    def flock(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", really)
        file.unlink()
        really(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with Journal.open(file, "stream s") as journal:
        assert list(journal.begin(KEY)) == []
        journal.add(1, [])
    assert begun(file) == {1: []}


@pytest.mark.parametrize("short", [False, True])
def test_a_full_disk_costs_what_could_not_be_written_and_is_said_once(
    file: Path, short: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    filled(file)
    really = os.write

    def full(fd: int, data: bytes) -> int:
        if short:
            return really(fd, data[:3])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Journal.open(file, "stream s") as journal:
        assert dict(journal.begin(KEY)) == JUDGED
        monkeypatch.setattr(os, "write", full)
        journal.add(5, [])
        journal.add(6, [])
        assert not journal.kept
        monkeypatch.setattr(os, "write", really)
        journal.add(7, [])
    assert caplog.text.count("No space left on device") == 1
    assert begun(file) == JUDGED | {7: []}


def test_a_place_that_cannot_be_written_is_said_and_nothing_is_kept(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (home / "file").write_text("")
    for place in (None, home / "file" / "a", home / "missing" / "a", home):
        caplog.clear()
        with Journal.open(place, "stream s") as journal:
            assert not journal.kept
            assert list(journal.begin(KEY)) == []
            journal.add(1, [])
            journal.forget()
        (record,) = caplog.records
        assert "stream s: " in record.message and "starts anew if it is interrupted" in record.message


def test_a_file_of_another_user_is_not_believed(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    filled(file)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with Journal.open(file, "stream s") as journal:
        assert not journal.kept and list(journal.begin(KEY)) == []
    assert "belongs to another user" in caplog.text
