"""Values of a configuration: what may stand behind a key, and the sentence that says so when something else does.

Each check raises `ValueError` with a text that begins with "must", so that the key and the value can stand before it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer, PlainValidator, ValidationInfo

from headrace.connect import LONGEST_PATH
from headrace.pipeline.problems import show

#: What `workers.backend` may say; "fake", which is for tests, is accepted beside them.
BACKENDS = ("auto", "dali-gpu", "dali-cpu", "pillow")

#: The daemon binds PATH and, for ZeroMQ, PATH.zmq.
_ZMQ_SUFFIX = ".zmq"

_UNITS = {"": 1, "b": 1} | {
    unit: base**power
    for power, letter in enumerate("kmgt", start=1)
    for unit, base in ((f"{letter}b", 1000), (f"{letter}ib", 1024))
}


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
            value = int(Fraction(match[1]) * _UNITS[match[2].lower()])
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 63:
        return value
    raise ValueError('must be bytes (268435456) or a size such as "256MiB" or "1GB", above zero')


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def whole(low: int, high: int | None = None) -> BeforeValidator:
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
        raise ValueError("must be a name without control characters and undecodable bytes")
    return name


def _encodable(text: str) -> bool:
    """Whether it may be the name of a file: bytes that are no UTF-8 are good, as Python writes them."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def _path(what: str) -> PlainValidator:
    """A path, made absolute: relative to the YAML file's folder, or to the working directory."""

    def check(value: object, info: ValidationInfo) -> Path:
        if not isinstance(value, str | bytes | os.PathLike) or not os.fspath(value):
            raise ValueError(f"must be the path of {what}")
        text = os.fsdecode(value)
        if "\0" in text or not _encodable(text):
            raise ValueError(f"must be the path of {what}, without NUL bytes and lone surrogates")
        try:
            path = Path(text).expanduser()
        except RuntimeError as error:
            raise ValueError(f"must be the path of {what}: {error}") from error
        base = (info.context or {}).get("base")
        return (base / path if base is not None else path).absolute()

    return PlainValidator(check)


def _patterns(value: object, info: ValidationInfo) -> list[str]:
    """Paths with braces in them, made absolute likewise."""
    items = [value] if isinstance(value, str | os.PathLike) else value
    if not isinstance(items, list | tuple) or not items or not all(isinstance(v, str | os.PathLike) for v in items):
        raise ValueError("must be the path of a tar file, such as train-{000000..000099}.tar, or a list of them")
    check = _path("a tar file").func
    return [str(check(item, info)) for item in items]  # type: ignore[call-arg]


def _key_files(value: object, info: ValidationInfo) -> tuple[Path, ...]:
    """Paths of files or folders, made absolute likewise."""
    items = [value] if isinstance(value, str | os.PathLike) else value
    if not isinstance(items, list | tuple) or not all(isinstance(v, str | os.PathLike) for v in items):
        raise ValueError("must be a list of files with public keys, NAME.key, or of folders with such files")
    check = _path("a file with a public key").func
    return tuple(check(item, info) for item in items)  # type: ignore[call-arg]


def _key_files_plain(value: tuple[Path, ...]) -> list[str]:
    return list(map(str, value))


def _names(what: str) -> BeforeValidator:
    def check(value: object) -> list[str]:
        if not isinstance(value, list | tuple) or not value or not all(isinstance(v, str) and v for v in value):
            raise ValueError(f"must be a list of {what} (strings; put numbers in quotes)")
        if broken := [v for v in value if not _encodable(v)]:
            raise ValueError(f"must be {what}, as text; {show(broken[0])} is none")
        if repeated := sorted({v for v in value if value.count(v) > 1}):
            raise ValueError(f"must name each of the {what} once; {', '.join(map(show, repeated))} is repeated")
        return list(value)

    return BeforeValidator(check)


def _label_columns(value: object) -> str | list[str] | None:
    if value is None or (isinstance(value, str) and value):
        return value
    if not isinstance(value, list | tuple) or not value or not all(isinstance(v, str) and v for v in value):
        raise ValueError("must be the name of a column, or a list of names (strings; put numbers in quotes)")
    if len(set(value)) < len(value):
        raise ValueError("must name each column once")
    return list(value)


def _extensions(value: object) -> object:
    if isinstance(value, list | tuple):
        value = [v.removeprefix(".").lower() if isinstance(v, str) else v for v in value]
        for v in value:
            if isinstance(v, str) and "/" in v:
                raise ValueError(f"must be endings such as jpg or .jpg; {show(v)} is none")
    return value


