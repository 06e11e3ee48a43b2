"""Summary of a load run: counts, rates, latencies; percentiles as numpy's (type 7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from pigou.objectives import Slo
from pigou.request import SECOND
from pigou.workload.token_counter import Failure, SentRequest, Stream

_MILLISECOND = 1e6


class LatencyDistribution(msgspec.Struct, frozen=True):
    """A distribution, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


class FailureCount(msgspec.Struct, frozen=True):
    """Count of failures for one reason, with the first message."""

    reason: str
    count: int
    example: str


class Summary(msgspec.Struct, frozen=True, kw_only=True, rename={"offered_requests": "offered"}):
    """Figures of a run. Latencies are of completed requests; None without any."""

    seconds: float  # from the start to the last end
    offered_requests: int
    completed: int
    failed: int
    cancelled: int
    failures: list[FailureCount]  # the failed by reason, the commonest first
    output_tokens_per_second: float  # output tokens of completed requests over `seconds`
    requests_per_second: float  # completed requests over `seconds`
    output_tokens: int
    output_tokens_asked: int
    prompt_tokens: int | None  # prompt tokens of completed requests; None if unknown
    cached_tokens: int | None  # cached among them; None if unknown
    tokens_per_chunk: float | None  # output tokens per non-empty chunk
    counted_by: str | None  # "usage", "token_ids", "chunks" or "mixed"
    ttft: LatencyDistribution | None  # first token, from the intended time
    itl: LatencyDistribution | None  # between consecutive tokens
    tpot: LatencyDistribution | None  # (e2e - ttft) / (tokens - 1)
    e2e: LatencyDistribution | None  # last token, from the intended time
    queue_wait: LatencyDistribution | None  # from intended to sent: the client's own
    server_ttft: LatencyDistribution | None  # first token, from sending
    server_e2e: LatencyDistribution | None  # last token, from sending
    # share of ended requests, failed ones among them, inside the objective: TTFT from the intended
    # time, mean ITL. None without an objective.
    attained: float | None = None


def latency_distribution(
    values: Sequence[float] | npt.NDArray[np.generic],
) -> LatencyDistribution | None:
    """Return the distribution of values in nanoseconds; None when there are none."""
    if not len(values):
        return None
    array = np.asarray(values, np.float64) / _MILLISECOND
    return LatencyDistribution(
        float(array.mean()), *np.percentile(array, (50, 90, 95, 99)).tolist()
    )


def summarize(
    outcomes: Sequence[SentRequest], *, offered_requests: int, nanoseconds: int,
    slo: Slo | None = None,
) -> Summary:  # fmt: skip
    """Return the summary of a run."""
    done = [(o, o.result) for o in outcomes if isinstance(o.result, Stream)]
    streams = [stream for _, stream in done]
    tokens = sum(s.tokens for s in streams)
    chunks = sum(s.chunks for s in streams)
    seconds = nanoseconds / SECOND
    return Summary(
        seconds=seconds,
        offered_requests=offered_requests,
        completed=len(done),
        failed=len(outcomes) - len(done),
        cancelled=offered_requests - len(outcomes),
        failures=_reasons(outcomes),
        output_tokens_per_second=tokens / seconds if seconds else 0.0,
        requests_per_second=len(done) / seconds if seconds else 0.0,
        output_tokens=tokens,
        output_tokens_asked=sum(o.asked_tokens for o, _ in done),
        prompt_tokens=_total(s.prompt_tokens for s in streams),
        cached_tokens=_total(s.cached_tokens for s in streams),
        tokens_per_chunk=tokens / chunks if chunks else None,
        counted_by=_counted(streams),
        ttft=latency_distribution([s.first - o.intended for o, s in done]),
        itl=latency_distribution(np.concatenate([s.gaps for s in streams]) if streams else []),
        tpot=latency_distribution(
            [(s.last - s.first) / (s.tokens - 1) for s in streams if s.tokens > 1]
        ),
        e2e=latency_distribution([s.last - o.intended for o, s in done]),
        queue_wait=latency_distribution([o.sent - o.intended for o, _ in done]),
        server_ttft=latency_distribution([s.first - o.sent for o, s in done]),
        server_e2e=latency_distribution([s.last - o.sent for o, s in done]),
        attained=None if slo is None or not outcomes else _attained(outcomes, slo),
    )


def _attained(outcomes: Sequence[SentRequest], slo: Slo) -> float:
    inside = 0
    for sent in outcomes:
        stream = sent.result
        if isinstance(stream, Stream):
            gaps = stream.tokens - 1
            itl_s = (stream.last - stream.first) / gaps / SECOND if gaps > 0 else None
            inside += slo.attained((stream.first - sent.intended) / SECOND, itl_s)
    return inside / len(outcomes)


def _reasons(outcomes: Sequence[SentRequest]) -> list[FailureCount]:
    failures = [o.result for o in outcomes if isinstance(o.result, Failure)]
    examples = {failure.reason: failure.detail for failure in reversed(failures)}
    counts = Counter(failure.reason for failure in failures)
    return [FailureCount(reason, count, examples[reason]) for reason, count in counts.most_common()]


def _total(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _counted(streams: Sequence[Stream]) -> str | None:
    ways = {stream.counted for stream in streams}
    return None if not ways else ways.pop() if len(ways) == 1 else "mixed"
