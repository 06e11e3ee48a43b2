"""Dynamo's division of a GPU budget, in proportion to what pools ask for."""

from __future__ import annotations

import math

#: Why a proposal was held at what there is, or changed to what the budget allows.
HELD, RECONCILED = "gpu_budget_guard_hold", "gpu_budget_reconcile"


def clamp_to_budget(
    prefill: int,
    decode: int,
    gpus: tuple[int, int],
    budget: tuple[int, int | None],
    min_workers: int | tuple[int, int] = 1,
) -> tuple[int, int]:
    """Return (prefill, decode) workers within [min - tolerance, max] GPUs.

    With total = P g_P + D g_D above max: P = floor(P max / total), D gets the rest; below min it is
    mirrored with ceil. (0, 0) if max is below both minimums. Dynamo 1.6.1, `core/budget.py`.
    `budget` is (min, max) GPUs, None for no limit; the tolerance is the larger of `gpus`.
    """
    gpus_p, gpus_d = gpus
    low, high = budget
    min_p, min_d = _minimum(min_workers)
    total = prefill * gpus_p + decode * gpus_d
    if high is not None and total > high:
        if min_p * gpus_p + min_d * gpus_d > high:
            return 0, 0
        top = (high - min_d * gpus_d) // gpus_p
        count = max(min_p, min(top, math.floor(prefill * high / total)))
        return count, max((high - count * gpus_p) // gpus_d, min_d)
    if total >= low - _tolerance(gpus, budget):
        return prefill, decode
    share = low / total if total > 0 else 0.0
    count = max(math.ceil(prefill * share if total > 0 else low / 2 / gpus_p), min_p)
    rest = max(math.ceil(max(low - count * gpus_p, 0) / gpus_d), min_d)
    grown = max(rest, decode)
    if high is not None and count * gpus_p + grown * gpus_d > high:
        if rest >= decode:
            return prefill, decode
        pair = (prefill, decode), (count, decode)
        return fit_to_budget(*pair, gpus, budget, min_workers)
    return count, grown


def fit_to_budget(
    current: tuple[int, int],
    proposed: tuple[int, int],
    gpus: tuple[int, int],
    budget: tuple[int, int | None],
    min_workers: int | tuple[int, int] = 1,
) -> tuple[int, int]:
    """Return the pair nearest to a proposal in the budget (`fit_directional_budget_pair`)."""
    low, high = budget
    low -= _tolerance(gpus, budget)
    minimum = _minimum(min_workers)
    distances = [abs(b - a) for a, b in zip(current, proposed, strict=True)]
    opposing = (proposed[0] - current[0]) * (proposed[1] - current[1]) < 0
    ranges = [
        range(max(min(a, b), m), max(a, b) + 1)
        for a, b, m in zip(current, proposed, minimum, strict=True)
    ]
    best: tuple[tuple[int, ...], tuple[int, int]] | None = None
    for p in ranges[0]:
        for d in ranges[1]:
            total = p * gpus[0] + d * gpus[1]
            if total < low or (high is not None and total > high):
                continue
            moved = abs(p - current[0]), abs(d - current[1])
            if opposing and (moved[0] == 0) != (moved[1] == 0):
                continue
            distance = abs(proposed[0] - p) + abs(proposed[1] - d)
            skew = abs(moved[0] * distances[1] - moved[1] * distances[0])
            score = (distance, skew, -sum(moved), p, d)
            if best is None or score < best[0]:
                best = score, (p, d)
    return current if best is None else best[1]


def guard_pair(
    current: tuple[int, int],
    proposed: tuple[int, int],
    gpus: tuple[int, int],
    budget: tuple[int, int | None],
    min_workers: int | tuple[int, int] = 1,
) -> tuple[tuple[int, int], str]:
    """Return what the budget allows, and why (`guard_disagg_scaling_budget`, Dynamo 1.6.1)."""
    low, high = budget
    used = current[0] * gpus[0] + current[1] * gpus[1]
    if (high is not None and used > high) or used < low - _tolerance(gpus, budget):
        return clamp_to_budget(*current, gpus, budget, min_workers), RECONCILED
    steps = [b - a for a, b in zip(current, proposed, strict=True)]
    up, down = max(steps) > 0, min(steps) < 0
    at_low = used <= low and down
    at_high = high is not None and used >= high and up
    if (at_low and not up) or (at_high and not down):
        return current, HELD
    if at_low or at_high:
        fitted = fit_to_budget(current, proposed, gpus, budget, min_workers)
        return fitted, HELD if fitted == current else ""
    final = clamp_to_budget(*proposed, gpus, budget, min_workers)
    between = all(
        min(a, b) <= c <= max(a, b) for a, b, c in zip(current, proposed, final, strict=True)
    )
    return (final, "") if between else (current, HELD)


def guard_single(
    current: int, proposed: int, gpus: int, budget: tuple[int, int | None], min_workers: int
) -> tuple[int, str]:
    """Return the same of one pool alone. `guard_single_scaling_budget` of Dynamo 1.6.1."""
    low, high = budget
    used = current * gpus
    tolerance = gpus if low > 0 and high is not None else 0
    if (high is not None and used > high) or used < low - tolerance:
        return _clamp_single(current, gpus, budget, min_workers), RECONCILED
    if (used <= low and proposed < current) or (
        high is not None and used >= high and proposed > current
    ):
        return current, HELD
    final = _clamp_single(proposed, gpus, budget, min_workers)
    if min(current, proposed) <= final <= max(current, proposed):
        return final, ""
    return current, HELD


def _clamp_single(count: int, gpus: int, budget: tuple[int, int | None], min_workers: int) -> int:
    low, high = budget
    if high is not None and count * gpus > high:
        return 0 if min_workers * gpus > high else max(high // gpus, min_workers)
    tolerance = gpus if low > 0 and high is not None else 0
    if count * gpus >= low - tolerance:
        return count
    return max(math.ceil(low / gpus), min_workers)


def _tolerance(gpus: tuple[int, int], budget: tuple[int, int | None]) -> int:
    return max(gpus) if budget[1] is not None else 0


def _minimum(min_workers: int | tuple[int, int]) -> tuple[int, int]:
    return (min_workers, min_workers) if isinstance(min_workers, int) else min_workers
