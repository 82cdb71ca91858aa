"""Every test runs in a folder of its own and leaves nothing behind."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import leaks
import numpy as np
import photos as samples
import pytest
from hypothesis import HealthCheck, settings
from numpy.typing import NDArray

ROOT = Path(__file__).parents[1]
# The same examples on every machine, and none that fails for being slow, or slow to make.
settings.register_profile(
    "headrace", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("headrace")

_FOLDERS = {"HOME": "home", "TMPDIR": "tmp", "XDG_CACHE_HOME": "cache", "XDG_RUNTIME_DIR": "run"}


def pytest_configure(config: pytest.Config) -> None:
    # A shell that starts us in the background has us ignore Ctrl-C, and every process that a test starts with us.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _warm_up() -> None:
    """Starts what a library starts once per process and keeps for good, so that no test is blamed for it."""
    # BLAS takes 32 MiB for its first product.
    square = np.ones((256, 256), np.float32)
    square @ square
    try:
        import torch
    except ImportError:
        return
    # Large enough to be shared among the threads of the pool.
    torch.ones(1 << 20).add_(1).sum().item()


def _enter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable, name in _FOLDERS.items():
        (folder / name).mkdir(mode=0o700)
        monkeypatch.setenv(variable, str(folder / name))
    monkeypatch.setattr(tempfile, "tempdir", None)  # or the answer from before is remembered
    return folder


@pytest.fixture(scope="session", autouse=True)
def session_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of fixtures that live longer than a test; short, because paths of Unix sockets must be."""
    tmp_path_factory.getbasetemp()  # settled before the temporary directory moves
    folder = Path(tempfile.mkdtemp(prefix="hr-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(leaks.TOKEN, uuid.uuid4().hex)
        # A fifth of what it takes to start one of our processes would be compiling the same sources again.
        monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        _enter(folder, monkeypatch)
        _warm_up()
        # What was imported stays; to look through all of it takes the collector a tenth of a second, again and again.
        gc.collect()
        gc.freeze()
        yield folder
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def home(session_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short folder of the test's own, to which HOME, TMPDIR and the XDG variables point."""
    folder = Path(tempfile.mkdtemp(prefix="hr-", dir="/tmp"))
    try:
        yield _enter(folder, monkeypatch)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def nothing_left(home: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves threads, processes, descriptors, mappings or socket files behind."""
    before = leaks.take()
    yield
    lines = leaks.settled(before)
    if lines:
        leaks.kill(before)
    if request.node.get_closest_marker("kills") is None:
        lines += [f"socket file {path}" for path in home.rglob("*") if stat.S_ISSOCK(path.lstat().st_mode)]
    if lines:
        pytest.fail("the test leaves behind:\n  " + "\n  ".join(lines), pytrace=False)


@pytest.fixture(scope="session")
def photos(session_home: Path) -> Path:
    """48 small JPEGs in three classes."""
    return samples.make(session_home / "photos")


@pytest.fixture
def many(photos: Path, home: Path) -> Callable[[int], Path]:
    """`many(n)`: a class folder tree of n entries, hard links of `photos`."""
    made = 0

    def make(count: int) -> Path:
        nonlocal made
        made += 1
        return samples.links(photos, home / f"many-{made}", count)

    return make


@pytest.fixture(scope="session")
def extra_samples() -> Path:
    """The folder with the optional larger sample sets `photos/` and `hard/`; the test is skipped without it."""
    folder = Path(os.environ.get("HEADRACE_SAMPLES", ROOT.parent / "shared"))
    if not (folder / "photos").is_dir():
        pytest.skip("no extra samples: HEADRACE_SAMPLES names no folder that has photos/")
    return folder.resolve()


@pytest.fixture(scope="session")
def hard_samples(extra_samples: Path) -> Path:
    """Its folder of odd and broken files; the test is skipped without it."""
    if not (extra_samples / "hard" / "INDEX.tsv").is_file():
        pytest.skip("no hard samples among the extra samples")
    return extra_samples / "hard"


@pytest.fixture
def torch_reads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`torch_reads(numbers, integers)`: torch draws these uniform numbers next, and its integers from those."""
    torch = pytest.importorskip("torch")

    def reads(numbers: NDArray[np.float64], integers: Sequence[float] = ()) -> None:
        left, whole = iter(numbers.tolist()), iter(integers)

        def uniform(self: Any, low: Any = 0.0, high: Any = 1.0) -> Any:
            return self.fill_(float(low) + (float(high) - float(low)) * next(left))

        monkeypatch.setattr(torch.Tensor, "uniform_", uniform)

        def randint(low: int, high: int, size: Sequence[int]) -> Any:
            return torch.full(tuple(size), low + int(next(whole) * (high - low)))

        monkeypatch.setattr(torch, "randint", randint)
        monkeypatch.setattr(torch, "rand", lambda n: torch.tensor([next(left)]))

    return reads
