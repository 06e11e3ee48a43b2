"""Report drift of the interfaces of other engines that Pigou's adapters rely on.

    python -m tools.seams [check] [--cache DIR] [--offline] [--from NAME=PATH ...]
    python -m tools.seams record --from NAME=PATH ...

`seams.toml` lists them: a class with the methods that we override or call, a function, a dataclass
with its fields, a protobuf message. `check` downloads the newest wheel of each package (alone, with
pip) and compares by syntax tree; nothing is imported. It reports a moved file, a new abstract
method, a changed parameter, a lost field, and exits with 1. `--offline` takes the newest wheel in
the cache; `--from vllm=/venv/lib/python3.11/site-packages` reads a folder or one wheel instead.
`record` writes signatures as they are in the given sources.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.version import Version

TABLE = Path(__file__).with_name("seams.toml")
CACHE = Path.home() / ".cache" / "pigou" / "seams"
_VERSION = re.compile(r"^[^-]+-([^-]+?)(?:-|\.dist-info)")


class Source:
    """Python files of one package, in a wheel or a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._zip = zipfile.ZipFile(path) if path.is_file() else None
        self.names = self._zip.namelist() if self._zip else []

    def version(self, distribution: str) -> str:
        """Return the version of a wheel, or of a distribution in a folder ("?" if unknown)."""
        names = [self.path.name]
        if self._zip is None:
            known = distribution.replace("-", "_")
            names = [path.name for path in self.path.glob(f"{known}-*.dist-info")]
        found = [match[1] for match in map(_VERSION.match, names) if match]
        return found[0] if found else "?"

    def read(self, file: str) -> str | None:
        """Return a file's text, or None."""
        if self._zip is not None:
            return self._zip.read(file).decode() if file in self.names else None
        path = self.path / file
        return path.read_text("utf-8") if path.is_file() else None

    def holding(self, root: str, pattern: re.Pattern[str]) -> Iterator[str]:
        """Yield the files below a top folder whose text has a pattern."""
        names = self.names
        if self._zip is None:
            found = (self.path / root).rglob("*.py")
            names = [path.relative_to(self.path).as_posix() for path in found]
        for name in names:
            if name.startswith(f"{root}/") and name.endswith(".py"):
                text = self.read(name)
                if text is not None and pattern.search(text):
                    yield name


@dataclass
class Seam:
    """One name that an adapter relies on."""

    file: str
    name: str  # class or function; message in a `_pb2` file
    adapters: list[str]
    methods: dict[str, str] = field(default_factory=dict)  # overridden or called, by signature
    abstract: list[str] | None = None  # all abstract methods, for classes that we extend
    fields: list[str] = field(
        default_factory=list
    )  # attributes of a class, members of an enum, fields of a message
    signature: str = ""  # parameters of a function


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return a function's parameters by name and kind; `x=` has a default."""
    given = node.args
    parts: list[str] = []
    ordinary = [*given.posonlyargs, *given.args]
    first_default = len(ordinary) - len(given.defaults)
    for number, arg in enumerate(ordinary):
        parts.append(arg.arg + "=" * (number >= first_default))
        if given.posonlyargs and number + 1 == len(given.posonlyargs):
            parts.append("/")
    if given.vararg or given.kwonlyargs:
        parts.append("*" + (given.vararg.arg if given.vararg else ""))
    for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        parts.append(arg.arg + "=" * (default is not None))
    if given.kwarg:
        parts.append("**" + given.kwarg.arg)
    kind = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    return f"{kind}({', '.join(parts)})"


