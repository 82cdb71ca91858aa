"""`headrace COMMAND` as a process: what it prints where, and its exit status."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from service import Daemon, Truth, stream, until

import headrace
from headrace.errors import ConfigError
from headrace.pipeline.backend import make
from headrace.pipeline.dataset import open_index
from headrace.pipeline.render import ChunkRenderer
from headrace.pipeline.spec import Config
from headrace.server import cli
from headrace.slots import Ring

HEADRACE = [sys.executable, "-m", "headrace.server"]
PHOTOS = 48
SIZE = 32
CELL = (98, SIZE + 16)  # width and height of a picture of `show` with its caption

Run = subprocess.CompletedProcess[bytes]


def run(*arguments: object, environment: dict[str, str] | None = None) -> Run:
    command = HEADRACE + [os.fsencode(a) if isinstance(a, bytes) else str(a) for a in arguments]
    return subprocess.run(
        command, capture_output=True, timeout=100, check=False, env={**os.environ, **(environment or {})}
    )


def lines(done: Run) -> list[str]:
    """Standard output of a command that went well."""
    assert done.returncode == 0, done.stderr.decode()
    assert b"\x1b" not in done.stdout  # no colours: it is no terminal
    return done.stdout.decode().splitlines()


def complaint(done: Run, status: int) -> str:
    """Standard error of one that did not, with nothing on standard output but what came before."""
    text = done.stderr.decode()
    assert done.returncode == status, text
    assert "Traceback" not in text
    return text


@pytest.fixture
def config(photos: Path, home: Path) -> Path:
    file = home / "headrace.yaml"
    file.write_text(
        yaml.safe_dump(
            {"workers": {"backend": "pillow", "processes": 1}, "streams": {"train": stream(photos, size=SIZE)}}
        )
    )
    return file


@pytest.fixture
def odd(photos: Path, home: Path) -> Path:
    """Files with odd names, one that is bad, and some that are left out."""
    folder = home / "odd" / "one class"
    folder.mkdir(parents=True)
    good = (photos / "sea" / "000.jpg").read_bytes()
    for name in (b"a\tb\nc\\d.jpg", b"e\xff.jpg", "ünïcode ✓.JPG".encode(), b"[x] {y} %z*.png"):
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_bytes(good)
    (folder / "bad.jpg").write_bytes(good[: len(good) // 2])
    (folder / "notes.txt").write_text("left out")
    (folder / "dangling.jpg").symlink_to("nowhere")
    file = home / "odd.yaml"
    file.write_text(yaml.safe_dump({"streams": {"train": stream(folder.parent, shuffle=False)}}))
    return file


ODD = [r"0	0	one class/[x] {y} %z*.png", r"1	0	one class/a\tb\nc\\d.jpg", r"2	0	one class/bad.jpg",
       r"3	0	one class/e\xff.jpg", r"4	0	one class/ünïcode ✓.JPG"]  # fmt: skip


# -- usage --------------------------------------------------------------------------------------------------


def test_version_and_help() -> None:
    assert lines(run("--version")) == [headrace.__version__]
    assert "serve" in run("--help").stdout.decode()


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("bogus",),
        ("check",),
        ("check", "a.yaml", "b.yaml"),
        ("ls", "a.yaml"),
        ("show", "a.yaml", "train"),
        ("show", "a.yaml", "train", "0:0", "-n", "0"),
        ("ping", "ipc:///x", "--timeout", "soon"),
        ("ping", "ipc:///x", "--timeout", "0"),
        ("bench", "ipc:///x", "--steps", "0"),
        ("check", "--wrong", "a.yaml"),
    ],
)
def test_wrong_usage_is_status_2_and_says_what_is_right(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    text = complaint(done, 2) + done.stdout.decode()
    assert "Usage: headrace" in text or "Usage: python -m headrace" in text


def test_what_nobody_reads_ends_quietly(config: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        for command in (["ls", str(config), "train"], ["check", str(config)]):
            done = subprocess.run(HEADRACE + command, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
            assert (done.returncode, done.stderr) == (0, b"")
    finally:
        os.close(writer)


def test_what_cannot_be_written_is_said(config: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*HEADRACE, "ls", str(config), "train"], stdout=full, stderr=subprocess.PIPE, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (1, b"headrace: standard output: No space left on device\n")


# -- check --------------------------------------------------------------------------------------------------


def test_check_says_what_would_run(config: Path, home: Path) -> None:
    out = "\n".join(lines(run("check", config)))
    index = open_index(Config.load(config).streams["train"].dataset, home / "cache" / "headrace")
    prints = Config.load(config).streams["train"].fingerprints(index.data_fingerprint)
    index.close()
    assert "backend: pillow runs as pillow/" in out and "  the configuration names it" in out
    assert "workers: 1 " in out
    assert f"stream train: {PHOTOS} samples, 3 classes, 12 chunks of 4; pictures {SIZE}x{SIZE}\n" in out
    assert all(digest[:12] in out for digest in (prints.data, prints.order, prints.pixels))


def test_check_names_what_is_left_out(odd: Path) -> None:
    out = lines(run("check", odd))
    assert "  left out one class/dangling.jpg: what it links to does not exist" in out
    assert "  left out by name or ending: 1 .txt" in out


def test_check_of_an_unusable_data_set_is_status_1(home: Path) -> None:
    (home / "data" / "full").mkdir(parents=True)
    (home / "data" / "empty class").mkdir()
    (home / "data" / "full" / "a.jpg").write_bytes(b"x")
    for folder, text in (("data", "empty class"), ("missing", "missing: cannot list")):
        file = home / f"{folder}.yaml"
        file.write_text(yaml.safe_dump({"streams": {"train": stream(home / folder)}}))
        assert text in complaint(run("check", file), 1)


def test_check_goes_on_behind_an_unusable_data_set(photos: Path, home: Path) -> None:
    file = home / "three.yaml"
    streams = {"first": stream(home / "none"), "second": stream(photos), "third": stream(home / "nowhere")}
    file.write_text(yaml.safe_dump({"streams": streams}, sort_keys=False))
    done = run("check", file)
    text = complaint(done, 1)
    assert "none: cannot list" in text and "nowhere: cannot list" in text
    assert f"stream second: {PHOTOS} samples" in done.stdout.decode()


def test_check_of_a_wrong_configuration_is_status_2_with_line_key_value_and_what_is_allowed(home: Path) -> None:
    file = home / "wrong.yaml"
    file.write_text(
        "streams:\n  train:\n    dataset: {folder: /data}\n    chunks: 32\n    on_bad_sample: ignore\n"
        "    transforms: [{random_resized_crop: {size: 64}}]\n"
    )
    text = complaint(run("check", file), 2)
    assert f"{file}, line 4: streams.train.chunks: there is no such key, did you mean chunk?" in text
    assert f"{file}, line 5: streams.train.on_bad_sample: \"ignore\": must be 'skip', 'replace'" in text
    assert "no such file" in complaint(run("check", home / "missing.yaml"), 2)


def test_check_of_too_little_memory_is_status_2_and_says_how_much_is_needed(photos: Path, home: Path) -> None:
    file = home / "small.yaml"
    file.write_text(
        yaml.safe_dump(
            {"memory": "100kB", "workers": {"processes": 2}, "streams": {"train": stream(photos, chunk=32, size=64)}}
        )
    )
    text = complaint(run("check", file), 2)
    assert "needs at least 3" in text and "set memory to" in text


def test_reindex_takes_up_a_file_that_changed_in_place(photos: Path, home: Path) -> None:
    folder = home / "data" / "sea"
    folder.mkdir(parents=True)
    for i in range(3):
        (folder / f"{i}.jpg").write_bytes((photos / "sea" / f"{i:03}.jpg").read_bytes())
    file = home / "headrace.yaml"
    file.write_text(yaml.safe_dump({"streams": {"train": stream(folder.parent)}}))
    lines(run("check", file))
    with (folder / "1.jpg").open("ab") as picture:
        picture.write(b"\0")
    text = complaint(run("show", file, "train", "0:0", "-o", home / "x.png"), 1)
    assert "1.jpg: changed since it was indexed: size" in text and "--reindex" in text
    lines(run("check", "--reindex", file))
    assert len(lines(run("show", file, "train", "0:0", "-o", home / "x.png"))) == 3


# -- ls -----------------------------------------------------------------------------------------------------


def test_ls_prints_index_label_and_path_and_nothing_else(config: Path) -> None:
    done = run("ls", config, "train")
    names = [f"{name}/{i:03}.jpg" for name in ("meadow", "sea", "town") for i in range(16)]
    assert lines(done) == [f"{i}\t{i // 16}\t{name}" for i, name in enumerate(names)]
    assert done.stderr == b""


@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
def test_ls_escapes_what_would_break_a_line_in_every_locale(odd: Path, locale: str) -> None:
    plain = {"LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run("ls", odd, "train", environment=plain)
    assert done.returncode == 0
    assert done.stdout.decode("utf-8").split("\n") == [*ODD, ""]


def test_ls_says_on_standard_error_what_is_left_out(odd: Path) -> None:
    text = run("ls", odd, "train").stderr.decode()
    assert "left out one class/dangling.jpg: what it links to does not exist" in text
    assert "left out by name or ending: 1 .txt" in text


def test_an_unknown_stream_is_status_2_and_names_those_there_are(config: Path) -> None:
    for command in (["ls", config, "trian"], ["show", config, "trian", "0:0"]):
        text = complaint(run(*command), 2)
        assert '"trian"' in text and "did you mean train?" in text


# -- show ---------------------------------------------------------------------------------------------------


def rendered(config: Path, cache: Path, epoch: int, chunk: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The pictures of a chunk."""
    spec = Config.load(config).streams["train"]
    index, backend = open_index(spec.dataset, cache), make("pillow")
    ring = Ring.create(spec.layout(index), 1)
    ChunkRenderer(spec, index, backend).render(epoch, chunk, ring.views[0])
    pictures = ring.views[0].images.copy()
    ring.close()
    backend.close()
    index.close()
    return pictures


