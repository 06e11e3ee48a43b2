"""Detectors of modes 4, 5, 11, 12, 17 and 19: what clients send, and what the fleet makes of it."""

from __future__ import annotations

from functools import partial
from itertools import groupby

from pigou.diagnosis.mode import ModeEvidence, ModeFinding
from pigou.diagnosis.modes import MODES
from pigou.diagnosis.signals import Series, correlation, finding, mean, need, stretch
from pigou.windows.observations import FleetObservation, TenantObservation


def prefix_miss_storm(series: Series) -> ModeFinding | None:
    """Mode 4: the hit ratio falls, while as many requests come."""
    mode = MODES[4]
    limits = mode.limits
    if not any(window.total("queried_tokens") for window in series):
        need((None,), "hits of prefix caches")
    best: ModeFinding | None = None
    for at in range(3, len(series)):
        recent = _next(series[at:], mode.lasts_s)
        if not recent:
            break
        before = series[:at]
        known, now = _hit_ratio(before), _hit_ratio(recent)
        prefill, requests = (
            _rate(recent, name) / max(_rate(before, name), 1e-9)
            for name in ("prefill_tokens", "arrived")
        )
        if (
            sum(window.arrived for window in recent) >= limits["count"]
            and known > limits["known"] and now < limits["drop"] * known
            and prefill > limits["prefill"] and requests < limits["requests"]
        ):  # fmt: skip
            best = finding(mode, series[at:], [
                ModeEvidence("hit ratio", now, "", limits["drop"] * known),
                ModeEvidence("hit ratio before", known, ""),
                ModeEvidence("prefill tokens", prefill, "times", limits["prefill"]),
                ModeEvidence("requests a second", requests, "times", limits["requests"]),
            ])  # fmt: skip
            break
    return best


def _next(series: Series, seconds: float) -> Series:
    """Return the first windows that last so long; none where there are too few."""
    total = 0.0
    for count, window in enumerate(series, 1):
        total += window.seconds
        if total >= seconds:
            return series[:count]
    return ()


def _hit_ratio(series: Series) -> float:
    queried = sum(window.total("queried_tokens") or 0 for window in series)
    return sum(window.total("hit_tokens") or 0 for window in series) / queried if queried else 0.0


def _rate(series: Series, name: str) -> float:
    total = sum(w.arrived if name == "arrived" else w.total(name) or 0 for w in series)
    return total / sum(window.seconds for window in series)


def semantic_staleness(series: Series) -> ModeFinding | None:
    """Mode 5: cached answers older than their sources, or disliked."""
    need((w.answer_hits if w.answer_hits is not None or not w.feedbacks else 0 for w in series),
         "hits of a semantic cache, users' feedback")  # fmt: skip
    mode = MODES[5]
    limits = mode.limits
    hits, feedbacks = sum(w.answer_hits or 0 for w in series), sum(w.feedbacks for w in series)
    stale = sum(w.stale_answer_hits for w in series) / max(hits, 1)
    disliked = sum(w.downvotes for w in series) / max(feedbacks, 1)
    is_stale = hits >= limits["answers"] and stale > limits["stale"]
    is_disliked = feedbacks >= limits["answers"] and disliked > limits["disliked"]
    if not is_stale and not is_disliked:
        return None
    shown = [w for w in series if w.stale_answer_hits or w.downvotes]
    return finding(mode, shown, [
        ModeEvidence("stale hits", stale, "", limits["stale"]),
        ModeEvidence("disliked answers", disliked, "", limits["disliked"]),
    ])  # fmt: skip


def noisy_neighbour(series: Series) -> ModeFinding | None:
    """Mode 11: a tenant with much more than its share while others wait."""
    mode = MODES[11]
    limits = mode.limits
    if not any(len(window.tenants) > 1 for window in series):
        need((None,), "tenants: there is one at most")
    names = dict.fromkeys(t.tenant for window in series for t in window.tenants)
    best: ModeFinding | None = None
    best_shown: Series = ()
    for name in names:
        shown = stretch(series, mode, partial(_is_noisy, name, limits))
        if len(shown) <= len(best_shown):
            continue
        best_shown = shown
        share = mean(_shares(w, name)[0] for w in shown)
        fair = mean(_shares(w, name)[1] for w in shown)
        others = mean(sum(t.waiting for t in w.tenants if t.tenant != name) for w in shown)
        best = finding(mode, shown, [
            ModeEvidence("share of KV or tokens", share, "", _limit(fair, limits["times"]), name),
            ModeEvidence("its weight's share", fair, "", None, name),
            ModeEvidence("requests of others that wait", others, "requests", limits["waiting"]),
        ])  # fmt: skip
    return best


