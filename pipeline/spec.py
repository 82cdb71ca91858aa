"""The configuration: an inert, frozen description of streams, the same for daemon, command line and workers.

`Config.load` takes a YAML file, a mapping or objects; `plain()` gives JSON-able data that loads to an equal
configuration, so a description crosses a process border as plain data. Every error names the key, the value, what is
allowed and, for a file, the line; all of a configuration's problems are reported at once.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from headrace.errors import ConfigError
from headrace.output import Output
from headrace.pipeline.index import Index
from headrace.pipeline.problems import did_you_mean, explain, show
from headrace.pipeline.transforms import Transform, output_size, parse
from headrace.pipeline.values import (
    Addresses,
    Backend,
    ClassNames,
    Count,
    Devices,
    Extensions,
    File,
    Flag,
    Folder,
    InFlight,
    KeyFiles,
    LabelColumns,
    MemoryValue,
    Name,
    Patterns,
    Place,
    Share,
    Size,
    StreamName,
    whole,
)
from headrace.pipeline.values import Memory as Memory
from headrace.protocol import Fingerprints
from headrace.slots import SlotLayout

if TYPE_CHECKING:
    from headrace.pipeline.document import Document

#: The keys of `dataset:` that say where its samples come from; a dataset has exactly one of them.
SOURCE_KEYS: tuple[str, ...] = ("folder", "list", "shards")

M = TypeVar("M", bound="_Model")


def _settled(transforms: tuple[Transform, ...], info: ValidationInfo) -> tuple[Transform, ...]:
    output_size(transforms)
    output = info.data.get("output")  # absent where it is wrong
    return transforms if output is None else tuple(each.settled(output) for each in transforms)


AnyTransform = Annotated[Transform, BeforeValidator(parse), PlainSerializer(Transform.plain)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, **data: Any) -> None:
        """
        Raises:
            ConfigError: what is wrong, a sentence for each problem.
        """
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConfigError(explain(type(self), error)) from None

    # Marks this constructor as equivalent to pydantic's own; without it pydantic would call it for nested mappings too,
    # and an inner problem would surface without its key path.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def plain(self) -> dict[str, Any]:
        """JSON-able data with every default filled in."""
        return self.model_dump(mode="json")


class Decode(_Model):
    """How samples are decoded, and limits; over one of them a sample is a reject. Part of the *pixels* fingerprint.

    Attributes:
        max_pixels: height times width of a picture.
        max_file_bytes: of a file, which is not read when it is larger.
        dct_scaling: whether a JPEG may be decoded at a half, a quarter or an eighth of its size, where the window is
            reduced at least as much.
        ignore_orientation: whether pictures are shown as they are stored, and not turned as EXIF says.
    """

    max_pixels: Annotated[int, whole(1)] = 178956970
    max_file_bytes: Size = 256 << 20
    dct_scaling: Flag = False
    ignore_orientation: Flag = False


class Columns(_Model):
    """Which values of a sample are its path and its label.

    Attributes:
        path: of a list.
        label: a column of a list; several of them make a vector of numbers. Of shards `cls`, `txt` or a key of the
            JSON. None: what is there under its usual name.
    """

    path: Name = "path"
    label: LabelColumns = None


#: Keys that not every source has, and those that have them.
_BELONGS_TO = {
    "root": ("list",),
    "columns": ("list", "shards"),
    "labels": ("list", "shards"),
    "allow_missing": ("list",),
    "allow_empty": ("folder",),
}


class Dataset(_Model):
    """Where samples come from. Exactly one of `SOURCE_KEYS`, and what to list of it.

    Attributes:
        folder: the root; each folder in it is a class.
        list: a CSV or JSON Lines file that names samples.
        shards: WebDataset tar files: absolute paths, with braces.
        root: what the paths of a list are relative to; None: the list's folder.
        columns: which values of a sample are what.
        labels: what labels are; `auto` looks at them.
        allow_missing: whether a list may name what cannot be a sample, which is then left out.
        allow_empty: whether a class may be without samples (it keeps its number).
        classes: only these classes, numbered in this order; None: all, numbered in the order of their names.
        limit: only the first samples of the listing.
        extensions: endings that make a file a sample, instead of the source's own rule; lower case, without the dot.
    """

    if TYPE_CHECKING:  # what a caller may write is more than what a field holds

        def __init__(self, **data: Any) -> None: ...

    folder: Folder | None = None
    list: File | None = None
    shards: Patterns | None = None
    root: Folder | None = None
    columns: Columns = Columns()
    labels: Literal["auto", "class", "classes", "int", "float", "text"] = "auto"
    allow_missing: Flag = False
    allow_empty: Flag = False
    classes: ClassNames | None = None
    limit: Annotated[int, whole(1)] | None = None
    extensions: Extensions | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_source(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and sum(data.get(source) is not None for source in SOURCE_KEYS) != 1:
            given = ", ".join(show(key) for key in data if data[key] is not None) or "nothing"
            raise ValueError(f"a dataset needs exactly one source, {_or(SOURCE_KEYS)}; given is {given}")
        return data

    @model_validator(mode="after")
    def _fits_its_source(self) -> Dataset:
        for key, sources in _BELONGS_TO.items():
            if self.source not in sources and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key}: belongs to {_or(sources)}, and this dataset is a `{self.source}`")
        if self.source == "shards" and self.columns.path != "path":
            raise ValueError("columns.path: belongs to `list`; a sample of `shards` is called by its key")
        if self.source != "shards":
            for ending in self.extensions or ():
                if "." in ending:
                    raise ValueError(
                        f"extensions: {show(ending)} holds a dot; an ending of a `{self.source}` is what follows the"
                        " last dot, only one of `shards` is all that follows the first"
                    )
        label = self.columns.label
        if isinstance(label, list) and self.labels not in ("auto", "int", "float"):
            raise ValueError(f"columns.label: several columns are a vector of numbers, but `labels` is {self.labels}")
        if self.source == "list" and self.columns.path in (label if isinstance(label, list) else [label]):
            raise ValueError(f"columns: {show(self.columns.path)} cannot be both path and label")
        if self.source == "folder" and self.classes is not None:
            for name in self.classes:
                if "/" in name or "\0" in name or name in (".", ".."):
                    raise ValueError(f"classes: {show(name)} is no name of a folder in the data set's root")
        return self

    @property
    def source(self) -> str:
        """Which of `SOURCE_KEYS` this dataset has."""
        return next(source for source in SOURCE_KEYS if getattr(self, source) is not None)

    @property
    def place(self) -> str:
        """What it names, for people."""
        return ", ".join(self.shards) if self.shards is not None else str(self.list or self.folder)


class Stream(_Model):
    """A dataset, an order and a chain of transforms: everything that decides the pictures of an epoch.

    Attributes:
        dataset: where samples come from.
        shuffle: whether each epoch has an order of its own.
        seed: of the order and of every random draw, 0 … 2**64 - 1.
        chunk: positions that are computed, cached and sent together. At most 4096: a chunk is one worker's one job,
            and one slot of the ring.
        decode: limits.
        output: how the Loader hands out batches, unless told otherwise.
        transforms: applied in this order; they end in one fixed size. What stands for a part of `output` is replaced.
        on_bad_sample: what the Loader does with a picture that cannot be decoded, unless told otherwise.
        max_bad: share of bad samples that ends an epoch, likewise.
    """

    if TYPE_CHECKING:  # what a caller may write is more than what a field holds

        def __init__(self, **data: Any) -> None: ...

    dataset: Dataset
    shuffle: Flag = False
    seed: Annotated[int, whole(0, (1 << 64) - 1)] = 0
    chunk: Annotated[int, whole(1, 4096)] = 32
    decode: Decode = Decode()
    output: Output = Output()
    transforms: Annotated[tuple[AnyTransform, ...], AfterValidator(_settled)] = Field((), validate_default=True)
    on_bad_sample: Literal["skip", "replace", "mask", "raise"] = "skip"
    max_bad: Share = 0.01

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of every picture."""
        return output_size(self.transforms)

    def layout(self, index: Index) -> SlotLayout:
        """How a chunk lies in memory, with room for the texts of any chunk of this listing."""
        return SlotLayout(self.chunk, *self.size, *index.label_form(), index.text_room(self.chunk))

    def fingerprints(self, data: str) -> Fingerprints:
        """The three digests (SHA-256, hex): `data` as given, *order* of (data, seed, shuffle), *pixels* of (order,
        decode options, transforms with their defaults filled in, chunk).

        Args:
            data: the listing's fingerprint.
        """
        order = _digest({"data": data, "seed": self.seed, "shuffle": self.shuffle})
        # What is not used is left out, so that an option which comes later changes no digest of a stream without it.
        transforms = [
            {name: _used(arguments) for name, arguments in transform.plain().items()} for transform in self.transforms
        ]
        pixels = {"order": order, "decode": _used(self.decode.plain()), "transforms": transforms, "chunk": self.chunk}
        return Fingerprints(data, order, _digest(pixels))


