"""Schedules of arrival rates: the counts that they promise, their inverse, and their spelling."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pigou.config import ConfigError
from pigou.request import SECOND
from pigou.sim.arrival_rate import RateSchedule, read_rate, renewal_times
from pigou.sim.workload import OpenLoop
from pigou.workload.workload_spec import read_workload_spec

STEPS = RateSchedule(seconds=(0.0, 100.0, 150.0, 250.0), rates=(5.0, 15.0, 0.0, 2.0))
END_S = 400.0
#: The chi-square of 7 cells exceeds it once in a million.
CHI_SQUARE_7 = 40.5


@st.composite
def schedules(draw: st.DrawFn) -> RateSchedule:
    """Any schedule of a few pieces."""
    gaps = draw(st.lists(st.floats(0.1, 1000.0), min_size=1, max_size=6))
    rates = draw(st.lists(st.floats(0.01, 100.0) | st.just(0.0), min_size=len(gaps),
                          max_size=len(gaps)).filter(any))  # fmt: skip
    return RateSchedule(seconds=tuple(np.cumsum(gaps).tolist()), rates=tuple(rates))


def arrivals(rate: RateSchedule, cv: float, seed: int, end_s: float) -> np.ndarray:
    """Return the seconds of the arrivals before `end_s`."""
    times = []
    for nanos in renewal_times(rate, cv, np.random.default_rng(seed)):
        if nanos >= end_s * SECOND:
            break
        times.append(nanos / SECOND)
    return np.array(times)


def expected(schedule: RateSchedule, seconds: np.ndarray) -> np.ndarray:
    """Return the requests until each time: the integral of the rate."""
    starts, sums = schedule._sums()
    piece = np.maximum(np.searchsorted(starts, seconds, side="right") - 1, 0)
    since = np.maximum(seconds - starts[piece], 0.0)
    return sums[piece] + np.array(schedule.rates)[piece] * since


@given(schedules(), st.floats(0.0, 5000.0))
def test_times_are_the_inverse_of_the_expected_counts(schedule: RateSchedule, at: float) -> None:
    count = expected(schedule, np.array([at]))
    (time,) = schedule.times(count)
    if not np.isfinite(time):
        assert schedule.is_finite
        assert expected(schedule, np.array(schedule.seconds[-1:])) == pytest.approx(count)
    elif schedule.at(at) > 0:
        assert time == pytest.approx(at, rel=1e-9, abs=1e-6)
    else:  # nothing is expected there: the time is the end of the pause
        assert expected(schedule, np.array([time])) == pytest.approx(count, rel=1e-9)


def test_counts_in_all_pieces_are_those_of_a_poisson_process() -> None:
    edges = np.array([0.0, 50.0, 100.0, 120.0, 150.0, 250.0, 300.0, END_S])
    mean = np.diff(expected(STEPS, edges))
    chi_square = 0.0
    seeds = 20
    counts = np.zeros(len(mean))
    for seed in range(seeds):
        counts += np.histogram(arrivals(STEPS, 1.0, seed, END_S), edges)[0]
    busy = mean > 0
    assert not counts[~busy].any()
    chi_square = (((counts - seeds * mean) ** 2)[busy] / (seeds * mean[busy])).sum()
    assert chi_square < CHI_SQUARE_7


def test_gaps_of_the_expected_count_are_exponential() -> None:
    times = np.concatenate(([0.0], arrivals(STEPS, 1.0, 3, END_S)))
    gaps = np.sort(np.diff(expected(STEPS, times)))
    ranks = np.arange(1, len(gaps) + 1) / len(gaps)
    # Kolmogorov and Smirnov's distance: 1.95 / sqrt(n) once in a thousand.
    assert np.abs(ranks - (1 - np.exp(-gaps))).max() < 1.95 / len(gaps) ** 0.5


def test_a_metronome_has_a_beat_for_each_expected_request() -> None:
    times = arrivals(STEPS, 0.0, 0, END_S)
    assert np.allclose(expected(STEPS, times), np.arange(1, len(times) + 1))
    assert len(times) == 500 + 750 + 300 - 1


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_arrivals_never_fall_and_end_with_the_schedule(cv: float) -> None:
    schedule = RateSchedule(seconds=(0.0, 60.0), rates=(20.0, 0.0))
    times = list(renewal_times(schedule, cv, np.random.default_rng(1)))
    assert all(before <= after for before, after in pairwise(times))
    assert 0 < len(times) < 5000
    assert times[-1] <= 60 * SECOND


def test_one_rate_for_ever_gives_the_arrivals_of_that_rate() -> None:
    constant = RateSchedule.of(7.0)
    (left, right) = (
        [time for time, _ in zip(renewal_times(rate, 1.0, np.random.default_rng(5)), range(2000),
                                 strict=False)]
        for rate in (7.0, constant)
    )  # fmt: skip
    assert np.allclose(left, right, rtol=1e-9)


def test_the_changes_are_the_seconds_of_another_rate() -> None:
    schedule = RateSchedule(seconds=(0.0, 10.0, 20.0), rates=(1.0, 1.0, 2.0))
    assert schedule.changes == (0.0, 20.0)
    assert STEPS.changes == STEPS.seconds


def test_a_schedule_is_read_from_text_and_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "day.csv"
    file.write_text("second,rate\n0,5\n100,15\n150,0\n\n250,2\n")
    assert read_rate("5@0/15@100/0@150/2@250") == read_rate(str(file)) == STEPS
    file.write_text("0,5\n100,15\n150,0\n250,2\n")
    assert read_rate(str(file)) == STEPS
    assert read_rate("5") == 5.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("five", "rate is 'five'; write requests a second"),
        ("5@", "rate is '5@'"),
        ("5@0/15", "rate is '5@0/15'"),
        ("5@10/15@10", "let the seconds ascend"),
        ("-1@0/2@3", "rate is -1.0; it must be 0, or above"),
        ("inf@0", "rate is inf"),
        ("nan@0", "rate is nan"),
        ("5@-1", "second is -1.0; it must be 0 to"),
        ("5@0/6@1e9", "a year"),
        ("0@0/0@9", "give one piece a rate above 0"),
        ("nowhere.csv", "cannot be read"),
    ],
)
def test_a_rate_that_cannot_be_says_what_may_be_given(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_rate(text)


@pytest.mark.parametrize("rows", ["", "second,rate\n", "0,1\n5\n", "0,1\nfive,2\n", "0,1,2\n"])
def test_a_file_that_cannot_be_read_says_where(tmp_path: Path, rows: str) -> None:
    file = tmp_path / "day.csv"
    file.write_text(rows)
    with pytest.raises(ConfigError, match=r"day.csv'.*second,rate"):
        read_rate(str(file))


def test_workloads_are_joined_at_their_own_starts() -> None:
    text = (
        "poisson:rate=20@0/0@30,in=400,out=2,templates=3,pool=7; "
        "poisson:rate=0@0/40@30/0@60,in=20,out=90,templates=3"
    )
    spec = read_workload_spec(text, seed=4)
    assert isinstance(spec.workload, OpenLoop)
    assert spec.client.pool == 7
    sessions = spec.workload.sessions
    starts = [session.start_ns for session in sessions]
    assert starts == sorted(starts)
    early = [s.requests[0] for s in sessions if s.start_ns < 30 * SECOND]
    late = [s.requests[0] for s in sessions if s.start_ns >= 30 * SECOND]
    assert {(each.prompt_tokens, each.output_tokens) for each in early} == {(400, 2)}
    assert {(each.prompt_tokens, each.output_tokens) for each in late} == {(20, 90)}
    assert 450 < len(early) < 750
    assert 1000 < len(late) < 1400
    assert {each.hash_scope for each in early}.isdisjoint(each.hash_scope for each in late)
    assert len(spec.workload.rates) == 2
    alone = read_workload_spec(text.partition(";")[0], seed=4).workload
    assert isinstance(alone, OpenLoop)
    assert [s for s in sessions if s.requests[0].prompt_tokens == 400] == list(alone.sessions)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("poisson:rate=5,n=3;closed:C=3,hold=2", "closed: cannot be joined"),
        ("poisson:rate=5,n=3;poisson:rate=5,n=3,pool=2", "in the first part alone"),
        ("poisson:rate=5,n=3;", "cannot be read|No such file|is a folder|Is a directory|no"),
    ],
)
def test_workloads_that_cannot_be_joined_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_workload_spec(text)


def test_workloads_take_schedules(tmp_path: Path) -> None:
    made = read_workload_spec("poisson:rate=5@0/50@20,in=9,out=2,hold=40", seed=2).workload
    starts = [session.start_ns / SECOND for session in made.sessions]  # type: ignore[union-attr]
    assert 50 < sum(start < 20 for start in starts) < 150
    assert 850 < sum(start >= 20 for start in starts) < 1150
    ended = read_workload_spec("gamma:rate=5@0/0@20,cv=0,in=9,out=2").workload
    assert len(ended.sessions) == 99  # type: ignore[union-attr]
    trace = tmp_path / "some.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2024-05-10 00:00:{n:02}.0,9,2\n" for n in range(60))
    )
    moved = read_workload_spec(f"{trace},rate=1@0/10@10/0@12,cv=0").workload
    starts = [session.start_ns / SECOND for session in moved.sessions]  # type: ignore[union-attr]
    assert starts == [*range(1, 11), *(10 + n / 10 for n in range(1, 20))]
