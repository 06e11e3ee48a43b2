"""Laws of `pigou diagnose`: findings and exit codes, and refusals that name what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pigou.cli import main
from pigou.workload.packed import packing

QUIET = [{"start_s": 10.0 * at, "seconds": 10.0, "arrived": 9, "completed": 9} for at in range(5)]
GROWING = [{**window, "queued": 40.0 * at} for at, window in enumerate(QUIET)]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["diagnose", *arguments])
    return int(end.value.code or 0), *capsys.readouterr()


def write(path: Path, document: Any) -> str:
    path.write_text(json.dumps(document))
    return str(path)


def test_a_quiet_run_ends_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, write(tmp_path / "a.json", {"windows": QUIET}))
    assert code == 0
    assert "Nothing is wrong, as far as it was judged." in out
    assert "stream stall" in out  # it is not judged


def test_a_finding_ends_with_1_and_its_file_is_diagnosed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "b.json")
    code, out, _ = run(
        capsys, write(tmp_path / "a.json", {"windows": GROWING}), "--json", file
    )  # fmt: skip
    assert code == 1
    assert "6 queue build-up" in out
    document = json.loads(Path(file).read_text())
    assert document["findings"][0]["mode"] == "queue build-up"
    assert run(capsys, file)[:2] == (1, out)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give one of a URL"),
        (("a", "--journal", "b"), "give one of a URL"),
        (("no-such-file",), "no URL"),
        (("--journal", "no-such-file"), "no-such-file"),
        (("--prefixes", "no-such-file"), "no-such-file"),
        (("no-such-file", "--seconds", "9"), "--duration is for a URL"),
        (("--journal", "no-such-file", "--key", "x"), "--api-key is for a URL"),
        (("http://127.0.0.1:9",), "did not answer"),
        (("http://127.0.0.1:9", "--seconds", "2"), "at least 6"),
        (("http://127.0.0.1:9", "--seconds", "nan"), "at least 6"),
        (("http://[::1",), "no URL"),
    ],
)
def test_what_cannot_be_told_ends_with_2(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = run(capsys, *arguments)
    assert code == 2
    assert error.startswith("pigou diagnose: ")
    assert words in error


def test_figures_below_0_and_depth_without_end_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    windows = [{**QUIET[0], "arrived": -5}]
    code, _, error = run(capsys, write(tmp_path / "a.json", {"windows": windows}))
    assert (code, "arrived is -5" in error) == (2, True)
    (tmp_path / "deep.json").write_text("[" * 200_000)
    code, _, error = run(capsys, str(tmp_path / "deep.json"))
    assert (code, "no JSON" in error) == (2, True)


def test_a_file_without_windows_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = run(capsys, write(tmp_path / "a.json", {"offered": 1}))
    assert code == 2
    assert "pigou simulate --json" in error


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz", "p.jsonl.zst"])
def test_prefixes_of_a_trace_are_linted_packed_or_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    rules = "These are the rules of the house, and they are long. " * 10
    lines = [json.dumps({"messages": [{"role": "system", "content": f"{at:09d} {rules}"}]})
             for at in range(6)]  # fmt: skip
    with packing(tmp_path / name) as file:
        file.write("\n".join(lines).encode())
    code, out, _ = run(capsys, "--prefixes", str(tmp_path / name))
    assert code == 1
    assert "6 prompts diverge at block 0" in out
