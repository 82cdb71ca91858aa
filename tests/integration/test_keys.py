"""A daemon with keys: the same pictures for those who may come, a clear answer in good time for all others."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import photos as samples
import pytest
import yaml
import zmq
from service import Daemon, stream

from headrace import Loader
from headrace.errors import ConfigError, ConnectionLost, HeadraceError
from headrace.keys import generate
from headrace.ping import ping
from headrace.server import cli

ENTRIES, BATCH = 40, 8


@dataclass
class Site:
    """A daemon with keys, and those of a client that may come, and of one that may not."""

    daemon: Daemon
    keys: Path

    def curve(self, name: str = "alice", server: str = "server") -> dict[str, Path]:
        return {"secret_key": self.keys / f"{name}.key_secret", "server": self.keys / f"{server}.key"}

    def loader(self, **options: Any) -> Loader:
        options = {"curve": self.curve(), "transport": "tcp"} | options
        return Loader(self.daemon.tcp_address, batch_size=BATCH, output="numpy", dtype="uint8", rank=0, world_size=1,
                      **options)  # fmt: skip

    def pictures(self, loader: Loader) -> list[bytes]:
        return [np.ascontiguousarray(images).tobytes() for images, _ in loader]


def site(folder: Path, photos: Path) -> Site:
    for name in ("server", "alice", "mallory"):
        generate(folder / "keys", name)
    streams = {"train": stream(samples.links(photos, folder / "many", ENTRIES), chunk=4)}
    keys = folder / "keys/server.key_secret", folder / "keys/alice.key"
    # Where other hosts reach it, without being told that this is insecure.
    return Site(Daemon(folder, streams, slots=8, tcp="tcp://0.0.0.0:0", keys=keys), folder / "keys")


@pytest.fixture(scope="module")
def shared(photos: Path, session_home: Path) -> Iterator[Site]:
    made = site(Path(tempfile.mkdtemp(dir=session_home)), photos)
    with made.daemon:
        yield made


def test_an_epoch_over_tcp_with_keys_is_that_of_shared_memory(shared: Site) -> None:
    epochs, used = [], []
    for options in (
        {"transport": "shm"},
        {"transport": "tcp"},
        {"transport": "auto"},
    ):
        with shared.loader(**options) as loader:
            epochs.append(shared.pictures(loader))
            used.append(loader.stats()["transport"])
    assert used == ["shm", "tcp", "shm"]
    assert len(epochs[0]) == ENTRIES // BATCH and epochs[1] == epochs[0] == epochs[2]
    assert "with the key alice" in shared.daemon.log.read_text()


def test_on_the_daemons_host_nobody_needs_a_key(shared: Site) -> None:
    for transport in ("shm", "tcp"):
        with Loader(shared.daemon.address, batch_size=BATCH, output="numpy", rank=0, world_size=1,
                    transport=transport) as loader:  # fmt: skip
            assert len(shared.pictures(loader)) == ENTRIES // BATCH


@pytest.mark.parametrize(
    ("curve", "error", "says"),
    [
        (None, ConfigError, "wants keys: make some with `headrace keygen`"),
        (("mallory", "server"), ConfigError, r"does not let in the key of .*mallory\.key_secret.*`curve\.clients`"),
        (("alice", "mallory"), ConnectionLost, r"before it was encrypted: .*mallory\.key is not its public key"),
    ],
    ids=["without", "unknown", "for another daemon"],
)
def test_keys_that_do_not_fit_are_named_at_once_and_the_daemon_serves_on(
    shared: Site, curve: tuple[str, str] | None, error: type[HeadraceError], says: str
) -> None:
    given = None if curve is None else shared.curve(*curve)
    begin = time.monotonic()
    for transport in ("auto", "tcp"):
        with pytest.raises(error, match=says) as caught:
            shared.loader(curve=given, transport=transport, timeout=60)
        assert shared.daemon.tcp_address in str(caught.value)
    with pytest.raises(error, match=says):
        ping(shared.daemon.tcp_address, timeout=60, curve=given)
    assert time.monotonic() - begin < 40
    assert ping(shared.daemon.tcp_address, timeout=20, curve=shared.curve()).pid == shared.daemon.pid


def test_whoever_is_turned_away_however_often_is_one_line_of_the_log(shared: Site) -> None:
    for _ in range(5):
        with pytest.raises(ConfigError):
            ping(shared.daemon.tcp_address, timeout=20, curve=shared.curve("mallory"))
    deadline = time.monotonic() + 20
    while (log := shared.daemon.log.read_text()).count("turned away") != 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for file in shared.keys.glob("*_secret"):
        secret = file.read_text().partition('secret-key = "')[2].partition('"')[0]
        assert len(secret) == 40 and secret not in log


def test_what_has_no_keys_is_refused_where_some_were_given(shared: Site) -> None:
    """It may be somebody else who listens there now."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind("tcp://127.0.0.1:*")
        place = bytes(router.last_endpoint).decode()
        with pytest.raises(
            ConfigError, match=f"what listens at {place} has no keys and encrypts nothing, and is refused"
        ):
            Loader(place, batch_size=BATCH, output="numpy", rank=0, world_size=1, curve=shared.curve(), timeout=60)


