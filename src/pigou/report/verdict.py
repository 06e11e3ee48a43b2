"""Verdicts: the conclusion of a page in one sentence, and its reasons."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pigou.report.figure import duration
from pigou.report.run_record import RunRecord, Samples

#: Share of offered requests that may fail before a run is bad, not only fair.
MAX_FAILED_SHARE = 0.01
#: A queue that grew by this factor from the second to the last quarter of the run.
QUEUE_GROWTH = 2.0
#: Share of the time to first token (P99) that may be waiting at the client.
MAX_CLIENT_SHARE = 0.5
#: Preemptions for each served request beyond which KV memory counts as short.
MAX_PREEMPTIONS = 0.05
#: Difference of busy shares of workers of one role beyond which they count as uneven.
MAX_UNEVEN = 0.3
#: Price of Anarchy of routing beyond which it is named, where its interval is above 1, too.
MAX_ANARCHY = 1.1
#: Relative difference below which two figures count as equal.
TIE = 0.01

#: Figures that decide between runs: key, statistic, name, and whether more is better.
_JUDGED = (
    ("e2e_s", "mean", "mean time", False),
    ("ttft_s", "p99", "time to first token, p99", False),
    ("itl_s", "p99", "time between tokens, p99", False),
    ("throughput_rps", "", "throughput", True),
)


@dataclass(frozen=True, slots=True)
class PageVerdict:
    """The conclusion of a page."""

    level: Literal["good", "fair", "bad"]  # `good`, `fair` (to be looked at) or `bad`
    text: str
    reasons: tuple[str, ...] = ()  # one a line, the weightiest first


def of_run(run: RunRecord) -> PageVerdict:
    """Return the verdict of one run, by the thresholds of this file."""
    figures = run.figures
    total, served = int(figures["offered"]), int(figures["completed"])
    if not served:
        return PageVerdict("bad", "Nothing was served.")
    bad, fair = _lost_requests(figures), _weaknesses(run)
    if run.samples is not None and (growth := _queue_growth(run.samples)) >= QUEUE_GROWTH:
        bad.append(
            f"The fleet did not keep up: {growth:.1f} times as many requests waited at the end "
            "as earlier. More workers, or a lower rate, are needed."
        )
    ttft = figures["ttft_s"]["p99"]
    first = "" if ttft is None else f" 99% of first tokens came within {duration(ttft)}."
    if bad:
        return PageVerdict("bad", f"{served:,} of {total:,} requests were served.", (*bad, *fair))
    if fair:
        count = "One thing needs" if len(fair) == 1 else f"{len(fair)} things need"
        return PageVerdict("fair", f"All requests were served; {count} a look.{first}", tuple(fair))
    return PageVerdict("good", f"The fleet kept up: all {served:,} requests were served.{first}")


def _lost_requests(figures: Mapping[str, Any]) -> list[str]:
    total = int(figures["offered"])
    lost = [
        (name, int(figures.get(key) or 0))
        for key, name in (("failed", "failed"), ("unfinished", "were unfinished at the end"))
    ]
    return [
        f"{count / total:.1%} of offered requests {name}."
        for name, count in lost
        if count > MAX_FAILED_SHARE * total
    ]


def _weaknesses(run: RunRecord) -> list[str]:
    figures, weak = run.figures, []
    served = int(figures["completed"])
    failed = int(figures.get("failed") or 0) + int(figures.get("unfinished") or 0)
    if 0 < failed <= MAX_FAILED_SHARE * figures["offered"]:
        weak.append(f"{failed:,} requests failed, or were unfinished at the end.")
    wait, ttft = figures["client_wait_s"]["p99"], figures["ttft_s"]["p99"]
    if wait and ttft and wait > MAX_CLIENT_SHARE * ttft:
        weak.append(
            f"The client is the bottleneck: requests waited {duration(wait)} (p99) for a "
            "connection, and the fleet does not see that."
        )
    if int(figures.get("preemptions") or 0) > MAX_PREEMPTIONS * served:
        weak.append(
            f"KV memory is short: {figures['preemptions']:,} preemptions. More blocks, fewer "
            "sequences at once, or a host tier would help."
        )
    weak += _uneven(figures.get("workers") or ())
    poa = figures.get("poa") or {}
    low, high = (poa.get("interval") or {}).get("routing") or (0.0, 0.0)
    if low > 1.0 and poa["routing"] > MAX_ANARCHY:
        weak.append(
            f"Routing costs {poa['routing'] - 1:.0%} over the best assignment (Price of Anarchy, "
            f"90% interval {low - 1:.0%} to {high - 1:.0%})."
        )
    return weak


def _uneven(workers: Sequence[Mapping[str, Any]]) -> list[str]:
    roles: dict[str, list[tuple[float, str]]] = {}
    for worker in workers:
        if isinstance(worker.get("busy"), int | float):
            role = str(worker.get("role", ""))
            roles.setdefault(role, []).append((float(worker["busy"]), str(worker.get("id", ""))))
    uneven = []
    for role, shares in roles.items():
        (low, idle), (high, busy) = min(shares), max(shares)
        if high - low > MAX_UNEVEN:
            uneven.append(
                f"Load is uneven among {role or 'all'} workers: {busy} computes {high:.0%} of the "
                f"time, {idle} {low:.0%}."
            )
    return uneven


def _queue_growth(samples: Samples) -> float:
    """Return waiting requests in the last quarter over those in the second; 0 where few wait."""
    columns = [samples.fleet[name] for name in ("queued", "waiting") if name in samples.fleet]
    waiting = [sum(value or 0.0 for value in sample) for sample in zip(*columns, strict=True)]
    quarter = len(waiting) // 4
    if not quarter:
        return 0.0
    early = statistics.fmean(waiting[quarter : 2 * quarter])
    late = statistics.fmean(waiting[-quarter:])
    return late / max(early, 1.0) if late > 1.0 else 0.0


def of_runs(runs: Sequence[RunRecord], labels: Sequence[str]) -> PageVerdict:
    """Return which of several runs is best, figure by figure, and by how much."""
    winners: list[str] = []
    reasons: list[str] = []
    for key, part, name, more in _JUDGED:
        values = [_figure(run.figures.get(key), part) for run in runs]
        known = [(value, label) for value, label in zip(values, labels, strict=True) if value]
        if len(known) < 2:
            continue
        ordered = sorted(known, key=lambda pair: pair[0], reverse=more)
        (best, winner), (second, other) = ordered[0], ordered[1]
        gap = abs(second / best - 1.0)
        shown = f"{best:.3g}/s" if more else duration(best)
        if gap < TIE:
            reasons.append(f"{name}: {winner} and {other} are equal ({shown}).")
            continue
        winners.append(winner)
        reasons.append(f"{name}: {winner}, {shown}; next is {other}, {gap:.0%} behind.")
    lossy = [
        label for run, label in zip(runs, labels, strict=True) if _lost_requests(run.figures)
    ]  # fmt: skip
    reasons += [f"{label} lost requests; its latencies are of those served." for label in lossy]
    level: Literal["good", "fair"] = "fair" if lossy or len(set(winners)) > 1 else "good"
    if not winners:
        return PageVerdict("fair", "No run is ahead in any figure.", tuple(reasons))
    if len(set(winners)) == 1:
        return PageVerdict(
            level, f"{winners[0]} is best, or equal, in every figure.", tuple(reasons)
        )
    return PageVerdict(level, "No run is best in everything.", tuple(reasons))


def _figure(value: Any, part: str) -> float | None:
    if part:
        value = value.get(part) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) and value > 0 else None


def of_rows(rows: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> PageVerdict:
    """Return how far an experiment's rows are from the paper's, figure by figure."""
    errors: dict[str, list[float]] = {}
    for row in rows:
        for key, error in (row.get("relative_error") or {}).items():
            if isinstance(error, int | float):
                errors.setdefault(key, []).append(abs(float(error)))
    if not errors:
        return PageVerdict("good", f"{len(rows)} rows; the paper has no figures for them.")
    medians = {key: statistics.median(values) for key, values in errors.items()}
    reasons = tuple(
        f"{names.get(key, key)}: {median:.1%} from the paper's (median of {len(errors[key])} rows, "
        f"at most {max(errors[key]):.0%})."
        for key, median in medians.items()
    )
    close = sum(median <= 0.1 for median in medians.values())
    level: Literal["good", "fair", "bad"] = (
        "good" if close == len(medians) else "fair" if close else "bad"
    )
    text = f"{close} of {len(medians)} figures are within 10% of the paper's in the median."
    return PageVerdict(level, text, reasons)