def _definitions(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield definitions, those under `if` and `try` too."""
    for node in body:
        yield node
        for part in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, ast.If | ast.Try):
                inner = getattr(node, part, [])
                for each in inner:
                    yield from _definitions(each.body if part == "handlers" else [each])


def _find(tree: ast.Module, name: str) -> ast.stmt | None:
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [n for n in _definitions(tree.body) if isinstance(n, kinds) and n.name == name]
    return found[-1] if found else None


def _is_abstract(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(
        ast.unparse(each).split(".")[-1] in ("abstractmethod", "abstractproperty")
        for each in node.decorator_list
    )


def _field_names(node: ast.ClassDef) -> list[str]:
    names = [n.target.id for n in node.body
             if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]  # fmt: skip
    for each in node.body:
        if isinstance(each, ast.Assign):
            names += [t.id for t in each.targets if isinstance(t, ast.Name)]
    for method in node.body:  # attributes of plain classes
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            names += [n.attr for n in ast.walk(method) if isinstance(n, ast.Attribute)
                      and isinstance(n.ctx, ast.Store)]  # fmt: skip
    names += [n.name for n in node.body if isinstance(n, ast.FunctionDef)
              and any("property" in ast.unparse(d) for d in n.decorator_list)]  # fmt: skip
    return list(dict.fromkeys(names))


def _message_fields(text: str, name: str) -> list[str] | None:
    """Return the fields of a message in a generated `_pb2` file."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, bytes):
            file = FileDescriptorProto()
            file.ParseFromString(node.value)
            for message in file.message_type:
                if message.name == name:
                    return [each.name for each in message.field]
    return None


def compare(seam: Seam, root: str, source: Source) -> list[str]:
    """Return what differs from the table."""
    text = source.read(seam.file)
    where = f"{seam.file} {seam.name}"
    if text is None or seam.name not in text:
        pattern = re.compile(rf"^\s*(class|def|async def) {re.escape(seam.name)}\b", re.MULTILINE)
        moved = list(source.holding(root, pattern))
        what = f"moved to {', '.join(moved)}" if moved else "is gone"
        return [f"{where}: {'file' if text is None else 'name'} {what}"]
    if seam.file.endswith("_pb2.py"):
        have = _message_fields(text, seam.name)
        if have is None:
            return [f"{where}: is gone"]
        return [f"{where}: field {each} is gone" for each in seam.fields if each not in have]
    node = _find(ast.parse(text), seam.name)
    if node is None:
        return [f"{where}: is gone"]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return _changed(where, seam.signature, signature(node))
    assert isinstance(node, ast.ClassDef)
    return [*_class_changes(where, seam, node)]


def _class_changes(where: str, seam: Seam, node: ast.ClassDef) -> Iterator[str]:
    functions = {n.name: n for n in _definitions(node.body)
                 if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}  # fmt: skip
    for name, expected in seam.methods.items():
        if name not in functions:
            yield f"{where}: method {name} is gone"
        else:
            yield from _changed(f"{where}.{name}", expected, signature(functions[name]))
    if seam.abstract is not None:
        abstract = [name for name, each in functions.items() if _is_abstract(each)]
        for name in sorted(set(abstract) - set(seam.abstract)):
            yield f"{where}: new abstract method {name}{signature(functions[name])}"
        for name in sorted(set(seam.abstract) - set(abstract)):
            yield f"{where}: {name} is no longer abstract"
    have = _field_names(node)
    yield from (f"{where}: field {each} is gone" for each in seam.fields if each not in have)


def _changed(where: str, expected: str, now: str) -> list[str]:
    return [] if now == expected else [f"{where}: was {expected}, is {now}"]


def record(seam: Seam, source: Source) -> None:
    """Set a seam's signatures and abstract methods to those of a source."""
    text = source.read(seam.file)
    node = None if text is None else _find(ast.parse(text), seam.name)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        seam.signature = signature(node)
    elif isinstance(node, ast.ClassDef):
        functions = {n.name: n for n in _definitions(node.body)
                     if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}  # fmt: skip
        for name in seam.methods:
            if name in functions:
                seam.methods[name] = signature(functions[name])
        if seam.abstract is not None:
            seam.abstract = [name for name, each in functions.items() if _is_abstract(each)]


def read_table(path: Path = TABLE) -> dict[str, tuple[dict[str, Any], list[Seam]]]:
    """Return the packages by name: their settings and seams."""
    table = tomllib.loads(path.read_text("utf-8"))
    return {name: (package, [Seam(**each) for each in package.pop("seam")])
            for name, package in table.items()}  # fmt: skip


def write_table(table: dict[str, tuple[dict[str, Any], list[Seam]]], path: Path = TABLE) -> None:
    """Write the table as `read_table` reads it."""
    lines: list[str] = ["# Interfaces of other engines that adapters rely on; see tools/seams.py."]
    for name, (package, seams) in table.items():
        lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in package.items())]
        for seam in seams:
            lines += ["", f"[[{name}.seam]]"]
            values = {key: value for key, value in vars(seam).items() if key != "methods"}
            lines += [
                f"{k} = {_toml(v)}" for k, v in values.items() if v or (v == [] and k == "abstract")
            ]
            if seam.methods:
                lines += [f"[{name}.seam.methods]"]
                lines += [f"{key} = {_toml(value)}" for key, value in seam.methods.items()]
    path.write_text("\n".join(lines) + "\n", "utf-8")


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)  # a string: TOML's basic strings are JSON's


def newest(distribution: str, cache: Path, offline: bool) -> Path:
    """Return the newest wheel of a distribution, downloaded alone unless offline."""
    folder = cache / distribution
    folder.mkdir(parents=True, exist_ok=True)
    if not offline:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        pip += ["--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder)]
        done = subprocess.run([*pip, distribution], check=False, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"pip download {distribution}: {done.stderr.strip()[-500:]}")
    wheels = sorted(
        folder.glob("*.whl"), key=lambda path: Version(Source(path).version(distribution))
    )
    if not wheels:
        raise SystemExit(f"{folder} has no wheel; run once without --offline, or give --from")
    return wheels[-1]


def main(argv: Sequence[str] | None = None) -> int:
    """Check or record; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", nargs="?", choices=["check", "record"], default="check")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of wheels")
    parser.add_argument("--offline", action="store_true", help="use the newest wheels in the cache")
    parser.add_argument("--from", dest="sources", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--table", type=Path, default=TABLE)
    args = parser.parse_args(argv)
    table = read_table(args.table)
    given = dict(each.split("=", 1) for each in args.sources)
    if unknown := sorted(set(given) - set(table)):
        parser.error(f"--from {unknown[0]}: {args.table} has {', '.join(table)}")
    if args.action == "record":
        for name, path in given.items():
            source = Source(Path(path))
            for seam in table[name][1]:
                record(seam, source)
            table[name][0]["version"] = source.version(table[name][0]["distribution"])
        write_table(table, args.table)
        return 0
    drift = 0
    for name, (package, seams) in table.items():
        path = given.get(name) or newest(package["distribution"], args.cache, args.offline)
        source = Source(Path(path))
        version = source.version(package["distribution"])
        changes = [
            (seam, each) for seam in seams for each in compare(seam, package["root"], source)
        ]
        state = f"{len(changes)} changes since" if changes else "as in"
        print(f"{name} {version}: {len(seams)} seams, {state} {package['version']}")
        for seam, each in changes:
            print(f"  {each} <- {', '.join(seam.adapters)}")
        drift += len(changes)
    return 1 if drift else 0


if __name__ == "__main__":
    sys.exit(main())
