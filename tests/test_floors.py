"""The house has floors: nothing imports upwards, and pure cores touch nothing outside."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from tests.lib.source_tree import ROOT, SRC, modules, name, nodes

#: First part of the module's name within pigou -> floor.
FLOORS = {
    "request": 1, "config": 1, "games": 1, "models": 1, "compiled": 1,
    "background": 1, "registry": 1, "logs": 1,
    "metric_rows": 1, "small_file": 1, "stop_signals": 1,
    "objectives": 1, "placement": 1,
    "kv": 2, "wire": 2, "text": 2, "tracing": 2,
    "engine": 3, "control": 3, "lifecycle": 3, "diagnosis": 3, "cost": 3,
    "windows": 3, "performance": 3,
    "runtime": 4, "sim": 4, "worker": 4, "gateway": 4,
    "fleet": 5, "workload": 5, "report": 5,
    "capacity": 5, "integrations": 5,
    "cli": 6, "__main__": 7,
}  # fmt: skip
PURE = {"games", "kv", "engine", "control", "lifecycle", "cost", "diagnosis"}
PURE |= {"windows", "performance", "placement"}
IMPURE_MODULES = {"asyncio", "socket", "socketserver", "time", "zmq", "aiohttp", "threading"}
#: An import from a package of this repository: module, names.
IMPORT = re.compile(
    r"^ *from ((?:pigou|pigou_lab|tests|benchmarks|tools)(?:\.\w+)*) import (\([^)]*\)|.*)$", re.M
)
#: Neighbours on a floor that may know one another, one way.
NEIGHBOURS = {
    ("worker", "runtime"),
    ("worker", "sim"),
    ("fleet", "workload"),
    ("capacity", "workload"),
    ("integrations", "fleet"),
}


def room(path: Path) -> str:
    return path.relative_to(SRC).with_suffix("").parts[0]


def imports(path: Path) -> Iterator[str]:
    """Absolute names of everything that the module imports, at any depth."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_nothing_imports_upwards() -> None:
    wrong = []
    for path in modules():
        here = room(path)
        if here == "__init__":
            continue
        assert here in FLOORS, f"{here} stands on no floor: add it to FLOORS"
        for imported in imports(path):
            parts = imported.split(".")
            if parts[0] != "pigou" or len(parts) == 1 or parts[1].startswith("__"):
                continue
            there = parts[1]
            below = FLOORS[there] < FLOORS[here] or there == here
            level = FLOORS[there] == FLOORS[here]
            if not (below or (level and (FLOORS[here] < 4 or (here, there) in NEIGHBOURS))):
                wrong.append(f"{name(path)} imports {imported}")
    assert not wrong


def test_the_product_runs_without_the_lab() -> None:
    assert not [
        f"{name(path)} imports {imported}"
        for path in modules()
        for imported in imports(path)
        if imported.split(".")[0] == "pigou_lab"
    ]


#: Adapters whose host hands them tensors.
TORCH_HOSTS = {"integrations/kvpress.py"}


def test_only_the_runtime_imports_torch() -> None:
    assert not [
        f"{name(path)} imports {imported}"
        for path in modules()
        if room(path) != "runtime" and name(path) not in TORCH_HOSTS
        for imported in imports(path)
        if imported.split(".")[0] == "torch"
    ]


def test_pure_cores_have_no_clock_and_no_io() -> None:
    assert not [
        f"{name(path)} imports {imported}"
        for path in modules()
        if room(path) in PURE
        for imported in imports(path)
        if imported.split(".")[0] in IMPURE_MODULES
    ]


def module_file(module: str) -> Path | None:
    """Return the file of a module of this repository; None where there is no such module."""
    for root in (ROOT / "src", ROOT / "lab" / "src", ROOT):
        path = root.joinpath(*module.split("."))
        if path.with_suffix(".py").exists():
            return path.with_suffix(".py")
        if path.is_dir():
            return path / "__init__.py"
    return None


@functools.cache
def top_names(path: Path) -> set[str]:
    """Return the names that a file defines, assigns or imports, at any depth."""
    names: set[str] = set()
    for node in nodes(path) if path.exists() else ():
        match node:
            case ast.FunctionDef(name=text) | ast.AsyncFunctionDef(name=text):
                names.add(text)
            case ast.ClassDef(name=text) | ast.Name(id=text, ctx=ast.Store()):
                names.add(text)
            case ast.alias(name=text, asname=other):
                names.add(other or text.partition(".")[0])
    return names


def test_imports_name_what_exists() -> None:
    """Those of tests and benchmarks too, which no run of a few files would import."""
    wrong = []
    for folder in ("src", "lab", "tests", "benchmarks", "tools"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for module, names in IMPORT.findall(path.read_text()):
                file = module_file(module)
                known = top_names(file) if file else set()
                wrong += [
                    f"{path.relative_to(ROOT)}: {module}.{name}"
                    for name in re.findall(r"(\w+)(?: as \w+)?", re.sub("#.*", "", names))
                    if name not in known
                    and "__getattr__" not in known
                    and module_file(f"{module}.{name}") is None
                ]
    assert not wrong
