"""The timing that `pigou profile` writes: its formula, its file, and what of it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pigou.config import ConfigError
from pigou.sim.measured import Measured, MeasuredTiming, at
from pigou.sim.timing import Batch
from pigou.sim.timings import build_timing

GIVEN: dict[str, Any] = {
    "decodes": [[1, 0.004], [4, 0.007]],
    "prompts": [[0, 0.0], [100, 0.01], [200, 0.03]],
    "cache": [[0, 0.0], [200, 1e-4], [400, 5e-4]],
    "alone": 0.002, "context": 1e-8, "prompt": 0.0005, "overhead": 0.001,
}  # fmt: skip


def timing(**changes: Any) -> MeasuredTiming:
    return MeasuredTiming(msgspec.convert(GIVEN | changes, Measured))


def batch(*entries: tuple[int, int, bool]) -> Batch:
    counts, kv, samples = zip(*entries, strict=True)
    return Batch(np.array(counts, np.int32), np.array(kv, np.int32), np.array(samples))


def seconds(of: Batch) -> float:
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
    assert [at(curve, place) for place in (0, 50, 100, 150, 300)] == pytest.approx(
        [0.0, 0.005, 0.01, 0.02, 0.05]
    )
    assert at(((1, 0.004),), 9) == 0.004


def test_reading_the_cache_goes_on_beyond_the_last_point_as_before() -> None:
    assert seconds(batch((1, 1000, True))) == pytest.approx(0.004 + 5e-4 + 2e-6 * 600)


def test_many_steps_take_what_single_ones_take() -> None:
    rng = np.random.default_rng(1)
    model = timing(cache=[[0, 0.0], [9000, 1.23456789e-3], [30000, 9.87654321e-3]])
    for _ in range(50):
        n = int(rng.integers(1, 12))
        kv = rng.integers(1, 9000, n).astype(np.int32)
        ones, yes = np.ones(n, np.int32), np.ones(n, bool)
        together = model.durations(Batch(ones, kv, yes), 40)
        each = [int(model.durations(Batch(ones, kv + i, yes), 1)[0]) for i in range(40)]
        assert together.tolist() == each


def test_the_file_is_found_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "timing.json"
    path.write_bytes(msgspec.json.encode(timing().measured))
    built = build_timing(str(path), "", "", 1)
    assert built.timing == timing()
    assert built.overhead == 0.001


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


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json cannot be read"):
        build_timing("nowhere.json", "", "", 1)
