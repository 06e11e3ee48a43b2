"""Values of options are read as they are written, or refused by name."""

from __future__ import annotations

import pytest
import typer

from pigou.cli.option_values import named, sizes
from pigou.config import ConfigError
from pigou.kv.tier_config import format_size, parse_size, uri_below


def test_numbers_are_numbers_and_words_are_words() -> None:
    name, values = named("--policy", "llm-d,a=1,b=0.5,c=word,d.e=2,d.f=true")
    assert name == "llm-d"
    assert values == {"a": 1, "b": 0.5, "c": "word", "d": {"e": 2, "f": True}}
    assert named("--policy", "toll") == ("toll", {})


@pytest.mark.parametrize(
    "text", ["", ",a=1", "x,a", "x,=1", "x,a=1,a.b=2", "x,a.b=2,a=1", "x,a=1,a=2"]
)
def test_what_is_not_understood_is_refused_with_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match="--policy"):
        named("--policy", text)


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("512MiB", 2**29), ("2G", 2**31), ("1.5 kb", 1536), ("7B", 7)]
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_what_is_no_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="512MiB"):
        parse_size("1X")


@pytest.mark.parametrize("size", [0, 7, 1536, 2**20, 3 * 2**30])
def test_a_size_is_written_as_it_is_read(size: int) -> None:
    assert parse_size(format_size(size)) == size


def test_sizes_by_name_are_bytes() -> None:
    assert sizes("--quota", ["alice=2KiB", "a=b==3M"]) == {"alice": 2048, "a=b=": 3 << 20}
    for wrong in ("alice", "=2KiB"):
        with pytest.raises(typer.BadParameter, match="NAME=SIZE"):
            sizes("--quota", [wrong])
    with pytest.raises(ConfigError, match="no size"):
        sizes("--quota", ["alice=many"])


def test_a_folder_of_a_tier_goes_before_its_query_and_options() -> None:
    bucket = "bucket=1GiB@s3://B/P/?endpoint=http://h:1,policy=lru"
    assert uri_below(bucket, "tp0") == "bucket=1GiB@s3://B/P/tp0?endpoint=http://h:1,policy=lru"
    assert uri_below("disk=1GiB@/d", "tp0") == "disk=1GiB@/d/tp0"
    assert uri_below("host=1GiB", "tp0") == "host=1GiB"
