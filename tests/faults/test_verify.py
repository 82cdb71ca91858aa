"""A verification that is interrupted, killed, or unlucky with workers and disks says what an undisturbed one says."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from broken_disk import Orders, site
from service import stream, until

import headrace
from headrace.errors import HeadraceError
from headrace.pipeline.dataset import open_index
from headrace.pipeline.fake import CRASH, HANG, REJECT
from headrace.pipeline.ledger import Ledger
from headrace.pipeline.spec import Config
from headrace.server import verify
from headrace.server.findings import Finding
from headrace.server.journal import Taken
from headrace.server.verify import Verification

#: Enough pictures to be interrupted over.
MANY = 480
CHUNK = 32
#: Lines of the listing that are.
BAD = (0, 1, 333, 400, MANY - 1)


class Command:
    """`headrace verify` as a process."""

    def __init__(self, config: Path, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self._out = config.with_suffix(".out")
        self._err = config.with_suffix(".err")
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headrace.server", "verify", str(config), *arguments],
                stdout=out,
                stderr=err,
                env={**os.environ, **(environment or {})},
            )

    def end(self) -> int:
        return self.process.wait(100)

    @property
    def list(self) -> list[str]:
        return self._out.read_text().splitlines()

    @property
    def log(self) -> str:
        return self._err.read_text()


def write(home: Path, folder: Path, *, backend: str = "pillow", workers: int = 1, **more: Any) -> Path:
    file = home / "headrace.yaml"
    streams = {"train": stream(folder, size=64, **more)}
    file.write_text(yaml.safe_dump({"workers": {"processes": workers, "backend": backend}, "streams": streams}))
    return file


def worsen(folder: Path, number: int, end: bytes | None = None) -> str:
    """Make one file of the folder bad, by cutting it or by what stands at its end; its path in the listing."""
    file = sorted(folder.glob("*/*"))[number]
    data = file.read_bytes()
    file.unlink()  # a hard link: the photo itself stays good
    file.write_bytes(data[: len(data) // 2] if end is None else data + end)
    return str(file.relative_to(folder))


def journal(home: Path) -> Path | None:
    return next((home / "cache" / "headrace").glob("*.verify-*"), None)


def judged(home: Path) -> int:
    """Chunks in the journal."""
    file = journal(home)
    return 0 if file is None else max(0, file.read_bytes().count(b"\n") - 1)


def goes_on_after(log: str) -> int:
    (samples,) = re.findall(rf"goes on where an interrupted run was, after (\d+) of {MANY} samples", log)
    return int(samples)


@contextlib.contextmanager
def _quiet(what: str) -> Iterator[verify.Progress]:
    yield lambda done, total, note="": None


def found(config: Path, **options: Any) -> list[Finding]:
    """In this process, to its end."""
    with Verification(Config.load(config), ["train"], _quiet, **options) as run:
        run.run()
        result = list(run.findings())
        run.finish()
    return result


@pytest.fixture
def large(many: Callable[[int], Path]) -> Path:
    folder = many(MANY)
    for number in BAD:
        worsen(folder, number)
    return folder


# -- interrupted --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_was_ended_by_a_signal_goes_on_where_it_was(large: Path, home: Path, number: signal.Signals) -> None:
    config = write(home, large)
    first = Command(config)
    until(lambda: judged(home) >= 3, "some chunks to be judged")
    first.process.send_signal(number)
    status = first.end()
    assert status == (-number if number == signal.SIGKILL else 128 + number)
    assert first.list == []
    before = judged(home)
    assert 3 <= before < MANY // CHUNK
    if number != signal.SIGKILL:
        assert re.search(rf"stopped after \d+ of {MANY} samples; the same command goes on there", first.log)

    second = Command(config)
    assert second.end() == 1
    assert goes_on_after(second.log) == before * CHUNK
    assert journal(home) is None
    assert len(second.list) == 1 + 5


def test_a_run_that_is_killed_again_and_again_comes_to_its_end(large: Path, home: Path) -> None:
    config = write(home, large)
    done = 0
    for _ in range(3):
        run = Command(config)
        until(lambda: judged(home) > done + 1 or run.process.poll() is not None, "more chunks to be judged")  # noqa: B023
        run.process.kill()
        run.end()
        assert judged(home) >= done
        done = judged(home)
    with (journal(home) or home).open("ab") as file:
        file.write(b'[3,[[0,"probe","cut in the midd')
    last = Command(config)
    assert last.end() == 1
    assert goes_on_after(last.log) == done * CHUNK
    assert [line.split(",")[1] for line in last.list[1:]] == [str(i) for i in BAD]


def interrupted(config: Path, home: Path, chunks: int = 3) -> int:
    """How many chunks a run had judged when it was killed."""
    run = Command(config)
    until(lambda: judged(home) >= chunks, "some chunks to be judged")
    run.process.kill()
    run.end()
    return judged(home)


def test_who_wants_to_start_anew_does_and_so_does_who_changed_what_decides(large: Path, home: Path) -> None:
    config = write(home, large)
    interrupted(config, home)
    again = Command(config, "--restart")
    assert again.end() == 1
    assert "goes on" not in again.log and len(again.list) == 6

    interrupted(config, home)
    limited = Command(write(home, large, decode={"max_file_bytes": 10}))
    assert limited.end() == 1
    assert "goes on" not in limited.log and len(limited.list) == 1 + MANY


def test_a_file_that_changed_after_it_was_judged_is_judged_again(large: Path, home: Path) -> None:
    config = write(home, large)
    interrupted(config, home)
    bad = sorted(large.glob("*/*"))[0]
    folder = bad.parent.stat()
    bad.write_bytes(bad.read_bytes() + b"\0")
    os.utime(bad.parent, ns=(folder.st_atime_ns, folder.st_mtime_ns))  # or the data set would be listed again
    assert [row[3] for row in found(config)] == ["error", "decode", "decode", "decode", "decode"]


def test_a_file_that_was_replaced_and_indexed_again_is_judged_again(large: Path, home: Path) -> None:
    config = write(home, large)
    interrupted(config, home)
    bad, good = sorted(large.glob("*/*"))[:1][0], sorted(large.glob("*/*"))[5]
    data = good.read_bytes()
    size = bad.stat().st_size
    bad.write_bytes(data[: size // 4] + bytes(size - size // 4))  # the same name, the same size: the same fingerprint
    spec = Config.load(config).streams["train"]
    open_index(spec.dataset, home / "cache" / "headrace", reindex=True).close()
    run = Command(config)
    assert run.end() == 1
    assert "is about other data or other pictures: started anew" in run.log


def test_the_second_of_two_is_told(large: Path, home: Path) -> None:
    config = write(home, large)
    first = Command(config)
    until(lambda: judged(home) >= 1, "a chunk to be judged")
    with pytest.raises(Taken, match="stream train: another `headrace verify` is at work on it"):
        found(config)
    assert first.end() == 1
    assert len(first.list) == 6


def test_without_a_cache_that_can_be_written_it_runs_and_says_that_it_starts_anew(large: Path, home: Path) -> None:
    (home / "file").write_text("")
    config = write(home, large)
    config.write_text(config.read_text() + f"cache_dir: {home}/file/cache\n")
    run = Command(config)
    assert run.end() == 1
    assert "this run starts anew if it is interrupted" in run.log
    assert len(run.list) == 6


# -- workers --------------------------------------------------------------------------------------------------


def test_pictures_that_kill_workers_are_convicted_as_in_serving(many: Callable[[int], Path], home: Path) -> None:
    folder = many(70)
    killers = [worsen(folder, number, CRASH) for number in (3, 4, 66)]
    bad = worsen(folder, 40, REJECT)
    config = write(home, folder, backend="fake", workers=2, max_bad=1.0)
    listed = found(config)
    assert [(row[2], row[3]) for row in listed] == [
        (killers[0], "worker"), (killers[1], "worker"), (bad, "decode"), (killers[2], "worker")
    ]  # fmt: skip
    index = open_index(Config.load(config).streams["train"].dataset, home / "cache" / "headrace")
    assert sorted(Ledger(index).convicted) == [3, 4, 66]
    index.close()
    with headrace.Loader(config, batch_size=7, output="numpy", on_bad_sample="mask") as loader:
        for _ in range(2):
            rejects = sorted((r.index, r.stage, r.reason) for batch in loader for r in batch.rejects)
            assert rejects == [(row[1], row[3], row[4]) for row in listed]


def test_a_picture_that_was_convicted_after_it_was_judged_is_judged_again(
    many: Callable[[int], Path], home: Path
) -> None:
    folder = many(70)
    config = write(home, folder, backend="fake")
    with Verification(Config.load(config), ["train"], _quiet) as run:
        run.run()  # and its list is never delivered
    index = open_index(Config.load(config).streams["train"].dataset, home / "cache" / "headrace")
    Ledger(index).convict(5, "a trainer's worker died of it")
    index.close()
    assert [(row[1], row[3], row[4]) for row in found(config)] == [(5, "worker", "a trainer's worker died of it")]


def test_a_picture_that_hangs_workers_is_convicted(many: Callable[[int], Path], home: Path) -> None:
    folder = many(10)
    worsen(folder, 2, HANG)
    listed = found(write(home, folder, backend="fake"), hang_timeout=2.5)
    assert [(row[1], row[3]) for row in listed] == [(2, "worker")]
    assert "hung" in listed[0][4]


def test_workers_that_are_killed_at_work_change_nothing(large: Path, home: Path) -> None:
    config = write(home, large, workers=2)
    run = Command(config)
    for chunks in (2, 5, 8):
        until(lambda: judged(home) >= chunks, "some chunks to be judged")  # noqa: B023
        for pid in Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    assert run.end() == 1
    assert run.log.count("ended by signal 9") >= 3
    assert len(run.list) == 6 and not any(",worker," in line for line in run.list)


def test_workers_that_cannot_start_end_it_with_the_reason_and_judge_nothing(
    many: Callable[[int], Path], home: Path
) -> None:
    broken = home / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import os, sys\nif 'headrace.workers.worker' in sys.orig_argv:\n    os._exit(1)\n"
    )
    config = write(home, many(70), backend="fake")
    path = os.pathsep.join([str(broken), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = Command(config, environment={"PYTHONPATH": path})
    assert run.end() == 1
    assert run.list == []
    assert "headrace: workers end before they are ready" in run.log and "Traceback" not in run.log
    assert judged(home) == 0


def test_workers_that_never_become_ready_end_it_after_a_while(
    many: Callable[[int], Path], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = home / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import sys, time\nif 'headrace.workers.worker' in sys.orig_argv:\n    time.sleep(600)\n"
    )
    path = os.pathsep.join([str(broken), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setattr(verify, "_START_TIMEOUT", 2.0)
    with pytest.raises(HeadraceError, match="no worker has become ready in 2 s"):
        found(write(home, many(8), backend="fake"))


# -- disks ----------------------------------------------------------------------------------------------------


def test_files_that_cannot_be_read_are_no_rejects_and_all_others_are_judged(
    many: Callable[[int], Path], home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = many(70)
    bad = worsen(folder, 40)
    files = [folder / path for path in sorted(str(file.relative_to(folder)) for file in folder.glob("*/*"))]
    disk = site(home / "disk")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(disk), *filter(None, [os.environ.get("PYTHONPATH")])]))
    orders = Orders(disk)
    config = write(home, folder)
    orders.fail(files[33], "open", errno.EIO)
    orders.fail(files[34], "read", errno.ESTALE)
    orders.fail(files[68], "read", errno.EACCES)
    with Verification(Config.load(config), ["train"], _quiet) as run:
        run.run()
        listed = list(run.findings())
    assert [(row[1], row[3]) for row in listed] == [(33, "error"), (34, "error"), (40, "decode"), (68, "error")]
    assert listed[2][2] == bad
    assert "Input/output error" in listed[0][4] and str(files[33]) in listed[0][4]

    orders.clear()  # the disk is mended: only what has no verdict is judged again
    assert [(row[1], row[3]) for row in found(config)] == [(40, "decode")]
    assert "goes on where an interrupted run was, after 32 of 70" in caplog.text