def test_a_daemon_that_is_killed_and_comes_back_is_known_by_its_key_and_one_that_knows_us_no_more_is_named(
    photos: Path, home: Path
) -> None:
    made = site(home, photos)
    with made.daemon as daemon, made.loader(timeout=60) as loader:
        whole = made.pictures(loader)
        loader.set_epoch(0)
        batches = iter(loader)
        got = [np.ascontiguousarray(next(batches).images).tobytes()]
        daemon.kill()
        daemon.start()
        got += [np.ascontiguousarray(images).tobytes() for images, _ in batches]
        assert got == whole
        daemon.kill()
        text = daemon.config.read_text().replace("alice.key", "mallory.key")
        daemon.config.write_text(text)
        daemon._document["curve"]["clients"] = [str(made.keys / "mallory.key")]
        daemon.start()
        with pytest.raises(ConfigError, match=r"does not let in the key of .*alice\.key_secret"):
            made.pictures(loader)


def test_keys_on_the_command_line(shared: Site, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*line: object) -> Any:
        return cli.app([*map(str, line)], standalone_mode=False)

    run("keygen", home / "new", "--name", "bob")
    assert capsys.readouterr().out.splitlines() == [f"{home}/new/bob.key", f"{home}/new/bob.key_secret"]
    with pytest.raises(ConfigError, match="exists, and no key is written over"):
        run("keygen", home / "new", "--name", "bob")
    options = ("--curve-secret-key", shared.keys / "alice.key_secret", "--curve-server", shared.keys / "server.key")
    run("ping", shared.daemon.tcp_address, *options)
    assert f"process {shared.daemon.pid}" in capsys.readouterr().out
    run("top", shared.daemon.tcp_address, "--once", "--interval", 0.1, *options)
    assert shared.daemon.tcp_address in capsys.readouterr().out
    run("bench", shared.daemon.tcp_address, "--transport", "tcp", "--batch-size", BATCH, "--steps", 2, *options)
    assert "images/s over tcp" in capsys.readouterr().out
    for command in ("ping", "top", "bench"):
        with pytest.raises(ConfigError, match="--curve-secret-key and --curve-server belong together"):
            run(command, shared.daemon.tcp_address, *options[:2])
    with pytest.raises(HeadraceError, match="no trainer is there"):
        run("profile", "--against", shared.daemon.tcp_address, "--seconds", 0.5, *options)


def test_check_says_who_may_come(
    shared: Site, home: Path, many: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    document = {
        "curve": {"secret_key": str(shared.keys / "server.key_secret"), "clients": str(shared.keys)},
        "workers": {"backend": "fake"},
        "streams": {"train": stream(many(4))},
    }
    (home / "headrace.yaml").write_text(yaml.safe_dump(document))
    assert cli.app(["check", str(home / "headrace.yaml")], standalone_mode=False) == 0
    said = capsys.readouterr().out.splitlines()
    at = said.index("keys: over tcp may come alice, mallory, server")
    assert said[at + 1] == "  but `listen` has no tcp:// address"
    document["curve"]["secret_key"] = str(shared.keys / "none.key_secret")  # type: ignore[index]
    (home / "headrace.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigError, match=r"curve\.secret_key: .*none\.key_secret cannot be read"):
        cli.app(["check", str(home / "headrace.yaml")], standalone_mode=False)