def _used(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None and value is not False}


class Socket(_Model):
    """Who besides the user may connect: members of this group."""

    group: Name | None = None


class Curve(_Model):
    """Keys for tcp: with them all of it is encrypted, and none but these clients get in.

    Attributes:
        secret_key: the file of the daemon's own, which only its user may read; None: no keys are asked for.
        clients: files of clients' public keys, or folders of such files.
    """

    if TYPE_CHECKING:  # what a caller may write is more than what a field holds

        def __init__(self, **data: Any) -> None: ...

    secret_key: File | None = None
    clients: KeyFiles = ()

    @model_validator(mode="after")
    def _both_or_none(self) -> Curve:
        if (self.secret_key is None) != (not self.clients):
            missing, without = ("clients", "nobody could connect") if self.secret_key else ("secret_key", "none counts")
            raise ValueError(f"{missing}: is missing, and without it {without}; `headrace keygen DIR` makes keys")
        return self


class Workers(_Model):
    """Who computes.

    Attributes:
        backend: a name of `headrace.pipeline.backend`; `auto` takes the best that works here, see
            `headrace.pipeline.machine`.
        processes: CPU workers; `auto` is one for each CPU that the daemon may use.
        threads: of a GPU's worker, that read and decode.
        devices: numbers of GPUs; `auto` are all that work and that no other process uses.
        in_flight: chunks that a GPU's worker is given at once.
        gpu_memory: bytes of its GPU that a worker may use.
        hw_decoder_load: share of JPEGs that the GPU's JPEG engine decodes.
    """

    if TYPE_CHECKING:  # what a caller may write is more than what a field holds

        def __init__(self, **data: Any) -> None: ...

    backend: Backend = "auto"
    processes: Count = "auto"
    threads: Count = "auto"
    devices: Devices = "auto"
    in_flight: InFlight = "auto"
    gpu_memory: Size = 4 << 30
    hw_decoder_load: Share = 0.0

    @model_validator(mode="after")
    def _devices_are_used(self) -> Workers:
        if self.devices != "auto" and self.backend not in ("auto", "dali-gpu"):
            raise ValueError(f"devices: belongs to the backends `auto` and `dali-gpu`, and this is `{self.backend}`")
        return self


