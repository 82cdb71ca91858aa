"""Every kind of tree, from its root to the epoch: what is a sample, what is said of the rest, what is no data set."""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from layouts import ALL_POWERFUL, LAYOUTS, Layout, build_all, ordinary_user, remove
from PIL import Image
from service import Daemon, Truth

from headrace import Loader
from headrace.errors import DatasetError
from headrace.server import cli

HEADRACE = [sys.executable, "-m", "headrace.server"]


def expected(name: str, *, bound: bool = not ALL_POWERFUL) -> Layout:
    """What must be; of something closed, to somebody whom modes do not bind: all of it."""
    layout = LAYOUTS[name]
    if bound or not layout.closed:
        return layout
    everything = {
        "unreadable_file": [(0, "a/1.jpg"), (0, "a/secret.jpg")],
        "unreadable_dir": [(0, "a/1.jpg"), (1, "b/1.jpg")],
    }
    return Layout(layout.build, everything[name])


#: By a daemon; all the others' samples are rendered without one.
SERVED = ["fifo", "sparse_8GiB", "many_small", "empty_class"]
USABLE = [name for name in LAYOUTS if not expected(name).refused]
REFUSED = [name for name in LAYOUTS if expected(name).refused]
CLOSED = [name for name, layout in LAYOUTS.items() if layout.closed]


def stream(folder: Path) -> dict[str, Any]:
    return {"dataset": {"folder": str(folder)}, "transforms": [{"resize": {"size": [64, 96]}}], "chunk": 16}


def configuration(trees: Path, home: Path, *names: str) -> Path:
    file = home / "headrace.yaml"
    file.write_text(yaml.safe_dump({"streams": {name: stream(trees / name) for name in names}}))
    return file


@pytest.fixture(scope="module", params=["made", "given"])
def trees(request: pytest.FixtureRequest, session_home: Path) -> Iterator[Path]:
    """The folder with all trees, made by these tests or by the script that comes with the extra samples."""
    folder = Path(tempfile.mkdtemp(dir=session_home))
    folder.chmod(0o755)
    if request.param == "made":
        build_all(folder)
    else:
        hard = request.getfixturevalue("hard_samples")
        script = [sys.executable, hard / "make_layout.py", folder, hard / "misnamed/jpeg.jfif"]
        subprocess.run(script, check=True, timeout=60)
    yield folder
    remove(folder)


@pytest.fixture(scope="module")
def served(session_home: Path) -> Iterator[tuple[Path, Daemon]]:
    """The same made once more, and a daemon with a stream for each of `SERVED`."""
    folder = build_all(Path(tempfile.mkdtemp(dir=session_home)) / "trees")
    with Daemon(folder.parent, {name: stream(folder / name) for name in SERVED}, workers=1, slots=3) as daemon:
        with open_loader(daemon, "fifo", batch_size=1) as loader:
            list(loader)  # so that its worker is no test's
        yield folder, daemon
    remove(folder)


def open_loader(daemon: Daemon, name: str, batch_size: int) -> Loader:
    return Loader(daemon.address, stream=name, batch_size=batch_size, output="numpy", dtype="uint8")


