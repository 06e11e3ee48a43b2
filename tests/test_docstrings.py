"""Docstrings list what exists: renamed parameters and attributes are renamed there too."""

from __future__ import annotations

import ast
import functools
import importlib
import itertools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.lib.source_tree import ROOT, parsed

ROOMS = ("src", "benchmarks", "tools")

Definition = ast.FunctionDef | ast.AsyncFunctionDef


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield path.relative_to(ROOT), parsed(path)


def listed(node: Definition | ast.ClassDef, section: str) -> list[str]:
    """Return the names that a section of a docstring lists; `a, b: ...` lists two."""
    names: list[str] = []
    inside = False
    for line in (ast.get_docstring(node) or "").splitlines():
        if line == f"{section}:":
            inside = True
        elif line and not line.startswith(" "):
            inside = False
        elif inside and (entry := re.match(r" {4}([\w*][\w*, ]*):", line)):
            names += [name.strip(" *") for name in entry[1].split(",")]
    return names


def parameters(function: Definition) -> set[str]:
    args = function.args
    rest = [arg for arg in (args.vararg, args.kwarg) if arg]
    return {arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs, *rest)}


def attributes(cls: ast.ClassDef) -> set[str]:
    """Return the fields, methods, class variables, slots and attributes that a class names."""
    names: set[str] = set()
    for node in ast.walk(cls):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Constant(value=str(name)):
                names.add(name)
    return names


def bases(cls: ast.ClassDef) -> Iterator[str]:
    for base in cls.bases:
        while isinstance(base, ast.Subscript):
            base = base.value
        yield base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")


def test_a_docstring_lists_parameters_that_the_function_has() -> None:
    wrong = [
        f"{path}:{node.lineno} {node.name}: {name}"
        for path, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, Definition)
        for name in listed(node, "Args")
        if name not in parameters(node)
    ]
    assert wrong == []


def test_a_docstring_lists_attributes_that_the_class_has() -> None:
    classes = [
        (path, node)
        for path, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    own: dict[str, set[str]] = {}
    for _, cls in classes:
        own.setdefault(cls.name, set()).update(attributes(cls))
    wrong = [
        f"{path}:{cls.lineno} {cls.name}: {name}"
        for path, cls in classes
        for name in listed(cls, "Attributes")
        if name not in own[cls.name].union(*(own.get(base, set()) for base in bases(cls)))
    ]
    assert wrong == []


def example(node: ast.ClassDef) -> str:
    """Return the code of the `Example:` of a class's docstring; empty without one."""
    _, _, after = (ast.get_docstring(node) or "").partition("Example:\n")
    lines = itertools.takewhile(lambda line: not line or line.startswith(" "), after.split("\n"))
    return textwrap.dedent("\n".join(lines))


@functools.cache
def examples() -> dict[str, tuple[Path, str]]:
    """Return module and code of each class's example; read on first use, not by each collector."""
    return {
        node.name: (path, code)
        for path, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and (code := example(node))
    }


def test_classes_that_others_build_on_have_an_example() -> None:
    assert examples().keys() >= {
        "AdmissionController", "BlockPool", "ControlPlane", "Detokenizer", "EngineCore",
        "GatewayServer", "LatencyModel", "LoadGenerator", "PoAEstimator", "PrefixCache",
        "PrefixIndex", "RequestLifecycle", "Simulation", "Supervisor", "Suspicion", "Tenure",
        "Tier", "Tiers",
    }  # fmt: skip


def test_an_example_is_code() -> None:
    for name, (_, code) in examples().items():
        compile(code, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize(
    "name",
    ["AdmissionController", "BlockPool", "ControlPlane", "Detokenizer", "LatencyModel",
     "PoAEstimator", "PrefixIndex", "RequestLifecycle", "Suspicion", "Tenure"],
)  # fmt: skip
def test_an_example_that_needs_nothing_else_runs(name: str) -> None:
    path, code = examples()[name]
    module = ".".join(path.with_suffix("").parts[1:])
    names: dict[str, Any] = {"now": 0}
    for nouns in ("request", "config", "control.messages", "lifecycle.messages", module):
        full = nouns if nouns == module else f"pigou.{nouns}"
        names |= vars(importlib.import_module(full))
    exec(code, names)


def test_listed_names_are_read_from_their_section_alone() -> None:
    tree = ast.parse(
        'def f(a, b):\n    """One.\n\n    Args:\n        a, *b: two.\n            more: three.\n'
        '\n    Raises:\n        ValueError: four.\n    """\n'
    )
    (function,) = tree.body
    assert isinstance(function, ast.FunctionDef)
    assert listed(function, "Args") == ["a", "b"]
