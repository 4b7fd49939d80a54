"""The map of what is tested where names tests that exist, and every row has one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROWS = [line.split("|")[1:3] for line in (HERE / "MAP.md").read_text().splitlines() if line.startswith("| ")]
ENTRIES = [row for row in ROWS if row[1].strip() != "tests"]


def names_of(file: str) -> set[str]:
    """All functions of a test file, those of classes included."""
    tree = ast.parse((HERE / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize(("row", "tests"), ENTRIES, ids=[row[0].strip() for row in ENTRIES])
def test_named_tests_exist(row: str, tests: str) -> None:
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", tests)
    assert named, row
    assert len(named) == tests.count("`") // 2, "a name that is no test"
    assert [f"{file}::{name}" for file, name in named if name not in names_of(file)] == []