def cell(grid: Image.Image, n: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    y, x = divmod(n, grid.width // CELL[0])
    x, y = x * CELL[0], y * CELL[1]
    return np.asarray(grid.crop((x, y, x + SIZE, y + SIZE)))


def test_show_draws_the_pictures_that_trainers_get(config: Path, home: Path) -> None:
    file = home / "grid.png"
    out = [line.split("\t") for line in lines(run("show", config, "train", "3:6", "-n", "20", "-o", file))]
    assert [int(line[0]) for line in out] == list(range(6, 26))
    assert all(line[3] == "ok" for line in out)
    truth = Truth(config, home / "cache" / "headrace").rows(3)
    assert [(int(index), int(label)) for _, index, label, _, _ in out] == [row[:2] for row in truth[6:26]]
    with Image.open(file) as grid:
        assert grid.size == (16 * CELL[0], 2 * CELL[1])
        for chunk in range(1, 7):
            for row, picture in enumerate(rendered(config, home / "cache" / "headrace", 3, chunk)):
                if 6 <= 4 * chunk + row < 26:
                    np.testing.assert_array_equal(cell(grid, 4 * chunk + row - 6), picture)


def test_show_ends_with_the_epoch(config: Path, home: Path) -> None:
    out = lines(run("show", config, "train", f"0:{PHOTOS - 3}", "-o", home / "grid.png"))
    assert len(out) == 3


def test_show_names_what_is_bad_and_why(odd: Path, home: Path) -> None:
    out = lines(run("show", odd, "train", "0:0", "-o", home / "grid.png"))
    assert [line.split("\t")[0::4] for line in out] == [line.split("\t")[0::2] for line in ODD]
    states = [line.split("\t")[3] for line in out]
    assert states[2].startswith("rejected (decode: JPEG")
    assert states[:2] + states[3:] == ["ok"] * 4
    with Image.open(home / "grid.png") as grid:
        assert not cell(grid, 2).any()


def test_show_of_an_address_that_does_not_exist_is_status_2(config: Path) -> None:
    assert f"positions 0 to {PHOTOS - 1}" in complaint(run("show", config, "train", f"0:{PHOTOS}"), 2)


@pytest.mark.parametrize(
    ("at", "text"),
    [
        ("0", "EPOCH:POSITION"),
        ("0:-1", "EPOCH:POSITION"),
        ("x:1", "EPOCH:POSITION"),
        (f"{10**30}:0", "no such epoch"),
    ],
)
def test_show_of_what_is_no_address_says_what_one_is(config: Path, at: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        cli.show(config, "train", at)


def test_show_into_a_file_that_cannot_be_written_is_status_2(config: Path, home: Path) -> None:
    assert "No such file" in complaint(run("show", config, "train", "0:0", "-o", home / "no" / "such.png"), 2)


# -- serve, ping, bench -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def daemon(photos: Path, session_home: Path) -> Iterator[Daemon]:
    """For tests that leave it as it was."""
    with Daemon(Path(tempfile.mkdtemp(dir=session_home)), {"train": stream(photos, size=SIZE)}) as running:
        yield running


@pytest.fixture
def own(photos: Path, home: Path) -> Iterator[Daemon]:
    with Daemon(home, {"train": stream(photos, size=SIZE)}) as running:
        yield running


def test_serve_ends_with_status_0_on_sigterm_and_leaves_no_socket(own: Daemon) -> None:
    assert own.stop() == 0
    assert {file.name for file in own.config.parent.glob("d.*")} == {"d.yaml", "d.log"}
    log = own.log.read_text()
    assert "the log is this, standard error" in log
    phases = ["got SIGTERM", "no new clients", "clients finish their copies", "stopping: workers", "stopped"]
    assert [log.index(phase) for phase in phases] == sorted(log.index(phase) for phase in phases)


def test_serve_ends_with_status_130_on_ctrl_c(own: Daemon) -> None:
    assert own.process is not None
    own.process.send_signal(signal.SIGINT)
    assert own.process.wait(30) == 130
    assert own.log.read_text().rstrip().endswith("stopped")
    assert "Traceback" not in own.log.read_text()


def test_a_second_signal_forces(own: Daemon) -> None:
    """A worker that is stopped ends only when it is killed."""
    assert own.process is not None
    (worker,) = own.ping().workers
    os.kill(worker, signal.SIGSTOP)
    own.process.terminate()
    until(lambda: "stopping: no new clients" in own.log.read_text(), "the daemon to stop")
    own.process.terminate()
    assert own.process.wait(30) == 0
    assert "stopped" in own.log.read_text()
    assert not Path(f"/proc/{worker}").exists()


def test_a_second_daemon_on_the_same_address_is_status_2_and_does_not_disturb_the_first(daemon: Daemon) -> None:
    text = complaint(run("serve", daemon.config), 2)
    assert text == f"headrace: listen: another daemon listens on {daemon.address}\n"
    assert daemon.ping().pid == daemon.pid


def test_serve_listens_on_each_address(photos: Path, home: Path) -> None:
    addresses = [f"ipc://{home}/a.sock", f"ipc://{home}/b.sock"]
    file = home / "two.yaml"
    file.write_text(
        yaml.safe_dump({"listen": addresses, "workers": {"processes": 1}, "streams": {"train": stream(photos)}})
    )
    with serving(file) as (process, first):
        assert process.stdout is not None
        assert [first, process.stdout.readline().decode()] == [f"listening on {a}\n" for a in addresses]
        for address in addresses:
            lines(run("ping", address))


def test_serve_without_an_address_takes_a_private_one(config: Path, home: Path) -> None:
    with serving(config) as (_, first):
        address = first.removeprefix("listening on ").rstrip()
        assert address.startswith(f"ipc://{home}/run/headrace/serve-")
        lines(run("ping", address))


class serving:
    """`headrace serve FILE`; enters with the process and its first line."""

    def __init__(self, config: Path) -> None:
        self._command = [*HEADRACE, "serve", str(config)]

    def __enter__(self) -> tuple[subprocess.Popen[bytes], str]:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], 60)
        return self._process, self._process.stdout.readline().decode() if ready else ""

    def __exit__(self, *_: object) -> None:
        assert self._process.stdout is not None
        self._process.terminate()
        assert self._process.wait(30) == 0
        self._process.stdout.close()


def test_ping_of_a_daemon_is_status_0_and_says_what_it_has(own: Daemon) -> None:
    (line,) = lines(run("ping", own.address))
    assert line == (f"headrace {headrace.__version__}, process {own.pid}, 0 sessions; streams: train (not open yet)")
    lines(run("bench", own.address, "--steps", "1", "--batch-size", "8"))
    assert f"train ({PHOTOS} samples)" in lines(run("ping", own.address))[0]


def test_ping_where_nobody_answers_is_status_1(daemon: Daemon, home: Path) -> None:
    assert "no daemon" in complaint(run("ping", f"ipc://{home}/nobody.sock"), 1)
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        assert f"{daemon.address}: the daemon does not answer within 0.2 s" in complaint(
            run("ping", daemon.address, "--timeout", "0.2"), 1
        )
    finally:
        os.kill(daemon.pid, signal.SIGCONT)


def test_ping_of_what_is_no_address_is_status_2() -> None:
    for address in ("tcp://127.0.0.1", "somewhere"):
        assert address in complaint(run("ping", address), 2)


def test_bench_prints_one_json_object(daemon: Daemon) -> None:
    done = run("bench", daemon.address, "--stream", "train", "--batch-size", "16", "--steps", "7", "--json")
    (line,) = lines(done)
    result = json.loads(line)
    assert set(result) == {"images_per_s", "wait_share", "p50_ms", "p99_ms", "transport"}
    assert result["images_per_s"] > 0 and 0 < result["wait_share"] <= 1
    assert 0 < result["p50_ms"] <= result["p99_ms"]
    assert result["transport"] == "shm"


def test_bench_takes_as_many_epochs_as_it_needs_and_speaks_to_people(daemon: Daemon) -> None:
    out = lines(run("bench", daemon.address, "--batch-size", str(PHOTOS), "--steps", "3"))
    assert "images/s over shm" in out[0] and "waited" in out[1]


def test_bench_takes_the_transport_that_it_is_told(daemon: Daemon) -> None:
    out = lines(run("bench", daemon.address, "--batch-size", "16", "--steps", "3", "--transport", "tcp"))
    assert "images/s over tcp" in out[0]


@pytest.mark.parametrize(
    ("options", "status", "text"),
    [
        (("--stream", "val"), 2, "val"),
        (("--transport", "pigeon"), 2, "pigeon"),
    ],
)
def test_bench_of_what_is_not_there(daemon: Daemon, options: tuple[str, ...], status: int, text: str) -> None:
    assert text in complaint(run("bench", daemon.address, *options), status)


def test_bench_ends_with_status_130_on_ctrl_c(daemon: Daemon) -> None:
    command = [*HEADRACE, "bench", daemon.address, "--steps", "100000000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    until(lambda: daemon.ping().sessions == 1, "its session")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, b""), err
    assert b"Traceback" not in err
    until(lambda: daemon.ping().sessions == 0, "its session to end")
