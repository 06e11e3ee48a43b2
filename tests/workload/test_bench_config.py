from __future__ import annotations

from typing import Any

import pytest

from pigou.config import ConfigError
from pigou.workload.bench_config import BenchConfig, LengthRange

URL = "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rate": 1.0, "concurrency": 2}, "--rate .*--concurrency"),
        ({"cv": 2.0}, "--cv .*--rate"),
        ({"cv": 2.0, "concurrency": 2}, "--cv .*--rate"),
        ({"max_inflight": 3}, "--max-inflight .*--concurrency"),
        ({"requests": 3, "duration": 1.0}, "--count .*--duration"),
        ({"prefixes": 3}, "--prefixes .*--prefix-length"),
        ({"prefix_length": 3}, "--prefixes .*--prefix-length"),
        ({"concurrency": 0}, "--concurrency is 0"),
        ({"rate": 0.0}, "--rate is 0"),
        ({"rate": "often"}, "--rate is 'often'; write requests a second"),
        ({"rate": "5@9/6@3"}, "--rate: second 3 comes after second 9"),
        ({"rate": float("inf")}, "--rate is inf"),
        ({"rate": 1.0, "cv": -1.0}, "--cv is -1"),
        ({"requests": 0}, "--count is 0"),
        ({"duration": 0.0}, "--duration is 0"),
        ({"timeout": 0.0}, "--timeout is 0"),
        ({"warmup": -1}, "--warmup is -1"),
        ({"input": "0"}, "--input is '0'"),
        ({"input": "9:3"}, "--input is '9:3'"),
        ({"output": "many"}, "--output is 'many'"),
        ({"url": "127.0.0.1:8000"}, "the URL is"),
        ({"url": "http://[::1"}, "the URL is"),
        ({"url": "http://h:port"}, "the URL is"),
        ({"url": "http://h/?x=1"}, "the URL is"),
        ({"url": "http://me:secret@h"}, "--api-key"),
    ],
)
def test_what_contradicts_itself_or_is_out_of_range_is_refused_by_name(
    options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        BenchConfig(**({"url": URL} | options))


@pytest.mark.parametrize("url", [URL, f"{URL}/", f"{URL}/v1", f"{URL}/v1/"])
def test_the_url_may_end_in_v1(url: str) -> None:
    assert BenchConfig(url=url).base == URL


def test_lengths_are_one_number_or_a_range() -> None:
    assert LengthRange.parse("--input", "7") == LengthRange(7, 7)
    assert LengthRange.parse("--input", "7:9") == LengthRange(7, 9)
    assert str(LengthRange(7, 9)) == "7:9"
