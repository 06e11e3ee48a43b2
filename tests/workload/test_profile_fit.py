"""What a profile makes of streams, and of what it has seen: pure, without a worker."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest

from pigou.sim.timing_measured import WorkerProfile, seconds_at
from pigou.workload.profiling.fit import (
    Decodes,
    Measurements,
    Prompts,
    added,
    arrivals,
    errors,
    excess,
    fit,
    window,
)
from pigou.workload.profiling.measure import Limits, batches, chunks
from pigou.workload.token_counter import Stream

TRUE = msgspec.convert(
    {
        "decodes": [[1, 0.004], [2, 0.0045], [4, 0.005], [8, 0.008]],
        "prompts": [[0, 0.0], [64, 0.001], [256, 0.003], [1024, 0.02]],
        "cache": [[0, 0.0], [3000, 3e-4], [12000, 4.8e-3]],
        "alone": 0.003, "context": 3e-9, "prompt": 0.0007, "overhead": 0.002,
    },
    WorkerProfile,
)  # fmt: skip


def seen(noise: float = 0.0) -> Measurements:
    """All that `TRUE` takes, each off by up to a share of it."""
    rng = np.random.default_rng(3)

    def off(seconds: float) -> float:
        return seconds * (1 + float(rng.uniform(-noise, noise)))

    found = Measurements()
    for n in (1, 2, 4, 8):
        for each in (100, 700, 1500):
            found.decodes.append(
                Decodes(
                    n, n * each, off(seconds_at(TRUE.decodes, n) + seconds_at(TRUE.cache, n * each))
                )
            )
    shapes = [(t, kv, k) for t in (64, 256, 1024) for kv in (0, 500, 1000) for k in (1, 3)]
    for tokens, kv, k in shapes:
        reads = tokens * kv + tokens * (tokens + 1) / 2
        cost = added(TRUE, Prompts(tokens, reads, k, 0.0))
        found.prefill_mixed.append(Prompts(tokens, reads, k, off(cost)))
        found.prefill_alone.append(Prompts(tokens, reads, k, off(cost + TRUE.alone)))
        first = cost + TRUE.alone + TRUE.overhead
        found.first.append(Prompts(tokens, reads, k, off(first)))
    return found


def test_a_timing_is_recovered_from_what_it_takes() -> None:
    found = fit(seen())
    for name in ("alone", "context", "prompt", "overhead"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-3), name
    for n, kv in ((1, 100), (2, 3000), (8, 12000)):
        said = seconds_at(found.decodes, n) + seconds_at(found.cache, kv)
        assert said == pytest.approx(
            seconds_at(TRUE.decodes, n) + seconds_at(TRUE.cache, kv), rel=1e-3
        )
    for (n, value), (m, other) in zip(found.prompts, TRUE.prompts, strict=True):
        assert n == m
        assert value == pytest.approx(other, rel=1e-3, abs=1e-9)
    assert max(each.largest for each in errors(found, seen())) < 1e-3


def test_noise_is_reported_as_the_error_of_the_fit() -> None:
    noisy = seen(noise=0.05)
    found = fit(noisy)
    told = errors(found, noisy)
    assert [each.what for each in told] == [
        "decodes", "prompts beside a stream", "prompts alone", "first token",
    ]  # fmt: skip
    for each in told:
        assert 0.0 < each.median < 0.05
        assert each.median <= each.largest < 0.2


def test_a_curve_never_falls_whatever_was_seen() -> None:
    odd = Measurements(
        decodes=[Decodes(1, 10, 0.005), Decodes(2, 20, 0.003), Decodes(4, 40, 0.004)],
        prefill_mixed=[Prompts(64, 2080, 1, 0.004), Prompts(128, 8256, 1, 0.002)],
    )
    found = fit(odd)  # `WorkerProfile` refuses what falls
    assert found.alone == found.overhead == 0.0


def test_what_a_step_takes_in_any_case_is_not_laid_upon_the_cache() -> None:
    rng = np.random.default_rng(5)
    for _ in range(20):
        found = fit(
            Measurements(
                decodes=[
                    Decodes(
                        n, n * kv, (0.005 + 1e-7 * n * kv) * (1 + float(rng.uniform(-0.05, 0.05)))
                    )
                    for n in (1, 2, 4, 8)
                    for kv in (270, 780, 1550)
                ],
                prefill_mixed=[Prompts(64, 2080, 1, 0.004)],
            )
        )
        assert found.decodes[0][1] > 0.0045
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(found.cache)]
        assert slopes == pytest.approx(sorted(slopes), abs=1e-15)


def test_without_measurements_there_is_no_timing() -> None:
    with pytest.raises(ValueError, match="no measurements"):
        fit(Measurements())


def stream(first: int, gaps: list[int]) -> Stream:
    array = np.array(gaps, dtype=np.int64)
    return Stream(
        first, first + sum(gaps), len(gaps) + 1, None, None, len(gaps) + 1, "usage", array
    )


def test_a_window_holds_the_steps_that_all_streams_share() -> None:
    early = stream(0, [5_000_000] * 4 + [10_000_000] * 20)
    late = stream(20_000_000, [10_000_000] * 30)
    found = window([early, late])
    assert found is not None
    assert found.steps == 20
    assert found.seconds == pytest.approx(0.01)
    assert found.generated == 15 + 11
    assert window([stream(0, [1] * 5), stream(10**9, [1] * 5)]) is None


def test_what_a_stream_lost_is_what_the_other_took() -> None:
    gaps = [10_000_000] * 20 + [13_000_000, 14_000_000] + [10_000_000] * 20
    times = arrivals(stream(0, gaps))
    sent = 20 * 10_000_000 - 5_000_000
    assert excess(times, sent, sent + 15_000_000) == pytest.approx(0.007)
    assert excess(times, sent, int(times[-1])) is None
    assert excess(times, 1, 2) is None


def test_measurements_fit_the_worker() -> None:
    limits = Limits(tokens=512, seqs=12, max_request_tokens=400, room=4000, block=16)
    assert {n for n, _ in batches(limits, 16)} == {1, 2, 4, 8}
    for n, length in batches(limits, 16):
        assert length == 16 or n * length <= limits.room
    for tokens, kv in chunks(limits):
        assert tokens < limits.tokens
        assert tokens + kv < limits.max_request_tokens
        assert kv % limits.block == 0
    assert (399, 0) in set(chunks(limits))
