"""Profile timing reads tables as they were measured."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from timing_tables import CHUNKS, DECODES, KEYS, KVS, attention, write_tables

from benchmarks.lib.shared_folder import shared_folder
from pigou.config import ConfigError
from pigou.models.gpus import GPUS
from pigou.models.read import architecture
from pigou.sim.timing import RooflineTiming, StepShape
from pigou.sim.timing_profile import (
    ATTENTION_KERNELS,
    CAPTURED,
    DENSE_KERNELS,
    REPLAY_SAVES_NS,
    TAIL_SHARE,
    ProfileTiming,
    find_tables,
    profile,
    read_tables,
)

LLAMA = architecture("llama-3.1-8b")
ONE_LAYER = replace(LLAMA, kinds=(replace(LLAMA.kinds[0], count=1),))
SHARED = shared_folder()
TABLES = SHARED / "profiles" / "vllm-0.19"


def batch(counts: list[int], kv_lens: list[int]) -> StepShape:
    return StepShape(
        np.array(counts, dtype=np.int32),
        np.array(kv_lens, dtype=np.int32),
        np.ones(len(counts), dtype=bool),
    )


def micros(timing: ProfileTiming, counts: list[int], kv_lens: list[int]) -> float:
    return float(timing.durations(batch(counts, kv_lens), 1)[0]) / 1000


def one_layer(folder: Path) -> ProfileTiming:
    """A timing of a single layer, where the sums are easy."""
    return ProfileTiming(read_tables(folder), ONE_LAYER, GPUS["rtx4090"], 1, graphs=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tables(tmp_path)
    return tmp_path


def dense(tokens: int) -> float:
    once, each = (2, 2), (2, 2, 50, 2, 40, 250, 3, 120)
    return sum(base + tokens * base / 200 for base in (*once, *each))


def test_a_step_that_was_measured_takes_the_sum_of_its_tables(folder: Path) -> None:
    timing = one_layer(folder)
    for chunk in CHUNKS[1:]:
        for key in KEYS:
            head = 1000 + 20 + 2
            expected = dense(chunk) + head + attention(chunk, key, 0, 0)
            assert micros(timing, [chunk], [key]) == pytest.approx(expected, rel=1e-5)
    for count in DECODES[1:]:
        for kv in KVS:
            expected = dense(count) + 1020 + 2 * count + attention(0, 0, count, kv)
            assert micros(timing, [1] * count, [kv] * count) == pytest.approx(expected, rel=1e-5)


def test_between_points_attention_follows_the_work(folder: Path) -> None:
    timing = one_layer(folder)
    for chunk, key, count, kv in ((700, 1000, 3, 900), (100, 50, 20, 3000), (1500, 0, 40, 100)):
        got = micros(timing, [chunk] + [1] * count, [key] + [kv] * count)
        expected = dense(chunk + count) + 1020 + 2 * (count + 1)
        expected += attention(chunk, key, count, kv)
        assert got == pytest.approx(expected, rel=1e-3)


def test_prompts_of_one_step_weigh_by_what_they_read(folder: Path) -> None:
    timing = one_layer(folder)
    reads = (200 * (300 + 100) + 56 * (5000 + 28)) / 256
    expected = dense(256) + 1024 + 5 + 256 * reads * 1.5e-4
    assert micros(timing, [200, 56], [300, 5000]) == pytest.approx(expected, rel=1e-3)


def test_beyond_the_tables_times_go_on_growing(folder: Path) -> None:
    timing = one_layer(folder)
    times = [micros(timing, [count], [0]) for count in (2048, 4096, 8192, 16_384, 32_768)]
    assert all(later > 1.7 * before for before, later in pairwise(times))


def test_small_batches_compute_what_their_graph_does_and_save_its_launches(folder: Path) -> None:
    graphs = ProfileTiming(read_tables(folder), ONE_LAYER, GPUS["rtx4090"], 1)
    plain = one_layer(folder)
    launch = REPLAY_SAVES_NS / 1000
    for counts, kernels in (([1] * 9, DENSE_KERNELS + ATTENTION_KERNELS), ([8, 1], DENSE_KERNELS)):
        saved = micros(plain, counts, [64] * len(counts)) - micros(
            graphs, counts, [64] * len(counts)
        )
        assert saved == pytest.approx(kernels * launch + dense(9) - dense(16), abs=0.01)
    assert CAPTURED[-1] == 512
    assert micros(graphs, [600], [0]) == micros(plain, [600], [0])


def test_points_without_a_measurement_are_filled_along_lines(folder: Path) -> None:
    path = folder / "attention.csv"
    kept = [row for row in path.read_text().splitlines() if ",64,4096," not in row]
    whole = micros(one_layer(folder), [256, *[1] * 64], [0, *[4096] * 64])
    path.write_text("\n".join(kept) + "\n")
    assert micros(one_layer(folder), [256, *[1] * 64], [0, *[4096] * 64]) == pytest.approx(whole)


def test_the_longest_decode_ends_last_unless_its_sequence_is_split(folder: Path) -> None:
    timing = one_layer(folder)
    longer = TAIL_SHARE * 5e-3  # us per token of one sequence's block
    even, uneven = [1000] * 64, [1000] * 60 + [400] * 3 + [2800]
    assert sum(even) == sum(uneven)
    decodes = [1] * 64  # 512 blocks on 128 processors
    extra = micros(timing, decodes, uneven) - micros(timing, decodes, even)
    assert extra == pytest.approx(longer * 1800, abs=0.02)
    behind = micros(timing, [*decodes, 100], [*uneven, 1900])
    assert behind - micros(timing, [*decodes, 100], [*even, 1900]) == pytest.approx(
        longer * 800, abs=0.02
    )
    few, lengths = [1] * 8, [1000] * 7 + [2800]  # 64 blocks: split
    assert micros(timing, few, lengths) == pytest.approx(micros(timing, few, [1225] * 8), abs=0.02)
    unknown = ProfileTiming(read_tables(folder), ONE_LAYER, GPUS["h100"], 1, graphs=False)
    assert micros(unknown, decodes, uneven) == micros(unknown, decodes, even)


def test_wrong_folders_are_refused_by_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"moe\.csv"):
        profile(folder, architecture("qwen3-30b-a3b"), GPUS["rtxpro6000"])
    (folder / "dense.csv").write_text("layer,tokens,time_us\nwarp_drive,1,2.0\n")
    with pytest.raises(ConfigError, match="warp_drive"):
        profile(folder, LLAMA, GPUS["rtx4090"])
    (folder / "dense.csv").write_text("layer,tokens\nembedding,1\n")
    with pytest.raises(ConfigError, match="time_us"):
        profile(folder, LLAMA, GPUS["rtx4090"])
    (folder / "attention.csv").unlink()
    with pytest.raises(ConfigError):
        profile(folder, LLAMA, GPUS["rtx4090"])


def test_tables_are_found_by_gpu_model_and_degree(tmp_path: Path) -> None:
    for gpu, model, tp in (("RTX4090", "Llama-3.1-8B", 1), ("RTXPRO6000", "Llama-3.1-8B", 2)):
        folder = tmp_path / gpu / "meta-llama" / model / "bf16" / f"tp{tp}"
        folder.mkdir(parents=True)
        write_tables(folder)
    found = find_tables(tmp_path, "meta-llama/Llama-3.1-8B", "RTXPRO6000", 2, "bfloat16")
    assert found.parts[-5:] == ("RTXPRO6000", "meta-llama", "Llama-3.1-8B", "bf16", "tp2")
    assert find_tables(found, "meta-llama/Llama-3.1-8B", "RTXPRO6000", 2, "bfloat16") == found
    with pytest.raises(ConfigError, match="of tp2, and tp is 1"):
        find_tables(found, "meta-llama/Llama-3.1-8B", "RTXPRO6000", 1, "bfloat16")
    with pytest.raises(ConfigError, match="none fits"):
        find_tables(tmp_path, "meta-llama/Llama-3.1-8B", "RTX4090", 2, "bfloat16")
    again = tmp_path / "RTX4090" / "other" / "Llama-3.1-8B" / "bf16" / "tp1"
    again.mkdir(parents=True)
    write_tables(again)
    with pytest.raises(ConfigError, match="more than one"):
        find_tables(tmp_path, "Llama-3.1-8B", "RTX4090", 1, "bfloat16")


@pytest.mark.skipif(not TABLES.is_dir(), reason="no layer tables of vLLM 0.19 (PIGOU_SHARED)")
@pytest.mark.parametrize(
    ("model", "gpu", "tp"),
    [
        ("llama-3.1-8b", "rtx4090", 1),
        ("llama-3.1-8b", "rtxpro6000", 1),
        ("llama-3.1-8b", "rtxpro6000", 2),
        ("qwen3-32b", "rtxpro6000", 1),
        ("qwen3-32b", "rtxpro6000", 2),
        ("qwen3-30b-a3b", "rtxpro6000", 1),
        ("qwen3-30b-a3b", "rtxpro6000", 2),
    ],
)
def test_measured_tables_and_rooflines_agree(model: str, gpu: str, tp: int) -> None:
    measured = profile(TABLES, architecture(model), GPUS[gpu], tp)
    counted = RooflineTiming(architecture(model), GPUS[gpu], tp)
    for counts, kv_lens in (([1], [1000]), ([1] * 32, [1000] * 32), ([2048], [0]), ([512], [0])):
        step = batch(counts, kv_lens)
        ratio = counted.durations(step, 1)[0] / measured.durations(step, 1)[0]
        assert 0.8 < ratio < 1.4, f"{counts[:2]}: {ratio:.2f}"


@pytest.mark.parametrize(
    ("model", "gpu", "dtype", "word"),
    [
        ("Qwen/Qwen3-32B", "RTX4090", "bfloat16", "of model llama318b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "H100", "bfloat16", "of gpu rtx4090"),
        ("meta-llama/Llama-3.1-8B", "RTX4090", "fp8", "of weights bfloat16"),
    ],
)
def test_tables_of_another_model_gpu_or_format_are_refused(
    tmp_path: Path, model: str, gpu: str, dtype: str, word: str
) -> None:
    folder = tmp_path / "RTX4090" / "meta-llama" / "Llama-3.1-8B" / "bf16" / "tp1"
    folder.mkdir(parents=True)
    write_tables(folder)
    (folder.parent / "meta.yaml").write_text("model: meta-llama/Llama-3.1-8B\nhardware: RTX4090\n")
    with pytest.raises(ConfigError, match=word):
        find_tables(folder, model, gpu, 1, dtype)
    with pytest.raises(ConfigError, match="none fits"):
        find_tables(tmp_path, model, gpu, 1, dtype)
    assert find_tables(folder, "Llama-3.1-8B-Instruct", "RTX4090", 1, "bfloat16") == folder
