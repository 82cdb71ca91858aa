"""Every kind of tree, from its root to the epoch: what is a sample, what is said of the rest, what is no data set."""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
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
SERVED = ["fifo", "sparse_8GiB", "many_small", "numeric_classes", "empty_class"]
USABLE = [name for name in LAYOUTS if not expected(name).refused]
REFUSED = [name for name in LAYOUTS if expected(name).refused]


def stream(folder: Path, **more: Any) -> dict[str, Any]:
    return {"dataset": {"folder": str(folder)}, "transforms": [{"resize": {"size": [64, 96]}}], "chunk": 16} | more


@dataclass
class Trees:
    """The folder with all trees, and a daemon with a stream for each of `SERVED`."""

    folder: Path
    daemon: Daemon

    def config(self, home: Path, *names: str) -> Path:
        file = home / "headrace.yaml"
        file.write_text(yaml.safe_dump({"streams": {name: stream(self.folder / name) for name in names}}))
        return file

    def loader(self, name: str, **more: Any) -> Loader:
        return Loader(self.daemon.address, stream=name, output="numpy", dtype="uint8", **more)


@pytest.fixture(scope="module", params=["made", "given"])
def trees(request: pytest.FixtureRequest, session_home: Path) -> Iterator[Trees]:
    """Made by these tests, or by the script that comes with the extra samples."""
    folder = Path(tempfile.mkdtemp(dir=session_home))
    folder.chmod(0o755)
    if request.param == "made":
        build_all(folder)
    else:
        hard = request.getfixturevalue("extra_samples") / "hard"
        script = [sys.executable, hard / "make_layout.py", folder, hard / "misnamed/jpeg.jfif"]
        subprocess.run(script, check=True, timeout=60)
    streams = {name: stream(folder / name) for name in SERVED}
    try:
        with Daemon(session_home, streams, workers=1, slots=3, name=folder.name) as daemon:
            made = Trees(folder, daemon)
            with made.loader("numeric_classes", batch_size=1) as loader:
                next(iter(loader))  # so that its worker is no test's
            yield made
    finally:
        remove(folder)


def test_check_takes_every_usable_tree_and_says_what_it_leaves_out(trees: Trees, home: Path) -> None:
    command = [*HEADRACE, "check", trees.config(home, *USABLE)]
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
    trees: Trees, home: Path, name: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        cli.app(["ls", str(trees.config(home, name)), name], standalone_mode=False)
    layout = expected(name)
    assert capsys.readouterr().out.splitlines() == [
        f"{i}\t{label}\t{path}" for i, (label, path) in enumerate(layout.samples)
    ]
    assert sorted(caplog.messages) == sorted(layout.says)


@pytest.mark.parametrize("name", USABLE)
def test_an_epoch_shows_every_good_sample_once_with_its_label(trees: Trees, home: Path, name: str) -> None:
    layout = expected(name)
    with Image.open(next(trees.folder.glob("one_class/*/*"))) as file:
        whole = hashlib.sha256(np.asarray(file)).hexdigest()[:16]
    rows = Truth(trees.config(home, name), home / "cache", name).rows(0)
    assert rows == [(i, label, whole) for i, (label, _) in enumerate(layout.samples) if i not in layout.rejects]


@pytest.mark.parametrize("name", [name for name in SERVED if name in USABLE])
def test_a_trainer_gets_the_samples_and_is_told_the_rest(
    trees: Trees, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    layout = expected(name)
    seen: list[tuple[int, int]] = []
    rejects: dict[int, str] = {}
    with caplog.at_level(logging.INFO), trees.loader(name, batch_size=32) as loader:
        for batch in loader:
            seen += zip(batch.indices.tolist(), batch.labels.tolist(), strict=True)
            rejects |= {reject.index: f"{reject.path}: {reject.reason}" for reject in batch.rejects}
    assert seen == [(i, label) for i, (label, _) in enumerate(layout.samples) if i not in layout.rejects]
    assert rejects == {i: f"{trees.folder}/{name}/{layout.samples[i][1]}: {why}" for i, why in layout.rejects.items()}
    assert all(any(said in message for message in caplog.messages) for said in layout.says)


@pytest.mark.parametrize("name", REFUSED)
def test_a_tree_that_is_no_data_set_is_refused_by_name(trees: Trees, home: Path, name: str) -> None:
    with pytest.raises(DatasetError) as caught:
        cli.app(["check", str(trees.config(home, name))], standalone_mode=False)
    assert all(said in str(caught.value) for said in (str(trees.folder / name), *LAYOUTS[name].refused))


def test_a_trainer_is_told_why_a_tree_is_no_data_set(trees: Trees) -> None:
    with pytest.raises(DatasetError) as caught:
        trees.loader("empty_class", batch_size=1)
    assert all(said in str(caught.value) for said in (f"{trees.folder}/empty_class", *LAYOUTS["empty_class"].refused))


EPOCH = """
import json, sys, headrace
config, stream = sys.argv[1:]
with headrace.Loader(config, stream=stream, batch_size=4, output="numpy", dtype="uint8") as loader:
    rows = [row for batch in loader for row in zip(batch.indices.tolist(), batch.labels.tolist())]
print(json.dumps(rows))
"""


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.closed])
def test_what_may_not_be_read_is_named_and_never_quietly_missing(trees: Trees, home: Path, name: str) -> None:
    prefix, environment = ordinary_user(home)
    trees.folder.parent.chmod(0o755)
    config, layout = trees.config(home, name), expected(name, bound=True)

    def run(*command: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*prefix, *map(str, command)], env=environment, capture_output=True, text=True, timeout=100, check=False
        )

    check, epoch = run(*HEADRACE, "check", config), run(sys.executable, "-c", EPOCH, config, name)
    if layout.refused:
        assert check.returncode == 1 and all(said in check.stderr for said in layout.refused)
        assert epoch.returncode == 1 and all(said in epoch.stderr for said in layout.refused)
    else:
        assert check.returncode == 0 and all(said in check.stdout for said in layout.says)
        assert epoch.returncode == 0, epoch.stderr
        assert json.loads(epoch.stdout) == [[i, label] for i, (label, _) in enumerate(layout.samples)]
