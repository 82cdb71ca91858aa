"""A configuration: what is accepted, what is refused and how that is said, and what its digests depend on."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.errors import ConfigError
from headrace.output import Output
from headrace.pipeline import dataset
from headrace.pipeline.index import Index, Labels, Listing, Paths
from headrace.pipeline.spec import SOURCE_KEYS, Config, Dataset, Decode, Memory, Stream, Workers
from headrace.pipeline.transforms import CenterCrop, RandomHorizontalFlip, RandomResizedCrop
from headrace.slots import SlotLayout

TRANSFORMS: list[Any] = [{"random_resized_crop": {"size": 64}}, "random_horizontal_flip"]
STREAM: dict[str, Any] = {"dataset": {"folder": "/data/train"}, "transforms": TRANSFORMS}

YAML = """\
listen: ipc:///run/user/1000/headrace/main.sock
memory: 2GiB
cache_dir: cache
socket: {group: vision}
workers: {backend: pillow, processes: 3}
streams:
  train:
    dataset: {folder: data/train, allow_empty: true, classes: [b, a], limit: 9, extensions: [.JPG, png]}
    shuffle: true
    seed: 18446744073709551615
    chunk: 4
    decode: {max_pixels: 1000, max_file_bytes: 10MB}
    transforms:
      - random_resized_crop: {size: 64}
      - random_horizontal_flip
    output: {dtype: float16, layout: channels_last, mean: [0.5, 0.5, 0.5], std: [1, 1, 1]}
    on_bad_sample: mask
    max_bad: 1
