"""`tools.seams` on wheels of a made-up engine: what drifts is named, and nothing else."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tools.seams import TABLE, main, read_table, write_table

ENGINE = """
import abc
from dataclasses import dataclass

if True:
    class Base(abc.ABC):
        @abc.abstractmethod
        def get(self, key: bytes, pin: bool = False) -> int: ...

        async def put(self, key, *, ttl=1): ...

@dataclass
class Job:
    id: int
    keys: list

def route(request, /, *args, seed=0, **rest): ...
"""
TABLE_TEXT = """
[engine]
distribution = "engine-wheel"
root = "engine"
version = "1.0"

[[engine.seam]]
file = "engine/base.py"
name = "Base"
adapters = ["ours.py"]
abstract = ["get"]
[engine.seam.methods]
get = "(self, key, pin=)"
put = "async (self, key, *, ttl=)"

[[engine.seam]]
file = "engine/base.py"
name = "Job"
adapters = ["ours.py"]
fields = ["id", "keys"]

[[engine.seam]]
file = "engine/base.py"
name = "route"
adapters = ["ours.py"]
signature = "(request, /, *args, seed=, **rest)"
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "seams.toml"
    path.write_text(TABLE_TEXT)
    return path


def wheel(folder: Path, files: dict[str, str], version: str = "1.0") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"engine_wheel-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def check(table: Path, source: Path) -> int:
    return main(["--table", str(table), "--from", f"engine={source}"])


def test_a_release_as_recorded_exits_with_0(table: Path, tmp_path: Path) -> None:
    assert check(table, wheel(tmp_path, {"engine/base.py": ENGINE})) == 0


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("pin: bool = False", "pin: bool", "Base.get: was (self, key, pin=), is (self, key, pin)"),
        ("async def put", "def put", "Base.put: was async (self, key, *, ttl=)"),
        ("*, ttl=1", "*, ttl=1, tenant=None", "Base.put: was"),
        ("        async def", "        @abc.abstractmethod\n        async def",
         "new abstract method put"),
        ("        @abc.abstractmethod\n", "", "get is no longer abstract"),
        ("    keys: list", "    chunks: list", "Job: field keys is gone"),
        ("def route", "def choose", "route: name is gone"),
        ("request, /", "request", "route: was"),
    ],
)  # fmt: skip
def test_drift_is_named_with_its_adapter_and_exits_with_1(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, said: str
) -> None:
    assert old in ENGINE
    source = wheel(tmp_path, {"engine/base.py": ENGINE.replace(old, new)})
    assert check(table, source) == 1
    line = next(line for line in capsys.readouterr().out.splitlines() if said in line)
    assert line.endswith("<- ours.py")


def test_a_moved_file_is_told_with_its_new_place(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(table, wheel(tmp_path, {"engine/v2/base.py": ENGINE})) == 1
    assert "engine/base.py Base: file moved to engine/v2/base.py" in capsys.readouterr().out


def test_types_and_bodies_are_no_drift(table: Path, tmp_path: Path) -> None:
    text = ENGINE.replace("key: bytes", "key: str").replace(" -> int: ...", ":\n            pass")
    assert check(table, wheel(tmp_path, {"engine/base.py": text})) == 0


def test_offline_takes_the_newest_cached_wheel(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "cache" / "engine-wheel"
    for version in ("1.9.0", "1.10.0rc1", "1.10.0"):
        wheel(folder, {"engine/base.py": ENGINE}, version)
    argv = ["--table", str(table), "--offline", "--cache", str(tmp_path / "cache")]
    assert main(argv) == 0
    assert "engine 1.10.0: 3 seams, as in 1.0" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no wheel"):
        main(["--table", str(table), "--offline", "--cache", str(tmp_path / "none")])


def test_recording_a_release_makes_its_check_pass(table: Path, tmp_path: Path) -> None:
    text = ENGINE.replace("*, ttl=1", "*, tenant").replace("seed=0", "seed")
    source = wheel(tmp_path, {"engine/base.py": text}, "2.0")
    assert check(table, source) == 1
    assert main(["record", "--table", str(table), "--from", f"engine={source}"]) == 0
    assert check(table, source) == 0
    assert read_table(table)["engine"][0]["version"] == "2.0"


def test_a_protobuf_message_loses_a_field(table: Path, tmp_path: Path) -> None:
    descriptor = pytest.importorskip("google.protobuf.descriptor_pb2")
    file = descriptor.FileDescriptorProto(name="x.proto")
    file.message_type.add(name="Reply").field.add(name="body", number=1)
    table.write_text(
        '[engine]\ndistribution = "e"\nroot = "engine"\nversion = "1"\n[[engine.seam]]\n'
        'file = "engine/x_pb2.py"\nname = "Reply"\nadapters = ["a"]\nfields = ["body"]\n'
    )
    text = f"pool.AddSerializedFile({file.SerializeToString()!r})  # Reply"
    assert check(table, wheel(tmp_path / "a", {"engine/x_pb2.py": text})) == 0
    file.message_type[0].field[0].name = "content"
    text = f"pool.AddSerializedFile({file.SerializeToString()!r})  # Reply"
    assert check(table, wheel(tmp_path / "b", {"engine/x_pb2.py": text})) == 1


def test_the_table_reads_as_it_is_written(tmp_path: Path) -> None:
    write_table(read_table(), tmp_path / "again.toml")
    assert (tmp_path / "again.toml").read_text() == TABLE.read_text()


def test_every_adapter_of_the_table_is_there() -> None:
    product = TABLE.parents[1] / "src" / "pigou"
    named = {adapter for _, seams in read_table().values() for s in seams for adapter in s.adapters}
    assert sorted(each for each in named if not (product / each).exists()) == []
