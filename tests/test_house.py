"""Sizes and names of the house: files, classes and parameters, and where each concept is."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from tests.lib.source_tree import ROOT, modules, name, parsed

MAX_LINES = 700
MAX_PARAMETERS = 12
#: Concept of docs/internals/architecture.md -> words of which each is in its path.
CONCEPTS = {
    "prefix cache": "prefix_cache",
    "preemption": "preemption",
    "chunked prefill": "chunked_prefill",
    "block table": "block_table",
    "toll": "toll",
    "Price of Anarchy": "price_of_anarchy",
    "saturation regime": "saturation regime",
    "admission queue": "admission queue",
    "tenure": "tenure",
    "KV transfer lease": "kv_transfer lease",
    "stream migration": "migration",
    "KV event decoding": "kv_event_decoding",
    "conditional disaggregation": "conditional_disaggregation",
    "tier eviction policy": "tier_eviction policy",
    "token eviction predictor": "token_eviction predictor",
    "sampling": "sampling",
    "structured output": "structured_output",
    "virtual clock": "virtual_clock",
    "load generator": "load_generator",
    "journal replay": "journal_replay",
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def parameters(function: Function) -> int:
    """Return how many arguments a function takes beside `self` or `cls`."""
    args = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len([arg for arg in args if arg.arg not in ("self", "cls")])


def test_no_file_is_a_heap() -> None:
    lines = {name(path): len(path.read_text().splitlines()) for path in modules()}
    long = {path: count for path, count in lines.items() if count > MAX_LINES}
    assert not long, f"split by noun, at most {MAX_LINES} lines a file: {long}"


def test_every_class_has_a_name_of_its_own() -> None:
    owners: dict[str, list[str]] = defaultdict(list)
    for path in modules():
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef):
                owners[node.name].append(name(path))
    shared = {cls: paths for cls, paths in owners.items() if len(paths) > 1}
    assert not shared


def test_functions_have_at_most_twelve_parameters() -> None:
    wide = [
        f"{name(path)}:{function.lineno} {function.name} has {parameters(function)}"
        for path in modules()
        for function in functions(parsed(path))
        if parameters(function) > MAX_PARAMETERS
    ]
    assert not wide, "group them"


def test_private_names_stay_in_their_module() -> None:
    private = [
        f"{name(path)}:{node.lineno} {node.module}.{alias.name}"
        for path in modules()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pigou")
        for alias in node.names
        if re.match(r"_[^_]", alias.name)
    ]
    assert not private, "make them public"


def test_every_test_file_has_a_name_of_its_own() -> None:
    """Modules of tests are imported by their base names: two of one name cannot be collected."""
    owners: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        owners[path.name].append(str(path.relative_to(ROOT)))
    shared = {base: paths for base, paths in owners.items() if len(paths) > 1}
    assert not shared


def test_twenty_concepts_are_where_their_names_say() -> None:
    page = (ROOT / "docs" / "internals" / "architecture.md").read_text()
    rows = dict(re.findall(r"^\| ([\w ]+) \| `(src/[^`]+)` \|$", page, re.M))
    assert set(rows) == set(CONCEPTS)
    for concept, path in rows.items():
        assert (ROOT / path).exists(), f"{concept}: no {path}"
        for word in CONCEPTS[concept].split():
            assert word in path, f"{concept}: {path} does not name {word}"
