"""A YAML file as plain data, together with the line of every key: what makes a good error message possible."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from headrace.errors import ConfigError

#: Where a value stands: the keys and list indices that lead to it.
Where = tuple[Any, ...]

_MAX_BYTES = 1 << 20
_MAX_NODES = 100_000  # aliases of aliases can blow a small file up without end
_MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which reads `1e-3` as a number, as every other YAML reader does."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


@dataclass(frozen=True)
class Document:
    """The content of a YAML file.

    Attributes:
        name: the file, as it was given.
        data: plain mappings, lists and scalars.
        lines: the line, counted from 1, of every key and list item.
    """

    name: str
    data: Any
    lines: dict[Where, int] = field(repr=False)

    def line(self, where: Where) -> int:
        """Of a key, or of the nearest one above it that stands in the file; 0: none does."""
        return next((self.lines[where[:end]] for end in range(len(where), 0, -1) if where[:end] in self.lines), 0)

    def place(self, where: Where) -> str:
        """`FILE, line N` of the same."""
        line = self.line(where)
        return f"{self.name}, line {line}" if line else self.name


def read(path: str | os.PathLike[str]) -> Document:
    """Read one YAML document with a mapping at its top.

    Raises:
        ConfigError: the file cannot be read, is empty, is not YAML, repeats a key, or is no mapping. Every repeated
            key is named, a line each.
    """
    name = os.fsencode(path).decode("utf-8", "backslashreplace")  # messages are to be encodable
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}: cannot read the configuration: {_reason(error)}") from error
    if len(text) > _MAX_BYTES:
        raise ConfigError(f"{name}: the configuration is larger than {_MAX_BYTES} bytes; is this the right file?")
    return parse(name, text)


def parse(name: str, text: bytes | str) -> Document:
    """The same for a text that was read already; `name` stands in the errors."""
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                raise ConfigError(f"{name}: the configuration is empty; it needs at least `streams:`")
            builder = _Builder(name, loader)
            data = builder.build(node, ())
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_syntax(name, error)) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not a YAML text: {' '.join(str(error).split())}") from error
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply") from None
    if builder.problems:
        raise ConfigError("\n".join(builder.problems))
    if not isinstance(data, dict):
        raise ConfigError(f"{name}: the top must be a mapping of keys (streams, memory, ...), not {_kind(data)}")
    return Document(name, data, builder.lines)


class _Builder:
    """Turns nodes into plain data, noting lines and repeated keys on the way."""

    def __init__(self, name: str, loader: _Loader) -> None:
        self.lines: dict[Where, int] = {}
        self.problems: list[str] = []
        self._name = name
        self._loader = loader
        self._open: set[int] = set()
        self._nodes = 0

    def build(self, node: yaml.Node, where: Where) -> Any:
        self._nodes += 1
        if self._nodes > _MAX_NODES:
            raise ConfigError(f"{self._name}: more than {_MAX_NODES} values once aliases are followed")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if id(node) in self._open:
            raise ConfigError(f"{self._name}, line {_line(node)}: an alias that contains itself")
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, where)
            return self._sequence(node, where)
        finally:
            self._open.discard(id(node))

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        try:
            return self._loader.construct_object(node)
        except ValueError as error:  # an impossible date, a number of thousands of digits
            raise ConfigError(f"{self._name}, line {_line(node)}: {node.value[:40]!r}: {error}") from error

    def _sequence(self, node: yaml.Node, where: Where) -> list[Any]:
        if node.tag != "tag:yaml.org,2002:seq":
            raise ConfigError(f"{self._name}, line {_line(node)}: the tag {node.tag} is not allowed")
        items = []
        for i, item in enumerate(node.value):
            self.lines[(*where, i)] = _line(item)
            items.append(self.build(item, (*where, i)))
        return items

    def _mapping(self, node: yaml.MappingNode, where: Where) -> dict[Any, Any]:
        if node.tag != "tag:yaml.org,2002:map":
            raise ConfigError(f"{self._name}, line {_line(node)}: the tag {node.tag} is not allowed")
        data: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                continue
            key = self._key(key_node)
            if key in data:
                first = self.lines[(*where, key)]
                self.problems.append(f"{self._name}, line {_line(key_node)}: {key}: repeated, first on line {first}")
                continue
            self.lines.setdefault((*where, key), _line(key_node))
            data[key] = self.build(value_node, (*where, key))
        for merged in self._merged(node):
            for key, value in self.build(merged, where).items():
                data.setdefault(key, value)
        return data

    def _key(self, node: yaml.Node) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            raise ConfigError(f"{self._name}, line {_line(node)}: a key must be a plain name")
        return self._scalar(node)

    def _merged(self, node: yaml.MappingNode) -> Iterator[yaml.MappingNode]:
        for key_node, value_node in node.value:
            if key_node.tag != _MERGE:
                continue
            for one in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                if not isinstance(one, yaml.MappingNode):
                    raise ConfigError(f"{self._name}, line {_line(key_node)}: `<<` takes mappings only")
                yield one


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _syntax(name: str, error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    place = f"{name}, line {mark.line + 1}, column {mark.column + 1}" if mark else name
    what = " ".join(str(part) for part in (error.context, error.problem) if part)
    if "'\\t'" in what:
        what += " (a tab: YAML is indented with spaces)"
    return f"{place}: not a YAML text: {what}"


def _kind(data: Any) -> str:
    return "a list" if isinstance(data, list) else f"the single value {data!r}"[:100]


def _reason(error: OSError | ValueError) -> str:
    if not isinstance(error, OSError):
        return str(error)
    return (error.strerror or str(error)).lower()