def _listen(value: object) -> list[str]:
    addresses = [value] if isinstance(value, str) else value
    if not isinstance(addresses, list | tuple) or not all(isinstance(a, str) for a in addresses):
        raise ValueError("must be an address, ipc://PATH or tcp://HOST:PORT, or a list of them")
    for address in addresses:
        _check_address(address)
    if len(set(addresses)) != len(addresses):
        raise ValueError("must name each address once")
    return list(addresses)


def _check_address(address: str) -> None:
    scheme, sign, path = address.partition("://")
    if sign and scheme == "tcp":
        _check_place(address, path, "tcp://")
        return
    if not sign or scheme != "ipc" or not path.startswith("/") or path.endswith("/") or not path.isprintable():
        raise ValueError(
            f"{show(address)} is not an address: it must be ipc://PATH with an absolute path, such as "
            "ipc:///run/user/1000/hr.sock, or tcp://HOST:PORT"
        )
    length = len(os.fsencode(path + _ZMQ_SUFFIX))
    if length > LONGEST_PATH:
        raise ValueError(
            f"{show(address)}: the path is too long for a Unix socket: {length} bytes with {_ZMQ_SUFFIX} behind it, at"
            f" most {LONGEST_PATH} are possible; take a shorter one, for instance in $XDG_RUNTIME_DIR"
        )


def _check_place(address: str, place: str, before: str = "") -> None:
    host, _, port = place.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if ":" in host and bare is host:
        raise ValueError(f"{show(address)}: an IPv6 address stands in brackets, as in {before}[::1]:5555")
    if not bare or any(c.isspace() or not c.isprintable() or c in "/[]" for c in bare):
        raise ValueError(
            f"{show(address)} is not an address: it must be {before}HOST:PORT, HOST a name or an address of this "
            f"machine, such as {before}127.0.0.1:5555, or * for all"
        )
    if port != "*" and not (port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise ValueError(f"{show(address)}: the port must be a number from 0 to 65535; 0 or * takes a free one")


def _place(value: object) -> str:
    if not isinstance(value, str) or "/" in value:
        raise ValueError('must be HOST:PORT, such as "127.0.0.1:9400"')
    _check_place(value, value)
    return value


def _backend(value: object) -> str:
    if not isinstance(value, str) or value not in (*BACKENDS, "fake"):
        raise ValueError(f"must be {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}")
    return value


def _count(most: int) -> PlainValidator:
    def check(value: object) -> int | str:
        if value == "auto":
            return "auto"
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ValueError(f'must be "auto" or a whole number from 1 to {most}')
        return value

    return PlainValidator(check)


def _devices(value: object) -> tuple[int, ...] | str:
    if value == "auto":
        return "auto"
    if (
        not isinstance(value, list | tuple)
        or not value
        or not all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 1024 for v in value)
        or len(set(value)) < len(value)
    ):
        raise ValueError('must be "auto" or a list of numbers of GPUs, each of them once, such as [0, 1]')
    return tuple(sorted(value))


def _devices_plain(value: tuple[int, ...] | str) -> list[int] | str:
    return value if isinstance(value, str) else list(value)


Flag = Annotated[bool, BeforeValidator(_flag)]
Size = Annotated[int, BeforeValidator(parse_size)]
Folder = Annotated[Path, _path("a folder"), PlainSerializer(str)]
File = Annotated[Path, _path("a file"), PlainSerializer(str)]
KeyFiles = Annotated[tuple[Path, ...], PlainValidator(_key_files), PlainSerializer(_key_files_plain)]
Patterns = Annotated[list[str], PlainValidator(_patterns)]
LabelColumns = Annotated[str | list[str] | None, PlainValidator(_label_columns)]
ClassNames = Annotated[list[str], _names("class names")]
Extensions = Annotated[list[str], _names("endings"), BeforeValidator(_extensions)]
Share = Annotated[float, BeforeValidator(_share)]
Name = Annotated[str, BeforeValidator(_text)]
StreamName = Annotated[str, BeforeValidator(_stream_name)]
Addresses = Annotated[list[str], BeforeValidator(_listen)]
Place = Annotated[str, BeforeValidator(_place)]
MemoryValue = Annotated[Memory, PlainValidator(Memory.parse), PlainSerializer(Memory.plain)]
Backend = Annotated[str, BeforeValidator(_backend)]
Count = Annotated[int | str, _count(1024)]
InFlight = Annotated[int | str, _count(64)]
Devices = Annotated[tuple[int, ...] | str, PlainValidator(_devices), PlainSerializer(_devices_plain)]
