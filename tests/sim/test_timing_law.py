"""The timing law and its presets."""

from __future__ import annotations

import numpy as np
import pytest

from pigou.config import ConfigError
from pigou.sim.timing import PRESETS, Law, LawTiming, StepShape
from pigou.sim.timing_models import build_timing, capacity
from pigou_lab.experiments.fleets import fleet


def test_a_law_adds_decodes_and_prompts() -> None:
    timing = LawTiming(Law(itl_a=0.01, itl_b=0.001, prefill=0.05, prefill_token=0.0001, mixed=0.02))

    def steps(counts: list[int], kv: list[int], repeat: int) -> list[int]:
        batch = StepShape(
            np.array(counts, np.int32), np.array(kv, np.int32), np.ones(len(counts), np.bool_)
        )
        return timing.durations(batch, repeat).tolist()

    def nanos(counts: list[int], kv: list[int]) -> int:
        return steps(counts, kv, 1)[0]

    assert nanos([1, 1], [9, 9]) == 12_000_000
    assert nanos([100], [0]) == 60_000_000
    assert nanos([100], [16]) == 10_000_000
    assert nanos([1, 100], [9, 0]) == 11_000_000 + 30_000_000
    each = [nanos([1, 100], [9 + step, 100 * step]) for step in range(3)]
    assert steps([1, 100], [9, 0], 3) == each


def test_a_small_batch_takes_its_own_time_where_it_has_one() -> None:
    law = Law(itl_a=0.02, itl_b=0.001, few=2, itl_few=0.019)
    assert [law.decode(n) for n in (1, 2, 3)] == pytest.approx([0.019, 0.019, 0.023])
    for values in ({"few": 2}, {"itl_few": 0.01}):
        with pytest.raises(ConfigError, match="few"):
            Law(itl_a=0.02, **values)


def test_presets_are_laws_and_can_be_changed() -> None:
    assert build_timing("law:340b", "", "", 1).overhead_s == PRESETS["340b"].overhead
    built = build_timing("law:70b,prefill=0.5", "", "", 1).timing
    assert isinstance(built, LawTiming)
    assert built.law.prefill == 0.5


@pytest.mark.parametrize("which", ["340b", "70b"])
def test_a_preset_has_the_blocks_of_its_fleets_workers(which: str) -> None:
    paper = fleet(f"{which}-1p2d")
    limits = {"block_size": 16, "max_batched_tokens": 2048, "max_seqs": 1024}
    given = build_timing("law:itl_a=1", "", "", 1)
    theirs = capacity(given, paper.model, "B200", paper.tp, **limits)
    preset = build_timing(f"law:{which},prefill=0.5", "", "", 1)
    assert capacity(preset, "", "", 1, **limits) == theirs
    assert capacity(preset, "llama-3.1-8b", "H100", 1, **limits) != theirs
    with pytest.raises(ConfigError, match="--blocks"):
        capacity(given, "", "", 1, **limits)