def _is_noisy(name: str, limits: dict[str, float], window: FleetObservation) -> bool:
    share, fair = _shares(window, name)
    others = sum(t.waiting for t in window.tenants if t.tenant != name)
    return fair < 1.0 and share > _limit(fair, limits["times"]) and others > limits["waiting"]


def _limit(fair: float, times: float) -> float:
    """Return the share over which a tenant is noisy: twice its own, or half of what others have."""
    return min(times * fair, (1.0 + fair) / 2)


def _shares(window: FleetObservation, name: str) -> tuple[float, float]:
    """Return a tenant's share of what was served, and of the weights."""

    def used(tenant: TenantObservation) -> float:
        return tenant.tokens if tenant.kv_token_s is None else tenant.kv_token_s

    total = sum(used(t) for t in window.tenants)
    weights = sum(t.weight for t in window.tenants)
    own = [t for t in window.tenants if t.tenant == name]
    if not own or not total:
        return 0.0, 1.0
    return used(own[0]) / total, own[0].weight / weights


def retry_storm(series: Series) -> ModeFinding | None:
    """Mode 12: the same requests again, the more the longer they wait."""
    need((window.repeated for window in series), "requests that came again")
    mode = MODES[12]
    limits = mode.limits

    def share(window: FleetObservation) -> float:
        return (window.repeated or 0) / window.arrived if window.arrived else 0.0

    shown = stretch(series, mode, lambda window: share(window) > limits["share"])
    repeated = sum(window.repeated or 0 for window in shown)
    if repeated < limits["requests"]:
        return None
    queues = [window.waiting for window in series]
    rises = correlation([share(window) for window in series], queues) > 0
    total = repeated / sum(window.arrived for window in shown)
    if not rises and total < limits["flat"]:
        return None
    return finding(mode, shown, [
        ModeEvidence("requests that came again", total, "", limits["share"]),
        ModeEvidence("requests that wait", mean(w.waiting for w in shown), "requests"),
    ])  # fmt: skip


def under_use(series: Series) -> ModeFinding | None:
    """Mode 17: little work, for long."""
    need((w.busy for window in series for w in window.workers), "the time that workers compute")
    mode = MODES[17]
    limits = mode.limits

    def busy(window: FleetObservation) -> float:
        return mean(worker.busy for worker in window.decoders)

    def shows(window: FleetObservation) -> bool:
        return busy(window) < limits["busy"] and window.waiting < limits["waiting"]

    shown = stretch(series, mode, shows)
    if not shown:
        return None
    return finding(mode, shown, [
        ModeEvidence("workers busy", mean(map(busy, shown)), "", limits["busy"]),
        ModeEvidence("running", mean(w.running for w in shown), "requests"),
        ModeEvidence("workers", float(len(shown[-1].workers)), ""),
    ])  # fmt: skip


def back_pressure_failure(series: Series) -> ModeFinding | None:
    """Mode 19: failures while the queue grows, and nothing is refused."""
    mode = MODES[19]
    limits = mode.limits
    best = max(map(_growth, _unrefused(series)), key=len, default=())
    grows = best and best[-1].waiting > max(limits["waiting"], 2 * best[0].waiting)
    if not grows or sum(map(_failures, best)) < limits["failures"]:
        return None
    if sum(window.seconds for window in best) < mode.lasts_s:
        return None
    return finding(mode, best, [
        ModeEvidence("failed requests", float(sum(map(_failures, best))), "", 0.0),
        ModeEvidence("requests that wait, at the end", best[-1].waiting, "requests",
                     limits["waiting"]),
        ModeEvidence("refused requests", 0.0, ""),
    ])  # fmt: skip


def _failures(window: FleetObservation) -> int:
    return window.failed + int(window.total("out_of_memory") or 0)


def _unrefused(series: Series) -> list[Series]:
    """Return the stretches of windows in which nothing was refused."""
    return [tuple(run) for refuses, run in groupby(series, lambda w: w.refused > 0) if not refuses]


def _growth(run: Series) -> Series:
    """Return a stretch from its first window to that with the longest queue."""
    return run[: max(range(len(run)), key=lambda at: run[at].waiting) + 1]
