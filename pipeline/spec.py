"""The configuration: an inert, frozen description of streams, the same for daemon, command line and workers.

`Config.load` takes a YAML file, a mapping or objects; `plain()` gives JSON-able data that loads to an equal
configuration, so a description crosses a process border as plain data. Every error names the key, the value, what is
allowed and, for a file, the line; all of a configuration's problems are reported at once.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from headrace.errors import ConfigError
from headrace.output import Output
from headrace.pipeline import document
from headrace.pipeline.document import Document, Where
from headrace.pipeline.transforms import Transform, dump, output_size, parse
from headrace.protocol import Fingerprints
from headrace.slots import SlotLayout

#: The keys of `dataset:` that say where its samples come from; a dataset has exactly one of them.
SOURCES: tuple[str, ...] = ("folder",)

#: Longest path of a Unix socket; the daemon binds PATH and, for ZeroMQ, PATH.zmq.
_SOCKET_PATH = 107
_ZMQ_SUFFIX = ".zmq"

_UNITS = {"": 1, "b": 1} | {
    unit: base**power
    for power, letter in enumerate("kmgt", start=1)
    for unit, base in ((f"{letter}b", 1000), (f"{letter}ib", 1024))
}

M = TypeVar("M", bound="_Model")


# -- values -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """What `memory:` says: so many bytes for all streams together, or so many slots for each stream."""

    bytes: int | None = None
    slots: int | None = None

    @classmethod
    def parse(cls, value: object) -> Memory:
        """
        Raises:
            ValueError: neither a size nor `N slots`.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d{1,9})\s*slots?\s*", value)):
            if slots := int(match[1]):
                return cls(slots=slots)
        try:
            return cls(bytes=parse_size(value))
        except ValueError:
            raise ValueError('must be bytes (2147483648), a size ("2GiB", "512MB") or "N slots", above zero') from None

    def plain(self) -> int | str:
        """The shortest form that parses to the same."""
        return f"{self.slots} slots" if self.slots is not None else int(self.bytes or 0)


def parse_size(value: object) -> int:
    """Bytes of `268435456`, `"256MiB"`, `"1.5 GB"`: kB, MB, GB, TB are powers of 1000, KiB … TiB of 1024.

    Raises:
        ValueError: anything else, zero, or more than 2**63 - 1.
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,9})?)\s*([A-Za-z]*)\s*", value)
        if match and match[2].lower() in _UNITS:
            value = int(float(match[1]) * _UNITS[match[2].lower()]) if "." in match[1] else int(match[1])
            value *= 1 if "." in match[1] else _UNITS[match[2].lower()]
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 63:
        return value
    raise ValueError('must be bytes (268435456) or a size such as "256MiB" or "1GB", above zero')


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _whole(low: int, high: int | None = None) -> BeforeValidator:
    allowed = f"from {low} to {high}" if high is not None else f"of at least {low}"

    def check(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            raise ValueError(f"must be a whole number {allowed}")
        return value

    return BeforeValidator(check)


def _share(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError("must be a number from 0 to 1")
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be a name (a string; put it in quotes)")
    return value


def _stream_name(value: object) -> str:
    name = _text(value)
    if any(ord(c) < 32 or 127 <= ord(c) < 160 or 0xD800 <= ord(c) < 0xE000 for c in name):
        raise ValueError("a stream's name must not hold control characters or undecodable bytes")
    return name


def _folder(value: object, info: ValidationInfo) -> Path:
    """A path, made absolute: relative to the YAML file's folder, or to the working directory."""
    if not isinstance(value, str | bytes | os.PathLike) or not os.fspath(value):
        raise ValueError("must be the path of a folder")
    text = os.fsdecode(value)
    if "\0" in text:
        raise ValueError("must be the path of a folder, without NUL bytes")
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(f"must be the path of a folder: {error}") from error
    base = (info.context or {}).get("base")
    return (base / path if base is not None else path).absolute()


