"""Traces as spreadsheets, editors and other tools write them mean what they meant."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from pigou.config import ConfigError
from pigou.workload.trace import Trace
from pigou.workload.trace_formats import read_trace

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens"
PLAIN = f"{HEAD}\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:47.6805900,396,109\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BOM = "\ufeff"
JSONL = [{"timestamp": 0, "input_length": 9, "output_length": 2, "hash_ids": [1]},
         {"timestamp": 1000, "input_length": 7, "output_length": 3, "hash_ids": [1]}]  # fmt: skip


def read(path: Path, text: str) -> Trace:
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return read_trace(path)


SPELLINGS = {
    "byte order mark": BOM + PLAIN,
    "blank first line": "\n\n" + PLAIN,
    "mark and blank lines": BOM + "\r\n \n" + PLAIN,
    "CRLF": PLAIN.replace("\n", "\r\n"),
    "CR": PLAIN.replace("\n", "\r"),
    "floats": PLAIN.replace("374,44", "374.0,44.00").replace("396", "3.96e2"),
    "blanks after commas": PLAIN.replace(",", ", "),
    "blanks around cells": PLAIN.replace(",", "\t , "),
    "quoted cells": PLAIN.replace("374,44", '"374","44"').replace(HEAD, f'"{HEAD}"'.replace(
        ",", '","')),
    "quotes after blanks": PLAIN.replace("374,44", ' "374", "44"'),
    "an offset": PLAIN.replace("5900,", "5900+01:00,"),
    "a short offset": PLAIN.replace("5900,", "5900+01,"),
    "an offset without colon": PLAIN.replace("5900,", "5900-0530,"),
    "Z": PLAIN.replace("5900,", "5900Z,"),
    "UTC": PLAIN.replace("5900,", "5900 UTC,"),
    "T": PLAIN.replace(" 18", "T18"),
    "no blank line at the end": PLAIN.rstrip(),
    "blank lines between": PLAIN.replace("\n2023", "\n\n,,\n2023"),
}  # fmt: skip


@pytest.mark.parametrize("packing", ["", ".gz"])
@pytest.mark.parametrize("text", SPELLINGS.values(), ids=SPELLINGS)
def test_a_table_means_the_same_however_it_is_spelt(
    tmp_path: Path, text: str, packing: str
) -> None:
    assert read(tmp_path / f"a.csv{packing}", text) == read(tmp_path / "b.csv", PLAIN)


@pytest.mark.parametrize("offset", ["+01:00", "-01:00", "+05:30"])
def test_offsets_are_told_apart(tmp_path: Path, offset: str) -> None:
    hours = float(offset[:3]) + (0.5 if offset.endswith("30") else 0)
    text = f"{HEAD}\n2023-11-16 18:00:00.00+00:00,1,1\n2023-11-16 18:00:01.00{offset},1,1\n"
    starts = [session.start for session in read(tmp_path / "a.csv", text).sessions]
    assert starts == [0.0, abs(1 - 3600 * hours)]


@pytest.mark.parametrize("digits", range(10))
def test_seconds_have_any_number_of_digits(tmp_path: Path, digits: int) -> None:
    fraction = f".{'5' * digits}" if digits else ""
    text = f"{HEAD}\n2023-11-16 18:00:00,1,1\n2023-11-16 18:00:01{fraction},1,1\n"
    found = read(tmp_path / "a.csv", text).sessions[1].start
    assert found == pytest.approx(1 + float(fraction or 0), abs=1e-6)


@pytest.mark.parametrize("text", [BOM, "\n", BOM + "\n\n"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n"])
def test_json_lines_mean_the_same_however_they_are_spelt(
    tmp_path: Path, text: str, end: str
) -> None:
    plain = read(tmp_path / "b.jsonl", "".join(json.dumps(row) + "\n" for row in JSONL))
    odd = text + "".join(json.dumps(row).replace("7", "7.0") + end for row in JSONL)
    assert read(tmp_path / "a.jsonl", odd) == plain


def test_a_session_may_begin_with_a_mark(tmp_path: Path) -> None:
    session = {"id": "s", "block_size": 4, "requests": [{"in": 3, "out": 1, "hash_ids": []}]}
    assert read(tmp_path / "a.json", BOM + json.dumps(session)).sessions[0].name == "s"


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.csv", "\n\n" + PLAIN + "2023-11-16 18:15:48,x,1\n", 6),
        ("a.csv", PLAIN.replace("\n", "\n\n") + "2023-11-16 18:15:48,374.5,1\n", 7),
        ("a.csv", PLAIN.replace("374", '"37\n4"'), 3),
        ("b.csv", BURST + "5,m,0,0,0,l\n6,m,9,0,9,l\n7,m,x,1,9,l\n", 4),
        ("c.jsonl", "\n\n" + json.dumps(JSONL[0]) + "\n\n" + '{"timestamp": 1}\n', 5),
        ("d.jsonl", json.dumps(JSONL[0]) + "\n\n" + json.dumps(JSONL[1] | {"timestamp": 1e30}), 3),
        ("e.jsonl", "\n" + '{"input": 9, "output": 1}\n', 2),
    ],
)
def test_errors_name_the_line_of_the_file(tmp_path: Path, name: str, text: str, line: int) -> None:
    with pytest.raises(ConfigError, match=rf"line {line}\b"):
        read(tmp_path / name, text)


def test_failed_requests_are_left_out_however_zero_is_spelt(tmp_path: Path) -> None:
    text = BURST + "5,m,9,0.0,9,l\n6,m,9, 0,9,l\n7,m,9,4.0,9,l\n"
    assert len(read(tmp_path / "b.csv", text).sessions) == 1
