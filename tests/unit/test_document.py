"""A YAML file becomes plain data and line numbers, or one readable sentence per problem."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.pipeline import document


def problem(text: bytes | str) -> str:
    with pytest.raises(ConfigError) as caught:
        document.parse("hr.yaml", text)
    return str(caught.value)


def test_every_key_and_item_has_its_line() -> None:
    read = document.parse("hr.yaml", "a:\n  b: 1\n  c:\n    - x\n    - {y: 2}\n")
    assert read.data == {"a": {"b": 1, "c": ["x", {"y": 2}]}}
    assert read.lines == {
        ("a",): 1,
        ("a", "b"): 2,
        ("a", "c"): 3,
        ("a", "c", 0): 4,
        ("a", "c", 1): 5,
        ("a", "c", 1, "y"): 5,
    }


def test_a_key_that_is_not_there_has_the_line_of_the_nearest_key_above() -> None:
    read = document.parse("hr.yaml", "a:\n  b: 1\n")
    assert read.place(("a", "b", "c", "d")) == "hr.yaml, line 2"
    assert read.place(("a", "z")) == "hr.yaml, line 1"
    assert read.place(("z",)) == "hr.yaml"


def test_all_repeated_keys_are_named_with_both_lines() -> None:
    assert problem("a: 1\nb: {c: 1}\na: 2\nd:\n  e: 1\n  e: 2\n").splitlines() == [
        "hr.yaml, line 3: a: repeated, first on line 1",
        "hr.yaml, line 6: e: repeated, first on line 5",
    ]


def test_a_merge_adds_keys_and_repeats_none() -> None:
    read = document.parse("hr.yaml", "a: &a {x: 1, y: 2}\nb: &b {<<: *a, y: 3}\nc:\n  <<: [*b, {z: 9}]\n")
    assert read.data == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": {"x": 1, "y": 3, "z": 9}}


@pytest.mark.parametrize("number", ["1e-3", "1E-3", "0.001", "1.0e-3"])
def test_a_number_in_any_usual_form_is_a_number(number: str) -> None:
    assert document.parse("hr.yaml", f"a: {number}").data == {"a": 0.001}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("- a\n", "must be a mapping of keys (streams, memory, ...), not a list"),
        ("streams\n", "not the single value 'streams'"),
        ("a: [1, 2\n", "line 2, column 1: not a YAML text"),
        ("a:\n\tb: 1\n", "line 2, column 1: not a YAML text"),
        ("a: 1\n---\nb: 2\n", "found another document"),
        ("a: *nowhere\n", "undefined alias 'nowhere'"),
        ("a: &a [*a]\n", "line 1: an alias that contains itself"),
        (
            "a: !!python/object/apply:os.system [id]\n",
            "the tag tag:yaml.org,2002:python/object/apply:os.system",
        ),
        ("a: !!python/name:os.system\n", "could not determine a constructor"),
        ("a: 2001-99-99\n", "line 1: '2001-99-99': month must be in 1..12"),
        ("? [a]\n: 1\n", "line 1: a key must be a plain name"),
        ("a: {<<: 3}\n", "`<<` takes mappings only"),
        ("a: \x07\n", "not a YAML text"),
        (b"a: \xff\xfe\n", "not a YAML text"),
        ("[" * 5000, "nested too deeply"),
    ],
)
def test_what_is_no_configuration_is_refused_in_one_sentence(text: bytes | str, says: str) -> None:
    message = problem(text)
    assert says in message and message.startswith("hr.yaml") and "\n" not in message


def test_aliases_of_aliases_cannot_blow_up() -> None:
    lines = ["a0: &a0 [1,1,1,1,1,1,1,1,1,1]"]
    lines += [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    assert "more than 100000 values" in problem("\n".join(lines))


@pytest.mark.parametrize(("name", "says"), [("absent.yaml", "no such file"), ("folder", "is a directory")])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=says) as caught:
        document.read(tmp_path / name)
    assert str(caught.value).startswith(str(tmp_path / name))


def test_an_endless_file_is_not_read_to_its_end() -> None:
    with pytest.raises(ConfigError, match="larger than 1048576 bytes"):
        document.read("/dev/zero")


def test_a_file_of_any_name_is_read_and_can_be_named(tmp_path: Path) -> None:
    file = tmp_path / "\udcff.yaml"
    file.write_text("a: [")
    with pytest.raises(ConfigError, match="not a YAML text") as caught:
        document.read(file)
    assert str(caught.value).encode().startswith(bytes(tmp_path) + rb"/\xff.yaml, line 1")
