"""Convictions outlive the daemon, and hold for the file that was convicted."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.pipeline.dataset import open_index
from headrace.pipeline.ledger import Ledger
from headrace.pipeline.spec import Config, Dataset


def dataset(folder: Path) -> Dataset:
    stream = {"dataset": {"folder": str(folder)}, "transforms": [{"center_crop": {"size": 8}}]}
    return Config.load({"streams": {"s": stream}}).streams["s"].dataset


def test_a_conviction_is_read_again_by_whoever_opens_the_index(many: Callable[[int], Path], home: Path) -> None:
    index = open_index(dataset(many(8)), home / "cache")
    assert Ledger(index).convicted == {}
    Ledger(index).convict(5, "it kills: \udce9 and all")
    assert Ledger(index).convicted == {5: "it kills: \udce9 and all"}
    index.close()


def test_a_file_that_was_replaced_since_is_innocent(many: Callable[[int], Path], home: Path) -> None:
    folder = many(8)
    index = open_index(dataset(folder), home / "cache")
    victim = os.fsdecode(index.full_path(5))
    Ledger(index).convict(5, "it kills")
    index.close()
    os.unlink(victim)
    Path(victim).write_bytes(b"another one")
    index = open_index(dataset(folder), home / "cache", reindex=True)
    assert Ledger(index).convicted == {}
    index.close()


def test_a_conviction_follows_its_file_when_the_listing_grows(many: Callable[[int], Path], home: Path) -> None:
    folder = many(8)
    index = open_index(dataset(folder), home / "cache")
    path = index.path(5)
    Ledger(index).convict(5, "it kills")
    index.close()
    first = sorted(folder.glob("*/*"))[0]
    os.link(first, first.with_name("!" + first.name))
    index = open_index(dataset(folder), home / "cache", reindex=True)
    [(line, reason)] = Ledger(index).convicted.items()
    assert (index.path(line), reason) == (path, "it kills") and line == 6
    index.close()


def test_a_conviction_holds_for_every_line_that_names_the_file(many: Callable[[int], Path], home: Path) -> None:
    folder = many(4)
    names = sorted(str(file) for file in folder.glob("*/*"))
    (home / "l.csv").write_text("\n".join(["path", *names, *names[:2]]))
    listed = Dataset(list=home / "l.csv", root=folder)
    index = open_index(listed, home / "cache")
    ledger = Ledger(index)
    ledger.convict(5, "it kills")
    assert ledger.convicted == Ledger(index).convicted == {1: "it kills", 5: "it kills"}
    index.close()


def test_a_line_that_was_cut_costs_no_other(many: Callable[[int], Path], home: Path) -> None:
    index = open_index(dataset(many(8)), home / "cache")
    Ledger(index).convict(5, "it kills")
    Ledger(index).convict(6, "it kills as well")
    assert index.file is not None
    file = index.file.with_suffix(".ledger")
    os.truncate(file, file.stat().st_size - 9)
    Ledger(index).convict(7, "so does this")
    assert Ledger(index).convicted == {5: "it kills", 7: "so does this"}
    Ledger(index).convict(6, "it kills as well")
    assert Ledger(index).convicted.keys() == {5, 6, 7} and b"\n\n" not in file.read_bytes()
    index.close()


def test_lines_that_are_none_are_passed_over(
    many: Callable[[int], Path], home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index = open_index(dataset(many(8)), home / "cache")
    Ledger(index).convict(5, "it kills")
    assert index.file is not None
    with index.file.with_suffix(".ledger").open("a") as file:
        file.write('not json\n[1]\n{"index": "x"}\n{"index": 99, "reason": ""}\n')
    with caplog.at_level(logging.WARNING):
        assert Ledger(index).convicted == {5: "it kills"}
    assert len(caplog.records) == 4
    index.close()


def test_a_ledger_that_cannot_be_written_still_holds_in_this_process(
    many: Callable[[int], Path], home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index = open_index(dataset(many(8)), home / "cache")
    assert index.file is not None
    index.file.with_suffix(".ledger").mkdir()
    ledger = Ledger(index)
    ledger.convict(1, "it kills")
    assert ledger.convicted == {1: "it kills"} and "cannot be written" in caplog.text
    index.close()