def _names(what: str) -> BeforeValidator:
    def check(value: object) -> list[str]:
        if not isinstance(value, list | tuple) or not value or not all(isinstance(v, str) and v for v in value):
            raise ValueError(f"must be a list of {what} (strings; put numbers in quotes)")
        if repeated := sorted({v for v in value if value.count(v) > 1}):
            raise ValueError(f"must name each of the {what} once; {', '.join(map(_show, repeated))} is repeated")
        return list(value)

    return BeforeValidator(check)


def _class_names(names: list[str]) -> list[str]:
    for name in names:
        if "/" in name or "\0" in name or name in (".", ".."):
            raise ValueError(f"must be names of folders in the data set's root; {_show(name)} is none")
    return names


def _extensions(value: object) -> object:
    if isinstance(value, list | tuple):
        value = [v.removeprefix(".").lower() if isinstance(v, str) else v for v in value]
        for v in value:
            if isinstance(v, str) and ("." in v or "/" in v):
                raise ValueError(f"must be endings such as jpg or .jpg, what follows the last dot; {_show(v)} is none")
    return value


def _listen(value: object) -> list[str]:
    addresses = [value] if isinstance(value, str) else value
    if not isinstance(addresses, list | tuple) or not all(isinstance(a, str) for a in addresses):
        raise ValueError("must be an address ipc://PATH, or a list of them")
    for address in addresses:
        _check_address(address)
    if len(set(addresses)) != len(addresses):
        raise ValueError("must name each address once")
    return list(addresses)


def _check_address(address: str) -> None:
    scheme, sign, path = address.partition("://")
    if sign and scheme == "tcp":
        raise ValueError(
            f"{address}: tcp is not available yet: without keys anybody who reaches the port could read the data;"
            " must be ipc://PATH"
        )
    if not sign or scheme != "ipc" or not path.startswith("/") or path.endswith("/") or not path.isprintable():
        raise ValueError(f"{address}: must be ipc://PATH with an absolute path, such as ipc:///run/user/1000/hr.sock")
    length = len(os.fsencode(path + _ZMQ_SUFFIX))
    if length > _SOCKET_PATH:
        raise ValueError(
            f"{address}: a path of {length} bytes with {_ZMQ_SUFFIX} behind it, but a Unix socket's path holds at most"
            f" {_SOCKET_PATH}: must be shorter, for instance in $XDG_RUNTIME_DIR"
        )


def _processes(value: object) -> int | str:
    if value == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1024:
        raise ValueError('must be "auto" or a whole number from 1 to 1024')
    return value


def _has_size(transforms: tuple[Transform, ...]) -> tuple[Transform, ...]:
    output_size(transforms)
    return transforms


Flag = Annotated[bool, BeforeValidator(_flag)]
Size = Annotated[int, BeforeValidator(parse_size)]
Folder = Annotated[Path, PlainValidator(_folder), PlainSerializer(str)]
ClassNames = Annotated[list[str], _names("class names"), AfterValidator(_class_names)]
Extensions = Annotated[list[str], _names("endings"), BeforeValidator(_extensions)]
AnyTransform = Annotated[Transform, BeforeValidator(parse), PlainSerializer(dump)]


# -- models -------------------------------------------------------------------------------------------------


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
            raise ConfigError(_explain(type(self), error)) from None

    # Marks this constructor as equivalent to pydantic's own; without it pydantic would call it for nested mappings too,
    # and an inner problem would surface without its key path.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def plain(self) -> dict[str, Any]:
        """JSON-able data with every default filled in."""
        return self.model_dump(mode="json")


class Decode(_Model):
    """Limits on a sample; over one of them it is a reject. Part of the *pixels* fingerprint.

    Attributes:
        max_pixels: height times width of a picture.
        max_file_bytes: of a file, which is not read when it is larger.
    """

    max_pixels: Annotated[int, _whole(1)] = 178956970
    max_file_bytes: Size = 256 << 20