def _streams(value: object) -> object:
    if isinstance(value, Mapping) and not value:
        raise ValueError("must hold at least one stream, NAME: {dataset: ..., transforms: ...}")
    return value


class Config(_Model):
    """A daemon's configuration.

    Attributes:
        listen: addresses; empty: a private one, chosen by the daemon.
        memory: for the slots of all streams; None: the daemon's own choice.
        cache_dir: for indexes; None: `cache_folder`'s default.
        socket: who may connect.
        curve: keys for tcp.
        metrics: where `/metrics` and `/healthz` are, HOST:PORT; None: nowhere.
        workers: who computes.
        streams: by name.
    """

    if TYPE_CHECKING:  # what a caller may write is more than what a field holds

        def __init__(self, **data: Any) -> None: ...

    listen: Addresses = []
    memory: MemoryValue | None = None
    cache_dir: Folder | None = None
    socket: Socket = Socket()
    curve: Curve = Curve()
    metrics: Place | None = None
    workers: Workers = Workers()
    streams: Annotated[dict[StreamName, Stream], BeforeValidator(_streams)]

    @classmethod
    def load(cls, source: str | os.PathLike[str] | Mapping[str, Any] | Config) -> Config:
        """A configuration from a YAML file, a mapping or a configuration. Relative paths in a file are relative to
        its folder, others to the working directory.

        Raises:
            ConfigError: what is wrong, a line for each problem.
        """
        if isinstance(source, cls):
            return source
        if isinstance(source, Mapping):
            return _checked(cls, dict(source))
        if not isinstance(source, str | os.PathLike):
            raise ConfigError(
                f"a configuration is a YAML file's path, a mapping or a Config, not {type(source).__name__}"
            )
        from headrace.pipeline import document  # a process that is told its streams reads no YAML

        read = document.read(source)
        return _checked(cls, read.data, read, Path(source).absolute().parent)

    @property
    def cache_folder(self) -> Path:
        """Where indexes are kept: `cache_dir`, else `$XDG_CACHE_HOME/headrace`, else `~/.cache/headrace`."""
        return cache_home() if self.cache_dir is None else self.cache_dir

    def key(self) -> str:
        """Digest of the configuration with its defaults filled in, less `listen` and `curve`, of which a private daemon
        makes no use: there is one of them per key."""
        return _digest(self.plain() | {"listen": None, "curve": None, "cache_dir": str(self.cache_folder)})

    def stream(self, name: str | None = None) -> tuple[str, Stream]:
        """The stream of this name; of the only one, if no name is given.

        Raises:
            ConfigError: no such stream, or no name where there are several.
        """
        if name is None and len(self.streams) == 1:
            return next(iter(self.streams.items()))
        have = ", ".join(map(show, self.streams))
        if name is None:
            raise ConfigError(f"stream: the configuration has several, say which: {have}")
        if name not in self.streams:
            raise ConfigError(f"stream: there is no {show(name)}{did_you_mean(name, self.streams)}; there is {have}")
        return name, self.streams[name]


def cache_home() -> Path:
    """Where indexes are kept unless a configuration says otherwise."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    user = os.path.expanduser("~")  # which stays as it is for somebody without a home, and is no folder here
    # The XDG specification: a relative path there is invalid and to be ignored.
    base = Path(home) if os.path.isabs(home) else Path(user if os.path.isabs(user) else "/") / ".cache"
    return base / "headrace"


def _or(sources: tuple[str, ...]) -> str:
    """`folder`, `list` or `shards`"""
    return " or ".join(filter(None, (", ".join(f"`{s}`" for s in sources[:-1]), f"`{sources[-1]}`")))


def _digest(value: Any) -> str:
    """SHA-256 over canonical JSON: sorted keys, no spaces, ASCII."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")).hexdigest()


def _checked(model: type[M], data: Any, read: Document | None = None, base: Path | None = None) -> M:
    try:
        return model.model_validate(data, context={"base": base})
    except ValidationError as error:
        raise ConfigError(explain(model, error, read)) from None
