"""What is wrong with a configuration, in sentences: key, value, what is allowed, and the line in the file."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

if TYPE_CHECKING:
    from headrace.pipeline.document import Document, Where


def explain(model: type[BaseModel], error: ValidationError, read: Document | None = None) -> str:
    """A line of text for each problem that pydantic found in `model`, in the order of the file."""
    problems = []
    for detail in error.errors(include_url=False):
        where = tuple(part for part in detail["loc"] if part != "[key]")
        text = f"{_path(where)}{_complaint(model, where, detail)}"
        problems.append((read.line(where), f"{read.place(where)}: {text}") if read else (0, text))
    return "\n".join(text for _, text in sorted(problems, key=lambda problem: problem[0]))


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
        return f"there is no such key{did_you_mean(str(where[-1]), allowed)}; allowed here: {', '.join(allowed)}"
    if kind in ("missing", "missing_argument"):
        return "this key is missing" if isinstance(where[-1], str) else "this item is missing"
    if kind == "value_error":
        # Texts that begin with "must" say what is allowed; others name the value themselves.
        text = str(context["error"]).removeprefix(f"{where[-1]}: " if where else "")
        return f"{show(value)}: {text}" if text.startswith("must") else text
    if kind == "literal_error":
        return f"{show(value)}: must be {context['expected']}"
    return f"{show(value)}: {_EXPECTED.get(kind, detail['msg'])}"


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


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """`, did you mean NAME?` where one of the allowed names is close, else nothing."""
    close = difflib.get_close_matches(name, list(allowed), n=1)
    return f", did you mean {close[0]}?" if close else ""


def show(value: object) -> str:
    """A value as it may stand in a message: like YAML, on one line, not too long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 80 else text[:77] + "..."