def test_check_takes_every_usable_tree_and_says_what_it_leaves_out(trees: Path, home: Path) -> None:
    command = [*HEADRACE, "check", configuration(trees, home, *USABLE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    parts = {part.partition(":")[0]: part for part in done.stdout.split("\nstream ")[1:]}
    for name in USABLE:
        layout = expected(name)
        assert f"{name}: {len(layout.samples)} samples" in parts[name]
        told = [line.strip() for line in parts[name].splitlines() if line.startswith("  left out")]
        assert told == sorted(layout.says)


@pytest.mark.parametrize("name", USABLE)
def test_ls_lists_the_samples_with_their_labels(
    trees: Path, home: Path, name: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        cli.app(["ls", str(configuration(trees, home, name)), name], standalone_mode=False)
    layout = expected(name)
    assert capsys.readouterr().out.splitlines() == [
        f"{i}\t{label}\t{path}" for i, (label, path) in enumerate(layout.samples)
    ]
    assert sorted(caplog.messages) == sorted(layout.says)


@pytest.mark.parametrize("name", USABLE)
def test_an_epoch_shows_every_good_sample_once_with_its_label(trees: Path, home: Path, name: str) -> None:
    layout = expected(name)
    with Image.open(next(trees.glob("one_class/*/*"))) as file:
        whole = hashlib.sha256(np.asarray(file)).hexdigest()[:16]
    rows = Truth(configuration(trees, home, name), home / "cache", name).rows(0)
    assert rows == [(i, label, whole) for i, (label, _) in enumerate(layout.samples) if i not in layout.rejects]


@pytest.mark.parametrize("name", REFUSED)
def test_a_tree_that_is_no_data_set_is_refused_by_name(
    trees: Path, home: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.app(["check", str(configuration(trees, home, name))], standalone_mode=False) == 1
    complaint = capsys.readouterr().err
    assert all(said in complaint for said in (str(trees / name), *LAYOUTS[name].refused))


def bound(home: Path, *command: object) -> subprocess.CompletedProcess[str]:
    """Runs it as somebody whom modes bind."""
    prefix, environment = ordinary_user(home)
    return subprocess.run(
        [*prefix, *map(str, command)], env=environment, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.parametrize("name", CLOSED)
def test_what_may_not_be_read_is_named_and_never_quietly_missing(trees: Path, home: Path, name: str) -> None:
    trees.parent.chmod(0o755)
    layout = expected(name, bound=True)
    check = bound(home, *HEADRACE, "check", configuration(trees, home, name))
    if layout.refused:
        assert check.returncode == 1 and all(said in check.stderr for said in layout.refused)
    else:
        assert check.returncode == 0 and all(said in check.stdout for said in layout.says)


# -- by a daemon ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in SERVED if name in USABLE])
def test_a_trainer_gets_the_samples_and_is_told_the_rest(
    served: tuple[Path, Daemon], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    (folder, daemon), layout = served, expected(name)
    seen: list[tuple[int, int]] = []
    rejects: dict[int, str] = {}
    with caplog.at_level(logging.INFO), open_loader(daemon, name, 32) as loader:
        for batch in loader:
            seen += zip(batch.indices.tolist(), batch.labels.tolist(), strict=True)
            rejects |= {reject.index: f"{reject.path}: {reject.reason}" for reject in batch.rejects}
    assert seen == [(i, label) for i, (label, _) in enumerate(layout.samples) if i not in layout.rejects]
    assert rejects == {i: f"{folder}/{name}/{layout.samples[i][1]}: {why}" for i, why in layout.rejects.items()}
    assert all(any(said in message for message in caplog.messages) for said in layout.says)


def test_a_trainer_is_told_why_a_tree_is_no_data_set(served: tuple[Path, Daemon]) -> None:
    folder, daemon = served
    with pytest.raises(DatasetError) as caught:
        open_loader(daemon, "empty_class", 1)
    assert all(said in str(caught.value) for said in (f"{folder}/empty_class", *LAYOUTS["empty_class"].refused))


EPOCH = """
import json, logging, sys, headrace
logging.basicConfig(level=logging.INFO)
with headrace.Loader(sys.argv[1], batch_size=4, output="numpy", dtype="uint8") as loader:
    rows = [row for batch in loader for row in zip(batch.indices.tolist(), batch.labels.tolist())]
print(json.dumps(rows))
"""


def test_a_trainer_whom_modes_bind_gets_what_it_may_read(served: tuple[Path, Daemon], home: Path) -> None:
    folder, _ = served
    for above in (folder, folder.parent, folder.parent.parent):
        above.chmod(0o755)
    done = bound(home, sys.executable, "-c", EPOCH, configuration(folder, home, "unreadable_file"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[0, 0]] and "a/secret.jpg: no permission to read it" in done.stderr