class Dataset(_Model):
    """Where samples come from. Exactly one of `SOURCES`, and what to list of it.

    Attributes:
        folder: the root; each folder in it is a class.
        allow_empty: whether a class may be without samples (it keeps its number).
        classes: only these classes, numbered in this order; None: all, numbered in the order of their names.
        limit: only the first samples of the listing.
        extensions: endings that make a file a sample, instead of the built-in list; lower case, without the dot.
    """

    folder: Folder
    allow_empty: Flag = False
    classes: ClassNames | None = None
    limit: Annotated[int, _whole(1)] | None = None
    extensions: Extensions | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_source(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and sum(source in data for source in SOURCES) != 1:
            raise ValueError(f"a dataset needs exactly one source: {', '.join(SOURCES)}")
        return data

    @property
    def source(self) -> str:
        """Which of `SOURCES` this dataset has."""
        return next(source for source in SOURCES if getattr(self, source) is not None)


class Stream(_Model):
    """A dataset, an order and a chain of transforms: everything that decides the pictures of an epoch.

    Attributes:
        dataset: where samples come from.
        shuffle: whether each epoch has an order of its own.
        seed: of the order and of every random draw, 0 … 2**64 - 1.
        chunk: positions that are computed, cached and sent together. At most 4096: a chunk is one worker's one job,
            and one slot of the ring.
        decode: limits.
        transforms: applied in this order; they end in one fixed size.
        output: how the Loader hands out batches, unless told otherwise.
        on_bad_sample: what the Loader does with a picture that cannot be decoded, unless told otherwise.
        max_bad: share of bad samples that ends an epoch, likewise.
    """

    dataset: Dataset
    shuffle: Flag = False
    seed: Annotated[int, _whole(0, (1 << 64) - 1)] = 0
    chunk: Annotated[int, _whole(1, 4096)] = 32
    decode: Decode = Decode()
    transforms: Annotated[tuple[AnyTransform, ...], AfterValidator(_has_size)] = Field((), validate_default=True)
    output: Output = Output()
    on_bad_sample: Literal["skip", "replace", "mask", "raise"] = "skip"
    max_bad: Annotated[float, BeforeValidator(_share)] = 0.01

    @property
    def layout(self) -> SlotLayout:
        """How a chunk lies in memory."""
        height, width = output_size(self.transforms)
        return SlotLayout(self.chunk, height, width)

    def fingerprints(self, data: str) -> Fingerprints:
        """The three digests (SHA-256, hex): `data` as given, *order* of (data, seed, shuffle), *pixels* of (order,
        decode options, transforms with their defaults filled in, chunk).

        Args:
            data: the listing's fingerprint.
        """
        order = _digest({"data": data, "seed": self.seed, "shuffle": self.shuffle})
        transforms = [dump(t) for t in self.transforms]
        pixels = {"order": order, "decode": self.decode.plain(), "transforms": transforms, "chunk": self.chunk}
        return Fingerprints(data, order, _digest(pixels))


class Socket(_Model):
    """Who besides the user may connect: members of this group."""

    group: Annotated[str, BeforeValidator(_text)] | None = None


class Workers(_Model):
    """Who computes.

    Attributes:
        backend: `auto` takes the best that this machine has.
        processes: `auto` is one for each CPU that the daemon may use.
    """

    backend: Literal["auto", "pillow"] = "auto"
    processes: Annotated[int | str, PlainValidator(_processes)] = "auto"


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
        workers: who computes.
        streams: by name.
    """

    listen: Annotated[list[str], BeforeValidator(_listen)] = []
    memory: Annotated[Memory, PlainValidator(Memory.parse), PlainSerializer(Memory.plain)] | None = None
    cache_dir: Folder | None = None
    socket: Socket = Socket()
    workers: Workers = Workers()
    streams: Annotated[dict[Annotated[str, BeforeValidator(_stream_name)], Stream], BeforeValidator(_streams)]

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
        return _checked(cls, None, document.read(source))

    @property
    def cache_folder(self) -> Path:
        """Where indexes are kept: `cache_dir`, else `$XDG_CACHE_HOME/headrace`, else `~/.cache/headrace`."""
        if self.cache_dir is not None:
            return self.cache_dir
        home = os.environ.get("XDG_CACHE_HOME", "")
        # The XDG specification: a relative path there is invalid and to be ignored.
        base = Path(home) if os.path.isabs(home) else Path(os.path.expanduser("~")) / ".cache"
        return base / "headrace"

    def key(self) -> str:
        """Digest of the configuration with its defaults filled in, `listen` left out: one private daemon per key."""
        return _digest(self.plain() | {"listen": None, "cache_dir": str(self.cache_folder)})

    def stream(self, name: str | None = None) -> tuple[str, Stream]:
        """The stream of this name; of the only one, if no name is given.

        Raises:
            ConfigError: no such stream, or no name where there are several.
        """
        if name is None and len(self.streams) == 1:
            return next(iter(self.streams.items()))
        have = ", ".join(map(_show, self.streams))
        if name is None:
            raise ConfigError(f"stream: the configuration has several, say which: {have}")
        if name not in self.streams:
            raise ConfigError(f"stream: there is no {_show(name)}{_did_you_mean(name, self.streams)}; there is {have}")
        return name, self.streams[name]


def _digest(value: Any) -> str:
    """SHA-256 over canonical JSON: sorted keys, no spaces, ASCII."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")).hexdigest()


