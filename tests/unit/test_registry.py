"""What is registered is tested: each entry of a registry has its parity, purity and bad-input tests.

They are found by their names, `test_<entry>_<kind>…`, anywhere under `tests/`; add them with the entry.

parity     the entry does what the thing of that name elsewhere does (torchvision, Pillow, `ImageFolder`)
purity     the same arguments give the same result, whatever came before or beside it
bad_input  what it cannot take is refused, by name and with the reason
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from headrace.pipeline.backend import BACKENDS
from headrace.pipeline.dataset import SOURCES
from headrace.pipeline.transforms import TRANSFORMS

KINDS = ("parity", "purity", "bad_input")
ENTRIES = [*TRANSFORMS, *BACKENDS, *SOURCES]


@pytest.fixture(scope="module")
def tests() -> list[str]:
    trees = (ast.parse(path.read_text()) for path in Path(__file__).parents[1].rglob("test_*.py"))
    return [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_has_its_tests(entry: str, kind: str, tests: list[str]) -> None:
    prefix = f"test_{entry.replace('-', '_')}_{kind}"
    assert any(name == prefix or name.startswith(f"{prefix}_") for name in tests), f"there is no {prefix}…"


def test_names_of_entries_are_unique_over_all_registries() -> None:
    assert len(set(ENTRIES)) == len(ENTRIES)


def test_a_transform_is_registered_under_its_own_name() -> None:
    assert all(name == transform.name for name, transform in TRANSFORMS.items())
