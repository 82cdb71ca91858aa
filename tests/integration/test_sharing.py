"""Several trainers on one stream: computed once, nobody waits for anybody, only the invited come in."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from service import Daemon, Trainer, Truth, stream

from headrace import Loader
from headrace.protocol import ClientStatus


def taker(daemon: Daemon, batch_size: int, dtype: str = "uint8") -> Loader:
    """Ahead by nothing but the batch that it is asked for."""
    return Loader(daemon.address, batch_size=batch_size, prefetch=0, output="numpy", dtype=dtype, rank=0, world_size=1)


def test_trainers_of_different_batch_sizes_that_keep_pace_compute_each_chunk_once(
    many: Callable[[int], Path], home: Path
) -> None:
    with Daemon(home, {"train": stream(many(300))}, workers=2) as daemon:
        trainers = [
            Trainer(daemon.address, home / f"{size}.jsonl", batch_size=size, epochs=2).start()
            for size in (5, 16, 33, 64)
        ]
        for trainer in trainers:
            trainer.wait()
        status = daemon.status()
    # The beginning of a third epoch was fetched ahead, as far as memory for two batches goes.
    assert status.recomputed == 0 and 150 <= status.computed <= 150 + 3 * 64 // 4
    truth = Truth(daemon.config, home / "cache")
    for trainer in trainers:
        assert trainer.rows() == truth.rows(0) + truth.rows(1)


def test_in_step_a_ring_that_spans_the_trainers_computes_each_chunk_once(
    many: Callable[[int], Path], home: Path
) -> None:
    """Four Loaders in one process take turns by position: none is ahead by more than its batches in memory."""
    with Daemon(home, {"train": stream(many(240))}, workers=2, slots=6) as daemon, ExitStack() as stack:
        in_step(*(stack.enter_context(taker(daemon, size)) for size in (3, 5, 7, 11)), until=240)
        status = daemon.status()
    assert status.recomputed == 0


def in_step(*loaders: Loader, until: int, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Each takes its batches of an epoch up to row `until`, whoever is behind next."""
    batches = [iter(loader) for loader in loaders]
    rows = [0] * len(loaders)
    while (behind := min(rows)) < until:
        at = rows.index(behind)
        rows[at] += len(next(batches[at]).indices)
        meanwhile()


def clients(daemon: Daemon) -> list[ClientStatus]:
    """In the order in which they came."""
    return sorted(daemon.ping().clients, key=lambda client: -client.age)


def test_trainers_share_what_others_have_rendered_before_them_no_less(many: Callable[[int], Path], home: Path) -> None:
    """The second job of a daemon's life, from the first epoch on: all is rendered again, and once."""
    with Daemon(home, {"train": stream(many(240))}, workers=2, slots=8) as daemon:
        for job in range(2):
            before = daemon.status().computed if job else 0
            with taker(daemon, 3) as one, taker(daemon, 7) as other:
                in_step(one, other, until=240)
                assert sum(client.hits for client in clients(daemon)) >= 60
            assert daemon.status().computed - before <= 60 + 8  # and the beginning of the epoch that follows
        assert daemon.status().recomputed >= 60 - 8  # all but what had stayed


def test_one_that_is_behind_takes_nothing_from_others_of_other_batch_sizes_and_forms(
    many: Callable[[int], Path], home: Path
) -> None:
    with Daemon(home, {"train": stream(many(480))}, workers=2, slots=16) as daemon:
        with taker(daemon, 5) as one, taker(daemon, 16, dtype="float32") as other:
            in_step(one, other, until=240)
            with taker(daemon, 7, dtype="float16") as late:
                behind = iter(late)
                seen: list[int] = []
                for loader in (one, other):
                    loader.load_state_dict(one.state_dict() | {"epoch": 0, "position": 240})
                in_step(one, other, until=240, meanwhile=lambda: seen.extend(next(behind).indices.tolist()))
                first, second, third = clients(daemon)
                assert first.recomputed + second.recomputed == 0
                assert first.hits + second.hits >= 120 - 2 * 16  # what one got first the other got too
                assert third.recomputed > 0 and third.lag > 0
                for batch in behind:
                    seen.extend(batch.indices.tolist())
    assert seen == [index for index, _, _ in Truth(daemon.config, home / "cache").rows(0)]


def test_two_trainers_whose_batches_are_larger_than_the_ring_finish(many: Callable[[int], Path], home: Path) -> None:
    with Daemon(home, {"train": stream(many(300))}, workers=2, slots=4) as daemon:
        trainers = [
            Trainer(daemon.address, home / f"{size}.jsonl", batch_size=size, epochs=2).start() for size in (150, 129)
        ]
        for trainer in trainers:
            trainer.wait()
    truth = Truth(daemon.config, home / "cache")
    for trainer in trainers:
        assert trainer.rows() == truth.rows(0) + truth.rows(1)


def test_a_trainer_that_comes_late_gets_the_whole_epoch(many: Callable[[int], Path], home: Path) -> None:
    with Daemon(home, {"train": stream(many(200))}, workers=2, slots=5) as daemon:
        with Trainer(daemon.address, home / "first.jsonl", steps=6) as first:
            first.wait()
        with Trainer(daemon.address, home / "late.jsonl", batch_size=10) as late:
            late.wait()
    assert late.rows() == Truth(daemon.config, home / "cache").rows(0)


def test_streams_of_one_daemon_do_not_mix(many: Callable[[int], Path], home: Path) -> None:
    streams = {"train": stream(many(200)), "val": stream(many(80), shuffle=False, seed=5, size=48)}
    with Daemon(home, streams, workers=2) as daemon:
        for name, count in (("train", 200), ("val", 80)):
            with Loader(daemon.address, stream=name, batch_size=32, output="numpy", rank=0, world_size=1) as loader:
                assert sum(len(batch.indices) for batch in loader) == count
        with pytest.raises(Exception, match="'train', 'val'|train, val"):
            Loader(daemon.address, batch_size=1, output="numpy")


#: The bare interpreter, which others may run wherever this checkout and its environment lie.
_PYTHON = [os.path.realpath(sys.executable), "-I", "-S", "-c"]
_TRY = """
import socket, sys
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[1])
except OSError as error:
    print(type(error).__name__)
else:
    print("welcome")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become somebody else")
def test_another_user_is_not_let_in_and_a_member_of_the_group_is(many: Callable[[int], Path], home: Path) -> None:
    import grp

    group = next(g for g in grp.getgrall() if g.gr_gid not in (0, 65534))
    open_folder = home / "open"
    open_folder.mkdir(mode=0o755)
    home.chmod(0o755)

    def knock(daemon: Daemon, *identity: str, path: str = "") -> str:
        drop = ["setpriv", *identity, "--clear-groups", "--bounding-set=-all", "--inh-caps=-all"]
        command = [*drop, *_PYTHON, _TRY, path or daemon.address.removeprefix("ipc://")]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout

    with Daemon(open_folder, {"train": stream(many(8))}, name="closed") as daemon:
        assert knock(daemon, "--reuid=65534", "--regid=65534") == "PermissionError\n"
    with Daemon(open_folder, {"train": stream(many(8))}, name="group", group=group.gr_name) as daemon:
        assert knock(daemon, "--reuid=65534", f"--regid={group.gr_gid}") == "welcome\n"
        zmq_path = daemon.address.removeprefix("ipc://") + ".zmq"
        assert knock(daemon, "--reuid=65534", f"--regid={group.gr_gid}", path=zmq_path) == "welcome\n"
        assert knock(daemon, "--reuid=65534", "--regid=65534") == "PermissionError\n"