"""


def stream(**changes: Any) -> Stream:
    return Stream(**(STREAM | changes))


def config(**changes: Any) -> Config:
    return Config.load({"streams": {"train": STREAM}} | changes)


def problems(source: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        Config.load(source)
    return str(caught.value).splitlines()


# -- what is accepted ---------------------------------------------------------------------------------------


def test_a_file_with_every_key_gives_every_field(tmp_path: Path) -> None:
    file = tmp_path / "headrace.yaml"
    file.write_text(YAML)
    loaded = Config.load(file)
    assert loaded == Config(
        listen=["ipc:///run/user/1000/headrace/main.sock"],
        memory=Memory(bytes=2 << 30),
        cache_dir=tmp_path / "cache",
        socket={"group": "vision"},
        workers=Workers(backend="pillow", processes=3),
        streams={
            "train": Stream(
                dataset=Dataset(
                    folder=tmp_path / "data/train",
                    allow_empty=True,
                    classes=["b", "a"],
                    limit=9,
                    extensions=["jpg", "png"],
                ),
                shuffle=True,
                seed=(1 << 64) - 1,
                chunk=4,
                decode=Decode(max_pixels=1000, max_file_bytes=10_000_000),
                transforms=[RandomResizedCrop(size=64), RandomHorizontalFlip()],
                output=Output("float16", "channels_last", (0.5, 0.5, 0.5)),
                on_bad_sample="mask",
                max_bad=1.0,
            )
        },
    )


def test_the_defaults_are_those_of_the_documents() -> None:
    loaded = config()
    assert (loaded.listen, loaded.memory, loaded.cache_dir, loaded.socket.group) == ([], None, None, None)
    workers = dict.fromkeys(("backend", "processes", "threads", "devices", "in_flight"), "auto")
    assert loaded.workers.plain() == workers | {"gpu_memory": 4 << 30, "hw_decoder_load": 0.0}
    train = loaded.streams["train"]
    assert (train.shuffle, train.seed, train.chunk, train.on_bad_sample, train.max_bad) == (False, 0, 32, "skip", 0.01)
    assert (train.decode.max_pixels, train.decode.max_file_bytes) == (178956970, 256 << 20)
    assert train.output == Output("float32", "NCHW", (0, 0, 0), (1, 1, 1))
    folder = train.dataset
    assert (folder.allow_empty, folder.classes, folder.limit, folder.extensions) == (False, None, None, None)


def test_plain_data_loads_to_an_equal_configuration_also_through_json(tmp_path: Path) -> None:
    file = tmp_path / "headrace.yaml"
    file.write_text(YAML)
    for loaded in (Config.load(file), config(), config(memory="7 slots")):
        assert Config.load(loaded.plain()) == loaded
        assert Config.load(json.loads(json.dumps(loaded.plain()))) == loaded


def test_a_configuration_is_taken_as_it_is_and_cannot_be_changed() -> None:
    loaded = config()
    assert Config.load(loaded) is loaded
    with pytest.raises(ValueError, match="frozen"):
        loaded.memory = Memory(slots=3)


def test_transforms_may_be_objects_names_or_mappings() -> None:
    objects = stream(transforms=[RandomResizedCrop(size=64), RandomHorizontalFlip()])
    assert objects == stream() == stream(transforms=(TRANSFORMS[0], {"random_horizontal_flip": {"p": 0.5}}))


def test_the_layout_has_the_chunk_the_size_of_the_chain_and_the_labels_and_texts_of_the_listing() -> None:
    texts = Paths.of([b"\x93abc", b"", b"\x92ab"])
    numbers = np.arange(3)
    listing = Listing(
        b"/", [], texts, numbers, numbers, Labels(np.ones((3, 5), np.float32)), Paths.of([]), numbers[:0], numbers[:0]
    )
    listing.columns, listing.texts = ["a", "b"], texts
    spec = stream(chunk=2, transforms=[CenterCrop(size=(48, 80))])
    with contextlib.closing(Index.in_memory(listing, "key")) as index:
        assert spec.size == (48, 80) and spec.layout(index) == SlotLayout(2, 48, 80, "float32", 5, 7)


def test_paths_in_a_file_are_relative_to_it_and_others_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("deep", "\udcff"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "headrace.yaml").write_text(YAML)
        loaded = Config.load(f"{name}/headrace.yaml")
        assert loaded.streams["train"].dataset.folder == tmp_path / name / "data/train"
    assert Dataset(folder="data").folder == tmp_path / "data"
    assert config(cache_dir="cache").cache_folder == tmp_path / "cache"


def test_a_tilde_is_the_home_folder_and_a_dollar_is_a_dollar(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv("HOME", str(home))
    assert Dataset(folder="~/data").folder == home / "data"
    assert Dataset(folder="/data/$HOME").folder == Path("/data/$HOME")


LISTS = """\
streams:
  l:
    dataset:
      list: lists/train.csv
      root: ~/data
      columns: {path: file, label: [x, y]}
      labels: float
      allow_missing: true
      extensions: [.JPG]
    transforms: [{center_crop: {size: 8}}]
  s:
    dataset: {shards: "tars/train-{000..012}.tar", columns: {label: txt}, labels: text, limit: 3}
    transforms: [{center_crop: {size: 8}}]
  t:
    dataset: {shards: [~/a.tar, /b.tar]}
    transforms: [{center_crop: {size: 8}}]
