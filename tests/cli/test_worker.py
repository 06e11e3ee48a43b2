"""`pigou worker` refuses bad options with their names and remedies."""

from __future__ import annotations

import pytest
import typer

from pigou.cli import main
from pigou.cli.worker import parse_size


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("512MiB", 2**29), ("2G", 2**31), ("1.5 kb", 1536), ("7B", 7)]
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_what_is_no_size_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="512MiB"):
        parse_size("1X")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--order", "lifo"], "order is 'lifo'; give one of: fcfs, priority, edf"),
        (["--kv-transfer", "nixl"], "give one of: auto, shm, tcp, none"),
        (["--port", "99999"], "port is 99999; give 0 (any free port) to 65535"),
        (["--dtype", "fp8"], "give auto, bf16 or fp32"),
        (["--model", "./nowhere", "--executor", "sleep"], "has no config.json"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_bad_option_is_named_with_its_remedy(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["worker", *options])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err
