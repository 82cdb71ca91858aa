"""The Loader with a private daemon of its own, real photos and real workers."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from headrace import Config, Loader, RandomResizedCrop
from headrace.errors import ConfigError, DatasetError, SampleError, TooManyRejects
from headrace.finish import constants

PHOTOS = 48


def configuration(folder: Path, **stream: Any) -> dict[str, Any]:
    transforms = [{"random_resized_crop": {"size": [24, 32]}}, "random_horizontal_flip"]
    described = {"dataset": {"folder": str(folder)}, "shuffle": True, "chunk": 4, "transforms": transforms, **stream}
    return {"workers": {"processes": 1}, "streams": {"train": described}}


def open_loader(source: Any, **arguments: Any) -> Loader:
    usual: dict[str, Any] = {"batch_size": 10, "output": "numpy", "dtype": "uint8", "timeout": 60}
    return Loader(source, **(usual | arguments))


def epoch(loader: Loader) -> list[tuple[list[int], bytes]]:
    return [(batch.indices.tolist(), batch.images.tobytes()) for batch in loader]


def daemon_pid(loader: Loader) -> int:
    return loader._engine.welcome.pid


@pytest.fixture(scope="module")
def kept(photos: Path) -> Iterator[None]:
    with open_loader(configuration(photos)):
        yield


@pytest.fixture
def running(kept: None, session_home: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not about starting or ending a private daemon finds that of the usual configuration at work."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(session_home / "cache"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session_home / "run"))


def test_a_mapping_a_config_and_its_yaml_file_join_one_daemon_and_get_the_same(
    running: None, photos: Path, home: Path
) -> None:
    source = configuration(photos)
    file = home / "headrace.yaml"
    file.write_text(yaml.safe_dump(source))
    sources = [source, Config.load(source), file, str(file)]
    loaders = [open_loader(s) for s in sources]
    try:
        assert len({daemon_pid(loader) for loader in loaders}) == 1
        first, *others = [epoch(loader) for loader in loaders]
        assert sorted(i for indices, _ in first for i in indices) == list(range(PHOTOS))
        assert all(other == first for other in others)
        assert loaders[0].classes == ["meadow", "sea", "town"]
    finally:
        for loader in loaders:
            loader.close()


def test_a_relative_folder_in_a_mapping_is_relative_to_the_working_directory(
    photos: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "here").symlink_to(photos)
    monkeypatch.chdir(home)
    with open_loader(configuration(Path("here"))) as loader:
        assert loader.num_samples == PHOTOS


def test_transforms_may_stand_in_a_mapping_as_objects(running: None, photos: Path) -> None:
    source = configuration(photos)
    written, flip = source["streams"]["train"]["transforms"]
    objects = configuration(photos, transforms=[RandomResizedCrop(**written["random_resized_crop"]), flip])
    with open_loader(source) as one, open_loader(objects) as other:
        assert daemon_pid(one) == daemon_pid(other)


def test_another_configuration_gets_another_daemon(running: None, photos: Path) -> None:
    with open_loader(configuration(photos)) as one, open_loader(configuration(photos, seed=1)) as other:
        assert daemon_pid(one) != daemon_pid(other)
        assert epoch(one) != epoch(other)


def test_each_epoch_has_another_order_and_other_pictures_and_both_come_again(running: None, photos: Path) -> None:
    with open_loader(configuration(photos)) as loader:
        epochs = [epoch(loader) for _ in range(3)]
        assert len({tuple(i for indices, _ in e for i in indices) for e in epochs}) == 3
        loader.set_epoch(1)
        assert epoch(loader) == epochs[1]


def test_labels_are_those_of_the_listing(running: None, photos: Path) -> None:
    with open_loader(configuration(photos)) as loader:
        for batch in loader:
            assert np.array_equal(batch.labels, batch.indices // 16)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "channels_last"])
def test_float_batches_are_the_levels_finished_by_the_formula(running: None, photos: Path, layout: str) -> None:
    torch = pytest.importorskip("torch")
    look = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
    with (
        open_loader(configuration(photos), layout="NHWC") as levels,
        open_loader(configuration(photos), output="torch", layout=layout, dtype="float32", **look) as floats,
        open_loader(configuration(photos), output="torch", layout=layout, dtype="bfloat16", **look) as halves,
    ):
        a, b = constants(floats._form.output)
        for raw, full, half in zip(levels, floats, halves, strict=True):
            expected = torch.from_numpy(raw.images.astype(np.float32) * a + b)
            if layout != "NHWC":
                expected = expected.permute(0, 3, 1, 2)
            assert torch.equal(full.images, expected)
            assert torch.equal(half.images, expected.to(torch.bfloat16))
            assert full.labels.tolist() == raw.labels.tolist()


def test_a_private_daemon_that_is_killed_is_started_again_and_nothing_is_lost(photos: Path) -> None:
    with open_loader(configuration(photos)) as loader:
        whole = epoch(loader)
        loader.set_epoch(0)
        batches = iter(loader)
        got = [next(batches)]
        before = daemon_pid(loader)
        os.kill(before, signal.SIGKILL)
        got += batches
        assert [(b.indices.tolist(), b.images.tobytes()) for b in got] == whole


def test_the_daemon_ends_with_its_last_loader(photos: Path) -> None:
    first = open_loader(configuration(photos))
    second = open_loader(configuration(photos))
    pid = daemon_pid(first)
    first.close()
    time.sleep(0.5)
    os.kill(pid, 0)
    assert epoch(second)
    second.close()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and os.path.exists(f"/proc/{pid}"):
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{pid}")


def test_what_is_wrong_with_the_configuration_is_raised_by_the_constructor(
    running: None, photos: Path, home: Path
) -> None:
    with pytest.raises(ConfigError, match=r"streams\.train\.chunk"):
        open_loader(configuration(photos, chunk=0))
    with pytest.raises(ConfigError, match="no_such.yaml"):
        open_loader(home / "no_such.yaml")
    with pytest.raises(DatasetError, match="no_such_folder"):
        open_loader(configuration(home / "no_such_folder"))
    with pytest.raises(ConfigError, match="val"):
        open_loader(configuration(photos), stream="val")


@pytest.fixture(scope="module")
def spoiled(photos: Path, session_home: Path) -> Iterator[Path]:
    """32 photos in two classes, two of them spoiled, and their daemon at work."""
    folder = Path(tempfile.mkdtemp(dir=session_home))
    for name in ("meadow", "sea"):
        (folder / name).mkdir()
        for i in range(16):
            (folder / name / f"{i:03}.jpg").write_bytes((photos / name / f"{i:03}.jpg").read_bytes())
    whole = (photos / "sea" / "005.jpg").read_bytes()
    (folder / "sea" / "005.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "meadow" / "007.jpg").write_text("this is no picture")
    with open_loader(configuration(folder)):
        yield folder


@pytest.fixture
def damaged(spoiled: Path, running: None) -> Path:
    return spoiled


def test_bad_files_are_left_out_named_and_counted_in_every_epoch(damaged: Path) -> None:
    with open_loader(configuration(damaged)) as loader:
        for number in range(2):
            seen: Counter[int] = Counter()
            named: dict[str, str] = {}
            for batch in loader:
                seen.update(batch.indices.tolist())
                named |= {r.path: f"{r.stage}: {r.reason}" for r in batch.rejects}
            assert set(named) == {f"{damaged}/meadow/007.jpg", f"{damaged}/sea/005.jpg"}
            assert set(seen) == set(range(32)) - {7, 21}
            assert set(seen.values()) == {1}
            counts = loader.stats()["epochs"][number]
            assert (counts["delivered"], counts["rejected"], counts["extra"]) == (30, 2, 0)


def test_masked_and_replaced_rows_are_flagged_and_keep_the_shape(damaged: Path) -> None:
    with open_loader(configuration(damaged), on_bad_sample="mask", batch_size=8) as loader:
        for batch in loader:
            assert batch.images.shape[0] == 8
            assert set(batch.indices[~batch.valid].tolist()) == {r.index for r in batch.rejects}
            assert (batch.images[~batch.valid] == 0).all()
            assert np.array_equal(batch.labels, batch.indices // 16)
    with open_loader(configuration(damaged), on_bad_sample="replace", batch_size=8) as loader:
        for batch in loader:
            assert batch.images.shape[0] == 8
            assert not set(batch.indices.tolist()) & {7, 21}
            assert int((~batch.valid).sum()) == len(batch.rejects)
            assert np.array_equal(batch.labels, batch.indices // 16)


def test_raise_names_the_file(damaged: Path) -> None:
    with (
        open_loader(configuration(damaged), on_bad_sample="raise") as loader,
        pytest.raises(SampleError, match=r"meadow/007\.jpg|sea/005\.jpg"),
    ):
        list(loader)


def test_only_bad_files_are_a_prompt_error(home: Path) -> None:
    (home / "data" / "x").mkdir(parents=True)
    for i in range(10):
        (home / "data" / "x" / f"{i}.jpg").write_text("this is no picture")
    with (
        open_loader(configuration(home / "data")) as loader,
        pytest.raises(TooManyRejects, match="no valid picture"),
    ):
        list(loader)


SCRIPT = """
import sys
import headrace
loader = headrace.Loader({source!r}, batch_size=10, output="numpy")
count = 0
for images, labels in loader:
    count += len(labels)