# -- errors -------------------------------------------------------------------------------------------------


def _checked(model: type[M], data: Any, read: Document | None = None) -> M:
    context = None
    if read is not None:
        data = read.data
        context = {"base": Path(read.name).absolute().parent}
    try:
        return model.model_validate(data, context=context)
    except ValidationError as error:
        raise ConfigError(_explain(model, error, read)) from None


def _explain(model: type[BaseModel], error: ValidationError, read: Document | None = None) -> str:
    """A line for each problem, in the order of the file."""
    problems = []
    for detail in error.errors(include_url=False):
        where = tuple(part for part in detail["loc"] if part != "[key]")
        place = f"{read.place(where)}: " if read is not None else ""
        line = read.lines.get(where, 0) if read is not None else 0
        problems.append((line, f"{place}{_path(where)}{_complaint(model, where, detail)}"))
    return "\n".join(text for _, text in sorted(problems, key=lambda p: p[0]))


def _path(where: Where) -> str:
    text = ""
    for part in where:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += "." + (part if _PLAIN_KEY.fullmatch(part) else json.dumps(part))
    return f"{text.removeprefix('.')}: " if text else ""


def _complaint(model: type[BaseModel], where: Where, detail: Any) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        allowed = _keys(model, where[:-1])
        return f"there is no such key{_did_you_mean(str(where[-1]), allowed)}; allowed here: {', '.join(allowed)}"
    if kind in ("missing", "missing_argument"):
        return "this key is missing"
    if kind == "value_error":
        text = str(context["error"])
        return f"{_show(value)}: {text}" if not isinstance(value, Mapping | tuple) else text
    expected = _EXPECTED.get(kind) or f"must be {context['expected']}" if "expected" in context else None
    return f"{_show(value)}: {expected or _EXPECTED.get(kind) or detail['msg']}"


_PLAIN_KEY = re.compile(r"[\w-]+")
_A_MAPPING = "must be a mapping of keys"
_A_LIST = "must be a list"
_EXPECTED = {
    "model_type": _A_MAPPING,
    "model_attributes_type": _A_MAPPING,
    "dict_type": _A_MAPPING,
    "dataclass_type": _A_MAPPING,
    "invalid_key": "a key must be a name; put it in quotes",
    "list_type": _A_LIST,
    "tuple_type": _A_LIST,
    "string_type": "must be a string",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "too_short": "has too few items",
    "too_long": "has too many items",
}


def _keys(model: Any, where: Where) -> list[str]:
    """The keys that are allowed below `where`."""
    for part in where:
        if isinstance(model, type) and issubclass(model, BaseModel):
            model = model.model_fields[str(part)].annotation if str(part) in model.model_fields else None
        else:
            model = get_args(model)[-1] if get_origin(model) in (dict, tuple) else None
    if isinstance(model, type) and issubclass(model, BaseModel):
        return sorted(model.model_fields)
    return sorted(f.name for f in fields(model)) if isinstance(model, type) and is_dataclass(model) else []


def _did_you_mean(name: str, allowed: Any) -> str:
    close = difflib.get_close_matches(name, list(allowed), n=1)
    return f", did you mean {close[0]}?" if close else ""


def _show(value: object) -> str:
    """A value as it may stand in a message: like YAML, on one line, not too long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 80 else text[:77] + "..."
