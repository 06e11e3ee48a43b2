"""The project's modules, parsed once in a process for all tests that read them."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "pigou"
LAB = ROOT / "lab" / "src" / "pigou_lab"


def modules() -> list[Path]:
    """Return the files of the package, in order."""
    return sorted(SRC.rglob("*.py"))


def name(path: Path) -> str:
    """Return a file's path within the package, as an id of a test."""
    return str(path.relative_to(SRC))


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text())


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file's syntax tree; walking it costs as much as parsing."""
    return tuple(ast.walk(parsed(path)))
