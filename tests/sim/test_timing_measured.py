"""The timing that `pigou profile` writes: its formula, its file, and what of it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pigou.config import ConfigError
from pigou.engine.plan import Plan
from pigou.sim.timing import StepKey, StepKeys, StepShape
from pigou.sim.timing_measured import MeasuredTiming, WorkerProfile, seconds_at
from pigou.sim.timing_models import build_timing, capacity

GIVEN: dict[str, Any] = {
    "decodes": [[1, 0.004], [4, 0.007]],
    "prompts": [[0, 0.0], [100, 0.01], [200, 0.03]],
    "cache": [[0, 0.0], [200, 1e-4], [400, 5e-4]],
    "alone": 0.002, "context": 1e-8, "prompt": 0.0005, "overhead": 0.001,
}  # fmt: skip


def timing(**changes: Any) -> MeasuredTiming:
    return MeasuredTiming(msgspec.convert(GIVEN | changes, WorkerProfile))


def batch(*entries: tuple[int, int, bool]) -> StepShape:
    counts, kv, samples = zip(*entries, strict=True)
    return StepShape(np.array(counts, np.int32), np.array(kv, np.int32), np.array(samples))


def seconds(of: StepShape) -> float:
    return float(timing().durations(of, 1)[0]) / 1e9


def test_steps_take_what_the_formula_says() -> None:
    decodes = 0.005 + 3e-4  # a third of the way from 1 to 4, half of that from 200 to 400
    chunk = 0.01 + 1e-8 * (100 * 20 + 100 * 101 / 2)
    assert seconds(batch((1, 100, True), (1, 200, True))) == pytest.approx(decodes)
    assert seconds(batch((100, 20, False))) == pytest.approx(0.002 + chunk)
    assert seconds(batch((100, 20, True))) == pytest.approx(0.0025 + chunk)
    mixed = batch((1, 100, True), (1, 200, True), (100, 20, True))
    assert seconds(mixed) == pytest.approx(decodes + chunk + 0.0005)


def test_a_curve_goes_on_beyond_its_last_point() -> None:
    curve = ((0, 0.0), (100, 0.01), (200, 0.03))
    assert [seconds_at(curve, place) for place in (0, 50, 100, 150, 300)] == pytest.approx(
        [0.0, 0.005, 0.01, 0.02, 0.05]
    )
    assert seconds_at(((1, 0.004),), 9) == 0.004


def test_reading_the_cache_goes_on_beyond_the_last_point_as_before() -> None:
    assert seconds(batch((1, 1000, True))) == pytest.approx(0.004 + 5e-4 + 2e-6 * 600)


def test_many_steps_take_what_single_ones_take() -> None:
    rng = np.random.default_rng(1)
    model = timing(cache=[[0, 0.0], [9000, 1.23456789e-3], [30000, 9.87654321e-3]])
    for _ in range(50):
        n = int(rng.integers(1, 12))
        kv = rng.integers(1, 9000, n).astype(np.int32)
        ones, yes = np.ones(n, np.int32), np.ones(n, bool)
        together = model.durations(StepShape(ones, kv, yes), 40)
        each = [int(model.durations(StepShape(ones, kv + i, yes), 1)[0]) for i in range(40)]
        assert together.tolist() == each
        counts, no = ones.copy(), np.zeros(n, bool)
        counts[-1] = int(rng.integers(2, 600))
        together = model.durations(StepShape(counts, kv, no), 9)
        each = [
            int(model.durations(StepShape(counts, kv + i * counts, no), 1)[0]) for i in range(9)
        ]
        assert together.tolist() == each


SPREADS: dict[str, Any] = {
    "rhythm": [[1, [3e-4, -2e-4, -1e-4]], [4, [5e-4, -4e-4, -1e-4]]],
    "scatter": [[1, [0.5, 1.0, 1.0, 1.5]], [8, [0.9, 1.0, 1.0, 1.1]]],
}


def decoding(n: int, moment: StepKey | None, kv: int = 20) -> StepShape:
    ones = np.ones(n, np.int32)
    return StepShape(ones, kv * ones, ones.astype(bool), moment)


def test_many_steps_of_a_worker_take_what_its_single_ones_take() -> None:
    model = timing(**SPREADS)
    for n in (1, 3, 9):
        together = model.durations(decoding(n, StepKey(7, 5, 2)), 40)
        each = [
            int(model.durations(decoding(n, StepKey(7, 5 + i, 2 + i), 20 + i), 1)[0])
            for i in range(40)
        ]
        assert together.tolist() == each
        assert len(set(together.tolist())) > 6


def test_steps_vary_around_what_they_take_in_the_mean() -> None:
    model = timing(**SPREADS, cache=[[0, 0.0]])
    for n in (1, 2, 4, 20):
        mean = int(model.durations(decoding(n, None), 1)[0])
        many = model.durations(decoding(n, StepKey(3, 0, 0)), 30_000)
        assert many.mean() == pytest.approx(mean, rel=0.01)


def test_steps_of_a_plan_differ_by_their_place() -> None:
    model = timing(rhythm=SPREADS["rhythm"], cache=[[0, 0.0]])
    found = model.durations(decoding(1, StepKey(3, 90, 2)), 6) / 1e9 - 0.004
    assert found == pytest.approx([-1e-4, 3e-4, -2e-4] * 2)
    between = model.durations(decoding(2, StepKey(3, 90, 0)), 1) / 1e9 - 0.005
    assert between == pytest.approx([3e-4 + 2e-4 / 3])


def test_what_is_drawn_depends_on_seed_worker_and_step() -> None:
    model = timing(scatter=SPREADS["scatter"])
    plan = Plan(
        rows=np.zeros(1, np.int32), starts=np.full(1, 20, np.int32), counts=np.ones(1, np.int32),
        kv_lens=np.full(1, 20, np.int32), samples=np.ones(1, bool),
    )  # fmt: skip
    keys = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0)]
    found = [
        model.durations(decoding(1, StepKeys(*key).of(plan, step)), 64).tolist()
        for key in keys
        for step in (0, 64)
    ]
    assert found[:2] == found[-2:]
    assert len({tuple(each) for each in found}) == 8


def test_steps_with_prompts_take_what_they_take_in_the_mean() -> None:
    model, given = timing(**SPREADS), batch((1, 100, True), (100, 20, True))
    said = model.durations(given, 1)
    given.step_key = StepKey(1, 2, 3)
    assert model.durations(given, 1) == said


def test_the_file_is_found_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "timing.json"
    path.write_bytes(msgspec.json.encode(timing().measured))
    built = build_timing(str(path), "", "", 1)
    assert built.timing == timing()
    assert built.overhead_s == 0.001


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 1}, "profile anew"),
        ({"alone": -1.0}, "alone is -1.0"),
        ({"cache": [[0, 0.0], [9, -1.0]]}, "not fall"),
        ({"decodes": [[2, 0.004]]}, "rise from 1"),
        ({"prompts": [[0, 0.0], [0, 1.0]]}, "rise from 0"),
        ({"prompts": [[0, 0.1], [9, 0.0]]}, "not fall"),
        ({"decodes": [[1, 0.0]]}, "above 0"),
        ({"speed": 1}, "unknown field"),
        ({"blocks": 9}, "give both"),
        ({"rhythm": [[1, [1e-3, -1e-4]]]}, "rhythm for 1 sequences has a mean of"),
        ({"rhythm": [[1, [0.0]], [2, [1e-3, -1e-3]]]}, "differ in length"),
        ({"rhythm": [[2, [0.0]], [1, [0.0]]]}, "rise from 1"),
        ({"scatter": [[1, [0.5, 1.0]]]}, "it must be 1.0"),
        ({"scatter": [[1, [-1.0, 3.0]]]}, "factor below 0"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_file_that_makes_no_sense_is_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "timing.json"
    path.write_bytes(msgspec.json.encode(GIVEN | changes))
    with pytest.raises(ConfigError, match=words):
        build_timing(str(path), "", "", 1)


def test_the_measured_worker_tells_how_much_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "timing.json"
    path.write_bytes(msgspec.json.encode(GIVEN | {"blocks": 90, "block_size": 32}))
    built = build_timing(str(path), "", "", 1)
    limits = {"max_batched_tokens": 512, "max_seqs": 8}
    assert capacity(built, "", "", 1, block_size=32, **limits) == 90
    assert capacity(built, "llama-3.1-8b", "H100", 1, block_size=16, **limits) == 180
    path.write_bytes(msgspec.json.encode(GIVEN))
    with pytest.raises(ConfigError, match="--blocks"):
        capacity(build_timing(str(path), "", "", 1), "", "", 1, block_size=32, **limits)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json cannot be read"):
        build_timing("nowhere.json", "", "", 1)