sys.stdout.write(str(count))
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )


def test_a_plain_script_without_a_main_guard_works_and_ends_by_itself(photos: Path, home: Path) -> None:
    file = home / "train.py"
    file.write_text(SCRIPT.format(source=configuration(photos)))
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, str(PHOTOS), "")


def test_cells_typed_into_an_interpreter_work(running: None, photos: Path) -> None:
    cells = f"""
import headrace
loader = headrace.Loader({configuration(photos)!r}, batch_size=10, output="numpy")
for images, labels in loader:
    break

for images, labels in loader:
    pass

loader.state_dict()["epoch"]
"""
    done = subprocess.run(
        [sys.executable, "-i", "-q"], input=cells, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stdout.split() == ["2"], done.stderr
    assert "Error" not in done.stderr


def test_ranks_of_one_host_join_one_daemon_and_share_the_epoch(photos: Path) -> None:
    code = SCRIPT.format(source=configuration(photos)).replace(
        "    count += len(labels)", "    pass"
    ).replace("str(count)", "repr(sorted(loader.stats()['epochs'][0].items())[0])")  # fmt: skip
    results: list[subprocess.CompletedProcess[str]] = []

    def rank(number: int) -> None:
        results.append(run(code, RANK=str(number), WORLD_SIZE="3"))

    threads = [threading.Thread(target=rank, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert [r.returncode for r in results] == [0, 0, 0], [r.stderr for r in results]
    delivered = [int(r.stdout.split(",")[1].strip(" )")) for r in results]
    assert sum(delivered) == PHOTOS


@pytest.mark.parametrize("signal_", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_trainer_ended_by_a_signal_leaves_nothing_behind(photos: Path, signal_: signal.Signals) -> None:
    code = SCRIPT.format(source=configuration(photos)).replace(
        "    count += len(labels)", "    sys.stdout.write('going\\n'); sys.stdout.flush(); import time; time.sleep(60)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == b"going\n"
        os.killpg(child.pid, signal_)  # as a terminal does: the daemon must not be in the group
        assert child.wait(30) == -signal_


def test_fifty_epochs_leave_descriptors_and_threads_as_they_were(photos: Path) -> None:
    few = {"folder": str(photos), "limit": 12}
    with open_loader(configuration(photos, dataset=few, transforms=[{"random_resized_crop": {"size": 8}}])) as loader:
        held: list[tuple[int, int]] = []
        for number in range(50):
            list(loader)
            if number in (9, 49):
                gc.collect()
                held.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
        assert held[0] == held[1]
