"""Laws of packed files: what is read is all that was packed, or an error says that it is not."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from pigou.cli import main
from pigou.config import ConfigError
from pigou.workload.packed import unpacked
from pigou.workload.trace_formats import read_trace

zstandard = pytest.importorskip("zstandard")

ROW = '{"arrival_s":%d,"input":9,"output":1}\n'
TEXT = "".join(ROW % n for n in range(5000)).encode()


def zstd(data: bytes) -> bytes:
    packer = zstandard.ZstdCompressor(write_checksum=True)
    packed: bytes = packer.compress(data)
    return packed


PACK = [pytest.param(".gz", gzip.compress, id="gz"), pytest.param(".zst", zstd, id="zst")]
Pack = Callable[[bytes], bytes]


def write(folder: Path, ending: str, data: bytes) -> Path:
    path = folder / f"t.jsonl{ending}"
    path.write_bytes(data)
    return path


def read(path: Path) -> bytes:
    with unpacked(path) as file:
        return file.read()


@pytest.mark.parametrize(("ending", "pack"), PACK)
def test_what_was_packed_in_one_part_or_several_is_read(
    tmp_path: Path, ending: str, pack: Pack
) -> None:
    assert read(write(tmp_path, ending, pack(TEXT))) == TEXT
    assert read(write(tmp_path, ending, pack(TEXT) + pack(b"") + pack(b"end"))) == TEXT + b"end"


def test_frames_that_hold_no_data_are_passed_over(tmp_path: Path) -> None:
    skipped = bytes.fromhex("502a4d18") + (5).to_bytes(4, "little") + b"notes"
    assert read(write(tmp_path, ".zst", skipped + zstd(TEXT) + skipped)) == TEXT


@pytest.mark.parametrize(("ending", "pack"), PACK)
@pytest.mark.parametrize("most", [-1, -4, -5, 0.5, 12])
def test_a_file_that_is_cut_off_is_refused(
    tmp_path: Path, ending: str, pack: Pack, most: float
) -> None:
    data = pack(TEXT)
    cut = data[: int(len(data) * most) if most == 0.5 else int(most)]
    for whole in (b"", data):  # the only part, or the last of several
        with pytest.raises(ConfigError, match="is cut off"):
            read(write(tmp_path, ending, whole + cut))


@pytest.mark.parametrize(("ending", "pack"), PACK)
@pytest.mark.parametrize("what", ["flipped", "other", "followed"])
def test_a_damaged_file_is_refused(tmp_path: Path, ending: str, pack: Pack, what: str) -> None:
    data = bytearray(pack(TEXT))
    if what == "flipped":
        data[-5] ^= 0x55
    data = {"other": bytearray(TEXT), "followed": data + b"more"}.get(what, data)
    with pytest.raises(ConfigError, match=f"no whole {ending} file"):
        read(write(tmp_path, ending, bytes(data)))


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("command", ["convert", "sample"])
def test_what_is_written_is_packed_as_its_name_says(
    tmp_path: Path, ending: str, command: str
) -> None:
    plain, packed = write(tmp_path, "", TEXT), tmp_path / f"o.jsonl{ending}"
    with pytest.raises(SystemExit) as end:
        main(["trace", command, str(plain), str(packed)])
    assert end.value.code in (0, None)
    assert packed.stat().st_size < len(TEXT) / 4
    assert read_trace(packed) == read_trace(plain)
    assert packed.read_bytes()[:2] == (b"\x1f\x8b" if ending == ".gz" else b"\x28\xb5")


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize(
    "command",
    [
        ["trace", "info", "FILE"],
        ["simulate", "--workload", "FILE", "--timing", "law:340b", "--blocks", "99"],
        ["replay", "FILE"],
    ],
    ids=lambda command: command[0],
)
@pytest.mark.parametrize("data", [b"no packed file", None], ids=["damaged", "cut"])
def test_commands_refuse_it_in_one_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    ending: str,
    command: list[str],
    data: bytes | None,
) -> None:
    whole = gzip.compress(TEXT) if ending == ".gz" else zstd(TEXT)
    path = write(tmp_path, ending, whole[:-40] if data is None else data)
    with pytest.raises(SystemExit) as end:
        main([str(path) if each == "FILE" else each for each in command])
    _, err = capsys.readouterr()
    assert end.value.code == 2
    assert err.startswith(f"pigou {command[0]}")
    assert err.count("\n") == 1
