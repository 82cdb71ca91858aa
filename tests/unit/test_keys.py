"""Files of keys: made for their owner alone, never over others, and refused with what to do about what is wrong."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import zmq

from headrace.errors import ConfigError
from headrace.keys import Keys, generate, read_pair, read_public


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def pair(home: Path) -> tuple[Path, Path]:
    return generate(home / "keys", "alice")


def test_a_pair_is_for_its_owner_alone_and_reads_back(pair: tuple[Path, Path]) -> None:
    public, secret = pair
    assert (public.name, secret.name) == ("alice.key", "alice.key_secret")
    assert sorted(public.parent.iterdir()) == [public, secret]
    assert (mode(public), mode(secret), mode(public.parent)) == (0o600, 0o600, 0o700)
    read = read_pair(secret, "x")
    assert read.public == read_public(public, "x") == zmq.curve_public(read.secret)
    assert read.secret.decode() not in public.read_text()
    assert read.secret.decode() not in repr(read)


def test_a_wide_mask_and_a_folder_that_is_there_change_nothing_about_modes(home: Path) -> None:
    (home / "keys").mkdir(mode=0o755)
    before = os.umask(0)
    try:
        made = generate(home / "keys", "alice")
    finally:
        os.umask(before)
    assert [mode(file) for file in made] == [0o600, 0o600]
    assert mode(home / "keys") == 0o755


@pytest.mark.parametrize("there", ["alice.key", "alice.key_secret"])
def test_no_file_is_written_over_and_no_half_of_a_pair_is_left(home: Path, there: str) -> None:
    (home / there).write_text("mine")
    with pytest.raises(ConfigError, match=rf"{there} exists, and no key is written over"):
        generate(home, "alice")
    assert [file.name for file in home.glob("alice*")] == [there]
    assert (home / there).read_text() == "mine"


@pytest.mark.parametrize("name", ["", "a/b", "../a", ".a", "a\0"])
def test_a_name_that_is_none_of_a_file_is_refused(home: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--name"):
        generate(home, name)


def test_a_folder_that_cannot_be_made_is_named(home: Path) -> None:
    (home / "file").touch()
    with pytest.raises(ConfigError, match=rf"cannot be written to {home}/file/keys: Not a directory"):
        generate(home / "file/keys", "alice")


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o620, 0o666])
def test_a_secret_key_that_others_can_read_or_change_is_refused(pair: tuple[Path, Path], bits: int) -> None:
    pair[1].chmod(bits)
    with pytest.raises(
        ConfigError, match=rf"^what: .*alice.key_secret is open to others \(mode {bits:04o}\).*chmod 600"
    ):
        read_pair(pair[1], "what")


def test_what_root_hands_to_a_group_may_be_read_by_it(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    if os.getuid():
        pytest.skip("only root has files of root's")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    pair[1].chmod(0o440)
    read_pair(pair[1], "what")
    pair[1].chmod(0o444)
    with pytest.raises(ConfigError, match="is open to others"):
        read_pair(pair[1], "what")


def test_each_half_is_told_from_the_other(pair: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="holds a public key only; the secret one is in NAME.key_secret"):
        read_pair(pair[0], "what")
    with pytest.raises(ConfigError, match="holds a secret key, which only its owner should have"):
        read_public(pair[1], "what")


def test_a_public_and_a_secret_key_that_are_no_pair_are_refused(pair: tuple[Path, Path]) -> None:
    other = zmq.curve_keypair()[1]
    pair[1].write_text(pair[1].read_text().replace(read_pair(pair[1], "x").secret.decode(), other.decode()))
    with pytest.raises(ConfigError, match="are no pair") as caught:
        read_pair(pair[1], "what")
    assert other.decode() not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"-----BEGIN OPENSSH PRIVATE KEY-----",
        b"\xff\xfe" * 50,
        b"public-key",
        b"public-key = ",
        b'public-key = "' + b"a" * 39 + b'"',
        b'public-key = "' + b'"' * 40 + b'"',
        b'public-key = "' + b"#" * 40 + b'"',
        b'public-key = "' + b"\xc3\xa9" * 20 + b'"',
        b'public-key = "' + b"a" * 40 + b'"\nsecret-key = "hidden"',
    ],
)
def test_a_file_without_a_key_is_refused_and_not_shown(home: Path, content: bytes) -> None:
    file = home / "a"
    file.write_bytes(content)
    file.chmod(0o600)
    for read in (read_public, read_pair):
        with pytest.raises(ConfigError, match=rf"^what: {file} holds no key: .*`headrace keygen`") as caught:
            read(file, "what")
        assert "hidden" not in str(caught.value)


def test_what_is_no_file_is_refused_and_not_waited_for(home: Path) -> None:
    os.mkfifo(home / "pipe")
    (home / "large").write_bytes(bytes(1 << 17))
    for file, named in ((home / "none", "No such file"), (home, "is no file"), (home / "pipe", "is no file")):
        with pytest.raises(ConfigError, match=f"^what: {file} .*{named}"):
            read_public(file, "what")
    with pytest.raises(ConfigError, match="is no file that"):
        read_public(home / "large", "what")


def test_a_client_has_its_own_keys_and_the_public_one_of_the_daemon(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = generate(pair[0].parent, "server")
    monkeypatch.setenv("HOME", str(pair[0].parent))
    keys = Keys.load({"secret_key": "~/alice.key_secret", "server": server})
    assert keys is not None
    assert keys.own == read_pair(pair[1], "x")
    assert keys.server == read_public(server, "x")
    assert Keys.load(None) is None
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        keys.secure(socket)
        assert socket.mechanism == zmq.CURVE


@pytest.mark.parametrize(
    "given",
    [{}, {"secret_key": "a"}, {"server": "a"}, {"secret_key": "a", "server": "b", "client": "c"}, ["a", "b"], "a", 7],
)
def test_a_client_is_told_what_its_keys_must_be(given: Any) -> None:
    with pytest.raises(ConfigError, match=r'^curve: must be \{"secret_key": FILE, "server": FILE\}'):
        Keys.load(given)


@pytest.mark.parametrize("value", [None, 7, "", b"", "a\0"])
def test_a_client_is_told_which_of_them_is_no_path(pair: tuple[Path, Path], value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^curve\.server: must be the path of a file"):
        Keys.load({"secret_key": pair[1], "server": value})
    with pytest.raises(ConfigError, match=r"^curve\.secret_key: must be the path of a file"):
        Keys.load({"secret_key": value, "server": pair[0]})
