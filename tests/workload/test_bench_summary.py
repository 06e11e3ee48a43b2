from __future__ import annotations

import msgspec
import numpy as np
import pytest

from pigou.objectives import Slo
from pigou.request import SECOND
from pigou.workload.bench_summary import Summary, latency_distribution, summarize
from pigou.workload.token_counter import Failure, SentRequest, Stream

MS = 1_000_000


def done(intended: int, sent: int, first: int, last: int, tokens: int) -> SentRequest:
    gap = (last - first) // max(1, tokens - 1)
    gaps = np.full(tokens - 1, gap * MS, np.int64)
    stream = Stream(first * MS, last * MS, tokens, 10, None, tokens, "usage", gaps)
    return SentRequest(intended * MS, sent * MS, tokens, stream)


def test_latency_counts_from_the_intended_time_and_the_servers_from_sending() -> None:
    one = summarize([done(100, 130, 150, 250, 11)], offered_requests=1, nanoseconds=SECOND)
    means = {
        name: getattr(one, name).mean
        for name in ("ttft", "e2e", "queue_wait", "server_ttft", "server_e2e", "tpot", "itl")
    }
    assert means == {
        "ttft": 50, "e2e": 150, "queue_wait": 30, "server_ttft": 20, "server_e2e": 120,
        "tpot": 10, "itl": 10,
    }  # fmt: skip


def test_percentiles_interpolate_between_order_statistics() -> None:
    found = latency_distribution([MS * value for value in range(1, 102)])
    assert found is not None
    assert msgspec.structs.astuple(found) == (51, 51, 91, 96, 100)
    two = latency_distribution([0.0, 10.0 * MS])
    assert two is not None
    assert (two.p50, two.p90) == (5.0, pytest.approx(9.0))
    assert latency_distribution([]) is None


def test_failures_are_counted_by_reason_and_never_as_latencies() -> None:
    good = done(0, 0, 10, 20, 3)
    bad = [SentRequest(0, 0, 3, Failure(reason, f"{reason} {i}")) for i, reason in enumerate("abb")]
    both = summarize([good, *bad], offered_requests=6, nanoseconds=2 * SECOND)
    assert both.ttft == summarize([good], offered_requests=1, nanoseconds=SECOND).ttft
    assert (both.completed, both.failed, both.cancelled) == (1, 3, 2)
    assert [(f.reason, f.count, f.example) for f in both.failures] == [
        ("b", 2, "b 1"),
        ("a", 1, "a 0"),
    ]
    assert (both.requests_per_second, both.output_tokens_per_second) == (0.5, 1.5)


def test_a_single_token_has_no_time_per_output_token() -> None:
    found = summarize([done(0, 0, 10, 10, 1)], offered_requests=1, nanoseconds=SECOND)
    assert found.tpot is None
    assert found.itl is None
    assert found.ttft is not None


def test_nothing_at_all_is_no_latency() -> None:
    found = summarize([], offered_requests=3, nanoseconds=0)
    assert (found.ttft, found.cancelled, found.output_tokens_per_second) == (None, 3, 0.0)


def test_the_keys_of_the_summary_are_stable() -> None:
    assert Summary.__struct_encode_fields__ == (
        "seconds", "offered", "completed", "failed", "cancelled", "failures",
        "output_tokens_per_second", "requests_per_second", "output_tokens", "output_tokens_asked",
        "prompt_tokens", "cached_tokens", "tokens_per_chunk", "counted_by", "ttft", "itl", "tpot",
        "e2e", "queue_wait", "server_ttft", "server_e2e", "attained",
    )  # fmt: skip


def test_the_share_inside_an_objective_is_of_all_requests_that_ended() -> None:
    good = done(0, 0, 500, 1000, 11)
    slow = done(0, 0, 500, 3000, 11)
    late = done(0, 2000, 2001, 2002, 1)  # from the intended time
    one = done(0, 0, 500, 500, 1)  # a single token has no gaps
    outcomes = [good, slow, late, one]
    slo = Slo(ttft_s=1.0, itl_s=0.1)
    found = summarize(outcomes, offered_requests=4, nanoseconds=SECOND, slo=slo)
    assert found.attained == 0.5
    failed = SentRequest(0, 0, 5, Failure("status 503", "busy"))
    both = summarize([*outcomes, failed], offered_requests=9, nanoseconds=SECOND, slo=slo)
    assert both.attained == 0.4
    assert summarize(outcomes, offered_requests=4, nanoseconds=SECOND).attained is None