"""


def test_lists_and_shards_are_described_likewise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "headrace.yaml").write_text(LISTS)
    loaded = Config.load(tmp_path / "headrace.yaml")
    listed, shards, two = (loaded.streams[name].dataset for name in "lst")
    assert (listed.list, listed.root) == (tmp_path / "lists/train.csv", Path("/home/me/data"))
    assert listed.columns.plain() == {"path": "file", "label": ["x", "y"]}
    assert (listed.labels, listed.allow_missing, listed.extensions) == ("float", True, ["jpg"])
    assert shards.shards == [f"{tmp_path}/tars/train-{{000..012}}.tar"] and shards.columns.label == "txt"
    assert two.shards == ["/home/me/a.tar", "/b.tar"] and two.columns.label is None and two.labels == "auto"
    assert [d.source for d in (listed, shards, two)] == ["list", "shards", "shards"]
    assert [d.place for d in (listed, two)] == [f"{tmp_path}/lists/train.csv", "/home/me/a.tar, /b.tar"]
    assert Config.load(json.loads(json.dumps(loaded.plain()))) == loaded


@pytest.mark.parametrize("name", [b"/data/\xff\xfe", b"/data/a b\t'\"[]{}*%\n", "/data/é".encode()])
def test_a_path_of_any_bytes_survives_the_way_through_plain_data(name: bytes) -> None:
    for given in (name, os.fsdecode(name), Path(os.fsdecode(name))):
        made = Dataset(folder=given)
        assert os.fsencode(made.folder) == name
        assert Dataset(**json.loads(json.dumps(made.plain()))) == made


def test_the_cache_folder_follows_the_key_then_xdg_then_home(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config(cache_dir="/elsewhere").cache_folder == Path("/elsewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert config().cache_folder == Path("/xdg/headrace")
    for useless in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", useless)
        monkeypatch.setenv("HOME", "/home/me")
        assert config().cache_folder == Path("/home/me/.cache/headrace")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # a user whom the machine does not know
    assert config().cache_folder == Path("/.cache/headrace")


@pytest.mark.parametrize(
    ("given", "memory"),
    [
        (1, Memory(bytes=1)),
        (2147483648, Memory(bytes=2 << 30)),
        ("2GiB", Memory(bytes=2 << 30)),
        ("512MB", Memory(bytes=512_000_000)),
        ("1.5 kib", Memory(bytes=1536)),
        ("300 B", Memory(bytes=300)),
        ("1 TiB", Memory(bytes=1 << 40)),
        ("12 slots", Memory(slots=12)),
        ("1 slot", Memory(slots=1)),
        (Memory(slots=2), Memory(slots=2)),
    ],
)
def test_memory_is_bytes_a_size_or_slots(given: Any, memory: Memory) -> None:
    assert config(memory=given).memory == memory


def test_a_stream_is_found_by_name_or_because_it_is_the_only_one() -> None:
    one, two = config(), config(streams={"train": STREAM, "val": STREAM})
    assert one.stream() == one.stream("train") == ("train", one.streams["train"])
    assert two.stream("val")[0] == "val"
    with pytest.raises(ConfigError, match='say which: "train", "val"'):
        two.stream()
    with pytest.raises(ConfigError, match='there is no "trian", did you mean train\\?; there is "train", "val"'):
        two.stream("trian")


# -- what is refused ----------------------------------------------------------------------------------------

REFUSED: list[tuple[str, Any, str]] = [
    ("memroy", "2GiB", "memroy: there is no such key, did you mean memory?; allowed here: cache_dir, curve, listen"),
    ("curve", 7, "curve: 7: must be a mapping of keys"),
    ("curve", {"secret_key": "k"}, "curve: clients: is missing, and without it nobody could connect; `headrace keygen"),
    ("curve", {"clients": ["k"]}, "curve: secret_key: is missing, and without it none counts"),
    ("curve", {"secret_key": 7, "clients": ["k"]}, "curve.secret_key: 7: must be the path of a file"),
    ("curve", {"secret_key": "k", "clients": [7]}, "must be a list of files with public keys, NAME.key, or of folders"),
    ("metrics", 9400, 'metrics: 9400: must be HOST:PORT, such as "127.0.0.1:9400"'),
    ("metrics", "127.0.0.1", 'metrics: "127.0.0.1" is not an address: it must be HOST:PORT'),
    ("metrics", "http://127.0.0.1:9400", 'metrics: "http://127.0.0.1:9400": must be HOST:PORT, such as'),
    ("metrics", "127.0.0.1:http", "the port must be a number from 0 to 65535"),
    ("metrics", "::1:9400", "an IPv6 address stands in brackets, as in [::1]:5555"),
    ("memory", 0, 'memory: 0: must be bytes (2147483648), a size ("2GiB", "512MB") or "N slots", above zero'),
    ("memory", "-1GiB", "must be bytes"),
    ("memory", "2 elephants", "must be bytes"),
    ("memory", "0 slots", "must be bytes"),
    ("memory", True, "must be bytes"),
    ("memory", 1.5, "must be bytes"),
    ("cache_dir", 3, "cache_dir: 3: must be the path of a folder"),
    ("cache_dir", "", "must be the path of a folder"),
    ("cache_dir", "a\0b", "without NUL bytes"),
    ("socket", 3, "socket: 3: must be a mapping of keys"),
    ("socket.group", 7, "socket.group: 7: must be a name (a string; put it in quotes)"),
    ("socket.grop", "x", "socket.grop: there is no such key, did you mean group?; allowed here: group"),
    ("workers.backend", "dali", 'workers.backend: "dali": must be auto, dali-gpu, dali-cpu or pillow'),
    ("workers.backend", 3, "workers.backend: 3: must be auto, dali-gpu, dali-cpu or pillow"),
    ("workers.processes", 0, 'workers.processes: 0: must be "auto" or a whole number from 1 to 1024'),
    ("workers.processes", True, "workers.processes: true: must be"),
    ("workers.threads", 0, 'workers.threads: 0: must be "auto" or a whole number from 1 to 1024'),
    ("workers.in_flight", 65, 'workers.in_flight: 65: must be "auto" or a whole number from 1 to 64'),
    ("workers.devices", 0, 'workers.devices: 0: must be "auto" or a list of numbers of GPUs, each of them once'),
    ("workers.devices", [], 'workers.devices: []: must be "auto" or a list'),
    ("workers.devices", [0, 0], "workers.devices: [0, 0]: must be"),
    ("workers.devices", [-1], "workers.devices: [-1]: must be"),
    ("workers.devices", [True], "workers.devices: [true]: must be"),
    (
        "workers",
        {"backend": "dali-cpu", "devices": [0]},
        "workers: devices: belongs to the backends `auto` and `dali-gpu`, and this is `dali-cpu`",
    ),
    ("workers.gpu_memory", 0, 'workers.gpu_memory: 0: must be bytes (268435456) or a size such as "256MiB"'),
    ("workers.hw_decoder_load", 1.5, "workers.hw_decoder_load: 1.5: must be a number from 0 to 1"),
    ("streams", {}, "streams: {}: must hold at least one stream"),
    ("streams", None, "streams: null: must be a mapping of keys"),
    ("streams.train", 7, "streams.train: 7: must be a mapping of keys"),
    ("streams.train.dataset", None, "streams.train.dataset: null: must be a mapping of keys"),
    ("streams.train.dataset", {"lsit": "x"}, 'needs exactly one source, `folder`, `list` or `shards`; given is "lsit"'),
    ("streams.train.dataset", {}, "needs exactly one source, `folder`, `list` or `shards`; given is nothing"),
    ("streams.train.dataset.folder", 3, "streams.train.dataset.folder: 3: must be the path of a folder"),
    ("streams.train.dataset.shards", "x.tar", '`folder`, `list` or `shards`; given is "folder", "shards"'),
    ("streams.train.dataset", {"list": "x", "shards": "y"}, 'given is "list", "shards"'),
    ("streams.train.dataset", {"list": 7}, "streams.train.dataset.list: 7: must be the path of a file"),
    ("streams.train.dataset", {"shards": 7}, "streams.train.dataset.shards: 7: must be the path of a tar file"),
    ("streams.train.dataset", {"shards": []}, "streams.train.dataset.shards: []: must be the path of a tar file"),
    (
        "streams.train.dataset.root",
        "x",
        "streams.train.dataset: root: belongs to `list`, and this dataset is a `folder`",
    ),
    ("streams.train.dataset.columns", {"label": "x"}, "columns: belongs to `list` or `shards`, and this dataset is a"),
    ("streams.train.dataset.columns", {"label": []}, "dataset.columns.label: []: must be the name of a column, or a"),
    ("streams.train.dataset.columns", {"lable": "x"}, "did you mean label?; allowed here: label, path"),
    ("streams.train.dataset.labels", "int", "labels: belongs to `list` or `shards`"),
    ("streams.train.dataset.labels", "words", "labels: \"words\": must be 'auto', 'class', 'classes', 'int', 'float'"),
    ("streams.train.dataset.allow_missing", True, "allow_missing: belongs to `list`, and this dataset is a `folder`"),
    ("streams.train.dataset", {"list": "x", "allow_empty": True}, "allow_empty: belongs to `folder`"),
    ("streams.train.dataset", {"list": "x", "columns": {"label": ["a", "a"]}}, "must name each column once"),
    ("streams.train.dataset", {"list": "x", "columns": {"label": "path"}}, '"path" cannot be both path and label'),
    ("streams.train.dataset", {"list": "x", "columns": {"path": ""}}, 'columns.path: "": must be a name'),
    (
        "streams.train.dataset",
        {"list": "x", "columns": {"label": ["a", "b"]}, "labels": "class"},
        "columns.label: several columns are a vector of numbers, but `labels` is class",
    ),
    ("streams.train.dataset", {"shards": "x", "root": "y"}, "root: belongs to `list`, and this dataset is a `shards`"),
    ("streams.train.dataset", {"shards": "x", "columns": {"path": "y"}}, "columns.path: belongs to `list`"),
    ("streams.train.dataset.limit", 0, "must be a whole number of at least 1"),
    ("streams.train.dataset.classes", [], "must be a list of class names"),
    ("streams.train.dataset.classes", "cat", "must be a list of class names"),
    ("streams.train.dataset.classes", [1], "put numbers in quotes"),
    ("streams.train.dataset.classes", ["a", "b", "a"], 'must name each of the class names once; "a" is repeated'),
    ("streams.train.dataset.classes", ["a/b"], '"a/b" is no name of a folder in the data set\'s root'),
    ("streams.train.dataset.extensions", ["jpg", ".JPG"], "is repeated"),
    (
        "streams.train.dataset.extensions",
        [".Tar.gz"],
        'extensions: "tar.gz" holds a dot; an ending of a `folder` is',
    ),
    ("streams.train.dataset.extensions", ["a/b"], 'must be endings such as jpg or .jpg; "a/b" is none'),
    ("streams.train.dataset.extensions", ["\ud800"], 'must be endings, as text; "\\ud800" is none'),
    ("streams.train.dataset.classes", ["\udfff"], 'must be class names, as text; "\\udfff" is none'),
    ("streams.train.dataset.folder", "\ud800", "without NUL bytes and lone surrogates"),
    ("streams.train.dataset", {"shards": "\ud800"}, "without NUL bytes and lone surrogates"),
    ("streams.train.shuffle", 1, "streams.train.shuffle: 1: must be true or false"),
    ("streams.train.shuffle", "yes", "must be true or false"),
    ("streams.train.seed", -1, "must be a whole number from 0 to 18446744073709551615"),
    ("streams.train.seed", 1 << 64, "must be a whole number from 0 to 18446744073709551615"),
    ("streams.train.seed", "0", "must be a whole number"),
    ("streams.train.chunk", 0, "streams.train.chunk: 0: must be a whole number from 1 to 4096"),
    ("streams.train.chunk", 4097, "must be a whole number from 1 to 4096"),
    ("streams.train.chunk", True, "must be a whole number from 1 to 4096"),
    ("streams.train.chunk", None, "must be a whole number from 1 to 4096"),
    ("streams.train.decode.max_pixels", 0, "must be a whole number of at least 1"),
    ("streams.train.decode.max_file_bytes", "much", "must be bytes (268435456) or a size"),
    (
        "streams.train.decode.dct_scale",
        False,
        "did you mean dct_scaling?; allowed here: dct_scaling, ignore_orientation, max_file_bytes, max_pixels",
    ),
    ("streams.train.output.dtype", "float64", "must be 'uint8', 'float16', 'bfloat16' or 'float32'"),
    ("streams.train.output.layuot", "NCHW", "did you mean layout?; allowed here: cutmix, dtype, layout, mean, mixup"),
    ("streams.train.output.mean", [0, 0], "streams.train.output.mean[2]: this item is missing"),
    ("streams.train.output.std", [1, 0, 1], "streams.train.output: std: [1.0, 0.0, 1.0] must be positive"),
    ("streams.train.output", {"dtype": "uint8", "mean": [1, 1, 1]}, "mean and std need a floating dtype"),
    ("streams.train.on_bad_sample", "ignore", "must be 'skip', 'replace', 'mask' or 'raise'"),
    ("streams.train.max_bad", 1.01, "streams.train.max_bad: 1.01: must be a number from 0 to 1"),
    ("streams.train.max_bad", float("nan"), "must be a number from 0 to 1"),
    ("streams.train.shufle", True, "did you mean shuffle?; allowed here: chunk, dataset, decode, max_bad"),
    ("streams.train.transforms", "resize", 'streams.train.transforms: "resize": must be a list'),
    ("streams.train.transforms", [], "streams.train.transforms: the pictures have no fixed size"),
    ("streams.train.transforms", [{"resize": {"size": 9}}], "streams.train.transforms: after resize the pictures have"),
    ("streams.train.transforms", ["resise"], "streams.train.transforms[0]: 'resise' is not a transform"),
]


def placed(key: str, value: Any) -> dict[str, Any]:
    """A good configuration in which just this key has this value."""
    data: dict[str, Any] = json.loads(json.dumps({"streams": {"train": STREAM}}))
    *above, last = key.split(".")
    inner = data
    for part in above:
        inner = inner.setdefault(part, {})
    inner[last] = value
    return data


@pytest.mark.parametrize(("key", "value", "says"), REFUSED)
def test_an_error_names_key_value_and_what_is_allowed(key: str, value: Any, says: str) -> None:
    found = problems(placed(key, value))
    assert len(found) == 1 and says in found[0] and found[0].startswith(key.partition(".")[0])


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("tcp://127.0.0.1", "must be tcp://HOST:PORT"),
        ("tcp://:5555", "must be tcp://HOST:PORT"),
        ("tcp://a b:5555", "must be tcp://HOST:PORT"),
        ("tcp://host:65536", "a number from 0 to 65535"),
        ("tcp://host:http", "a number from 0 to 65535"),
        ("tcp://host:-1", "a number from 0 to 65535"),
        ("tcp://::1:5555", "in brackets"),
        ("ipc://relative.sock", "an absolute path"),
        ("ipc://@abstract", "an absolute path"),
        ("ipc:///run/\n.sock", "an absolute path"),
        ("/run/main.sock", "an absolute path"),
        ("", "an absolute path"),
        ("ipc:///" + "x" * 103, "too long for a Unix socket: 108 bytes with .zmq behind it, at most 107"),
        ("ipc:///" + "é" * 52, "too long for a Unix socket: 109 bytes"),
        (7, "must be an address, ipc://PATH or tcp://HOST:PORT, or a list of them"),
        (["ipc:///a", "ipc:///a"], "must name each address once"),
        (["ipc:///a", "udp://*:1"], "is not an address"),
    ],
)
def test_an_address_that_cannot_be_bound_is_refused_with_the_reason(address: Any, says: str) -> None:
    (found,) = problems(placed("listen", address))
    assert says in found and found.startswith("listen: ")


@pytest.mark.parametrize(
    "place", ["127.0.0.1:5555", "*:0", "localhost:*", "[::1]:1", "[fe80::1%eth0]:65535", "node-7.x:80"]
)
def test_an_address_of_tcp_has_a_host_or_star_and_a_port_or_any(place: str) -> None:
    assert config(listen=["ipc:///a", f"tcp://{place}"]).listen == ["ipc:///a", f"tcp://{place}"]


@pytest.mark.parametrize("place", ["127.0.0.1:9400", "*:0", "localhost:*", "[::1]:9400"])
def test_metrics_have_a_host_or_star_and_a_port_or_any(place: str) -> None:
    assert config(metrics=place).metrics == place and config().metrics is None
    assert config(metrics=place).key() != config().key()


def test_the_longest_path_of_a_unix_socket_is_allowed() -> None:
    address = "ipc:///" + "x" * 102
    assert config(listen=address).listen == [address]


@pytest.mark.parametrize("name", ["", "a\nb", "a\x7fb", "\udcff", 3])
def test_a_stream_needs_a_name_that_can_be_shown(name: Any) -> None:
    with pytest.raises(ConfigError, match="must be a name"):
        config(streams={name: STREAM})


def test_any_other_name_of_a_stream_is_allowed() -> None:
    for name in ("train", "a.b", "a b", "été", "[x]", "0"):
        assert config(streams={name: STREAM}).stream() == (name, stream())


def test_all_problems_of_a_file_are_listed_in_its_order_with_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(
        "memory: lots\n"
        "streams:\n"
        "  train:\n"
        "    dataset: {folder: x}\n"
        "    chunk: 0\n"
        "    transforms:\n"
        "      - random_resized_crop: {size: 64}\n"
        "      - random_horizontal_flop\n"
        "  a.b:\n"
        "    transforms: [{center_crop: {size: 9}}]\n"
        "    shufle: true\n"
        "  c:\n"
        "    dataset: {folder: x}\n"
        "    output: {mean: [2, 0, 0]}\n"
        "    transforms: [{center_crop: {size: 9}}, {random_erasing: {value: mean}}]\n"
    )
    expected = [
        (1, "memory: "),
        (5, "streams.train.chunk: "),
        (8, "streams.train.transforms[1]: "),
        (9, 'streams."a.b".dataset: this key is missing'),
        (11, 'streams."a.b".shufle: there is no such key, did you mean shuffle?'),
        (15, "streams.c.transforms: random_erasing: value: mean stands for the mean of the stream's output"),
    ]
    found = problems(file)
    assert len(found) == len(expected)
    for line, (number, says) in zip(found, expected, strict=True):
        assert line.startswith(f"{file}, line {number}: {says}")


def test_a_mapping_gives_the_same_sentences_without_lines(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(f"streams: {{train: {json.dumps(STREAM | {'chunk': 0, 'sed': 1})}}}\n")
    without_lines = [re.sub(r"^.*, line 1: ", "", line) for line in problems(file)]
    assert without_lines == problems({"streams": {"train": STREAM | {"chunk": 0, "sed": 1}}})


def test_objects_give_the_same_sentences() -> None:
    with pytest.raises(ConfigError, match="^chunk: 0: must be a whole number from 1 to 4096$"):
        stream(chunk=0)
    with pytest.raises(ConfigError, match="^dataset.limit: 0: must be a whole number of at least 1$"):
        headrace.Stream(dataset={"folder": "x", "limit": 0}, transforms=TRANSFORMS)
    with pytest.raises(ConfigError, match="^streams.train.chunk: 0"):
        Config(streams={"train": STREAM | {"chunk": 0}})


@pytest.mark.parametrize("source", [3, None, ["a"], b"a.yaml"])
def test_what_cannot_be_a_configuration_is_refused(source: Any) -> None:
    (found,) = problems(source)
    assert "a YAML file's path, a mapping or a Config" in found


def test_a_long_value_is_shown_shortened() -> None:
    (found,) = problems(placed("memory", "x" * 10_000))
    assert len(found) < 250


# -- digests ------------------------------------------------------------------------------------------------

OTHER_ORDER: list[dict[str, Any]] = [{"seed": 1}, {"shuffle": True}]
OTHER_PIXELS: list[dict[str, Any]] = [
    {"chunk": 4},
    {"decode": {"max_pixels": 5}},
    {"decode": {"max_file_bytes": 5}},
    {"decode": {"dct_scaling": True}},
    {"decode": {"ignore_orientation": True}},
    {"transforms": [TRANSFORMS[0]]},
    {"transforms": [{"random_resized_crop": {"size": 65}}, TRANSFORMS[1]]},
]
SAME: list[dict[str, Any]] = [
    {"dataset": {"folder": "/elsewhere"}},
    {"output": {"dtype": "uint8"}},
    {"on_bad_sample": "mask"},
    {"max_bad": 1.0},
    {"transforms": [RandomResizedCrop(size=(64, 64)), {"random_horizontal_flip": {"p": 0.5}}]},
]


def test_fingerprints_never_change_by_accident() -> None:
    prints = stream(transforms=[{"center_crop": {"size": 64}}], seed=7).fingerprints("d" * 64)
    assert prints.data == "d" * 64
    assert prints.order == "04b7a26fb8429b08c12018c19d0c501c75f6a3497197ff684316e278946c10f0"
    assert prints.pixels == "bb85696daa78a388aed4ee36349123f1032beba02ea2ff94db87c607b24e3f19"


@pytest.mark.parametrize("changes", OTHER_ORDER)
def test_seed_and_shuffle_change_order_and_pixels(changes: dict[str, Any]) -> None:
    was, now = stream().fingerprints("d"), stream(**changes).fingerprints("d")
    assert was.order != now.order and was.pixels != now.pixels


@pytest.mark.parametrize("changes", OTHER_PIXELS)
def test_limits_transforms_and_chunk_change_pixels_only(changes: dict[str, Any]) -> None:
    was, now = stream().fingerprints("d"), stream(**changes).fingerprints("d")
    assert was.order == now.order and was.pixels != now.pixels


@pytest.mark.parametrize("changes", SAME)
def test_what_the_client_does_and_where_the_data_lies_changes_no_fingerprint(changes: dict[str, Any]) -> None:
    assert stream().fingerprints("d") == stream(**changes).fingerprints("d")


def test_other_data_changes_all_fingerprints() -> None:
    was, now = stream().fingerprints("d"), stream().fingerprints("e")
    assert was.data != now.data and was.order != now.order and was.pixels != now.pixels


def test_the_key_of_a_configuration_has_its_defaults_filled_in_and_leaves_out_how_to_listen() -> None:
    key = config().key()
    assert re.fullmatch("[0-9a-f]{64}", key)
    assert key == config(listen="ipc:///somewhere").key()
    assert key == config(curve={"secret_key": "/k/a.key_secret", "clients": ["/k"]}).key()
    assert key == config(workers={"processes": "auto"}, socket={"group": None}).key()
    assert key == config(cache_dir=config().cache_folder).key()
    assert key != config(memory="1GiB").key()
    assert key != config(workers={"processes": 1}).key()
    assert key == config(workers={"gpu_memory": "4GiB", "hw_decoder_load": 0, "devices": "auto"}).key()
    assert config(workers={"devices": [1, 0]}).key() == config(workers={"devices": [0, 1]}).key() != key
    assert key != config(streams={"train": STREAM | {"max_bad": 0.5}}).key()


def test_every_source_key_has_its_entry_in_the_table_of_sources() -> None:
    assert tuple(dataset.SOURCES) == SOURCE_KEYS
    assert set(SOURCE_KEYS) <= set(Dataset.model_fields)


def erasing(value: Any, mean: list[float] | None = None, **more: Any) -> Stream:
    """A stream that erases to `value` and subtracts `mean`."""
    transforms = [{"center_crop": {"size": 8}}, {"random_erasing": {"value": value}}]
    return stream(transforms=transforms, output={"mean": mean or [0, 0, 0]}, **more)


def test_an_erased_mean_is_that_of_the_output_in_levels_once_the_stream_is_read() -> None:
    mean = [0.485, 0.456, 0.406]
    read = erasing("mean", mean)
    levels = [124 / 255, 116 / 255, 104 / 255]
    assert read.plain()["transforms"][1]["random_erasing"]["value"] == levels
    assert read == erasing(levels, mean) == Stream(**read.plain()) != erasing("mean")
    assert Config(streams={"train": read}) == Config.load({"streams": {"train": read.plain()}})


def test_an_erased_mean_is_part_of_the_pixels_like_any_number() -> None:
    def pixels(value: Any, mean: list[float]) -> str:
        return erasing(value, mean).fingerprints("d").pixels

    mean, other = [0.485, 0.456, 0.406], [0.5, 0.5, 0.5]
    assert pixels("mean", mean) != pixels("mean", other)
    # Not so without it, nor for a mean that is the same level.
    assert pixels(0, mean) == pixels(0, other)
    assert pixels("mean", mean) == pixels("mean", [0.4851, 0.4559, 0.406])
    assert erasing("mean", mean).fingerprints("d").order == erasing("mean", other).fingerprints("d").order


def test_an_erased_mean_that_is_no_colour_is_refused() -> None:
    for mean in ([1.5, 0, 0], [-0.1, 0, 0]):
        (found,) = problems(
            {
                "streams": {
                    "train": {
                        **STREAM,
                        "transforms": [*TRANSFORMS, {"random_erasing": {"value": "mean"}}],
                        "output": {"mean": mean},
                    }
                }
            }
        )
        assert found.startswith("streams.train.transforms: random_erasing: value: mean stands for the mean of the stre")


def test_what_a_jitter_does_not_do_is_in_no_fingerprint() -> None:
    def pixels(**arguments: Any) -> str:
        return stream(transforms=[{"center_crop": {"size": 8}}, {"color_jitter": arguments}]).fingerprints("d").pixels

    assert pixels(brightness=0.4) == pixels(brightness=[0.6, 1.4], hue=0, contrast=None) != pixels(contrast=0.4)
    assert pixels(brightness=0.4) == "9d652c012b98c5b7ce1bdbe7f1611976bb83da57babd2af537f57dc294ed187c"
