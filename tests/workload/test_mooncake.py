"""Mooncake's format as several tools write it: what no row says is inferred, named, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pigou.config import ConfigError
from pigou.workload.trace import Trace, hit_ratio
from pigou.workload.trace_formats import read_trace
from pigou.workload.workload_spec import read_workload_spec


def write(folder: Path, rows: list[dict[str, Any]], name: str = "t.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def read(folder: Path, rows: list[dict[str, Any]], name: str = "t.jsonl", **options: Any) -> Trace:
    return read_trace(write(folder, rows, name), **options)


def shared_eighth(block: int) -> list[dict[str, Any]]:
    """Prompts of 2,048 tokens that share the first 256, in blocks of so many tokens."""
    count = 2048 // block
    own = count - count // 8
    return [
        {"timestamp": 1000 * at, "input_length": 2048, "output_length": 10,
         "hash_ids": [*range(count // 8), *range((at + 1) * count, (at + 1) * count + own)]}
        for at in range(200)
    ]  # fmt: skip


@pytest.mark.parametrize("block", [16, 32, 64, 128, 256])
def test_blocks_of_any_size_share_as_much(tmp_path: Path, block: int) -> None:
    trace = read(tmp_path, shared_eighth(block))
    assert trace.block == block
    assert hit_ratio(trace, 1e9) == pytest.approx(0.125, abs=0.005)


def test_mooncake_s_own_blocks_are_512_tokens_where_they_fit(tmp_path: Path) -> None:
    rows = [{"timestamp": 0, "input_length": 655, "output_length": 52, "hash_ids": [46, 47]}]
    assert read(tmp_path, rows).block == 512
    assert read(tmp_path, rows, block=400).block == 400


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        (shared_eighth(16), {"block": 512}, "a block is 512 tokens, and a prompt of 2048 has 128"),
        (shared_eighth(16), {"block": 8}, "a block is 8 tokens"),
        ([{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1, 2]}], {},
         "5 sizes fit, from 4 to 8"),
        ([{"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": list(range(9))}], {},
         "none fits"),
        ([{"timestamp": 0, "input_length": 9}], {}, "line 1 .*it has no output_length"),
        ([{"timestamp": 0, "text_input": "hello", "output_length": 9}], {}, "it has text_input"),
        ([{"timestamp": 0, "messages": [], "output_length": 9}], {}, "it has messages"),
        ([{"timestamp": 0, "delay": 5, "input_length": 9, "output_length": 9}], {}, "give one"),
        ([{"timestamp": 0, "input_length": 9, "output_length": 9},
          {"input_length": 9, "output_length": 9}], {}, "line 2 .*it has no timestamp"),
        ([{"timestamp": 0, "input_length": 9, "output_length": 9},
          {"session_id": "a", "delay": 9, "input_length": 9, "output_length": 9}], {},
         "line 2 .*no turn before it"),
        ([{"timestamp": at / 1000, "input_length": 9, "output_length": 9} for at in range(99)], {},
         "name the unit"),
        ([{"timestamp": 0, "input_length": 9, "output_length": 9}], {"unit": "h"}, "unit is 'h'"),
        ([{"timestamp": 0, "input_length": 9, "output_length": 9}], {"block": -1}, "block is -1"),
    ],
)  # fmt: skip
def test_what_rows_contradict_or_do_not_say_is_refused(
    tmp_path: Path, rows: list[dict[str, Any]], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, rows, **options)


def test_times_since_1970_and_named_units_are_read(tmp_path: Path) -> None:
    def starts(stamps: list[float], **options: Any) -> list[float]:
        rows = [{"timestamp": at, "input_length": 9, "output_length": 9} for at in stamps]
        return [session.start for session in read(tmp_path, rows, **options).sessions]

    assert starts([0, 1500]) == [0, 1.5]
    assert starts([0, 1.5], unit="s") == [0, 1.5]
    assert starts([1_764_000_000, 1_764_000_001.5]) == [0, 1.5]
    assert starts([1_764_000_000_000, 1_764_000_001_500]) == [0, 1.5]


def test_turns_of_a_session_follow_one_another_after_their_delay(tmp_path: Path) -> None:
    """AIPerf's and Dynamo's sessions, by either spelling of the keys."""
    rows = [
        {"session_id": "a", "timestamp": 0, "input_length": 600, "output_length": 20,
         "hash_ids": [1, 2]},
        {"session_id": "b", "created_time": 500, "input_tokens": 90, "output_tokens": 9},
        {"session_id": "a", "delay": 2000, "input_length": 1100, "output_length": 20,
         "hash_ids": [1, 2, 3]},
        {"session_id": "b", "delay_ms": 100, "input_tokens": 7, "output_tokens": 9},
    ]  # fmt: skip
    first, second = read(tmp_path, rows).sessions
    assert [(turn.input, turn.think) for turn in first.turns] == [(600, 0.0), (1100, 2.0)]
    # Without blocks, what was said before is added to the new text of a turn.
    assert [(turn.input, turn.think) for turn in second.turns] == [(90, 0.0), (106, 0.1)]


def test_rows_without_times_need_a_rate(tmp_path: Path) -> None:
    path = write(tmp_path, [{"input_length": 9, "output_length": 9}] * 3)
    with pytest.raises(ConfigError, match="no timestamp; give rate="):
        read_workload_spec(str(path))
    assert len(read_workload_spec(f"{path},rate=5").workload.sessions) == 3  # type: ignore[union-attr]
    assert len(read_workload_spec(f"{path},C=2").workload.sessions) == 3  # type: ignore[union-attr]


def test_bailian_s_blocks_are_16_tokens_where_the_name_does_not_say(tmp_path: Path) -> None:
    row = {
        "chat_id": 1,
        "timestamp": 1.5,
        "input_length": 40,
        "output_length": 9,
        "hash_ids": [1, 2, 3],
    }
    assert read(tmp_path, [row], "plain.jsonl").block == 16
    with pytest.raises(ConfigError, match="a block is 64 tokens"):
        read(tmp_path, [row], "trace_blksz_64.jsonl")


def test_own_rows_without_a_block_have_the_size_that_fits(tmp_path: Path) -> None:
    rows = [{"arrival_s": 0, "input": 2048, "output": 9, "hash_ids": list(range(32))}]
    assert read(tmp_path, rows).block == 64
