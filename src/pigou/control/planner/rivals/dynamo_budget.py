"""Dynamo's division of a GPU budget, in proportion to what pools ask for."""

from __future__ import annotations

import math


def clamp_to_budget(
    prefill: int,
    decode: int,
    gpus: tuple[int, int],
    budget: tuple[int, int | None],
    min_workers: int = 1,
) -> tuple[int, int]:
    """Return (prefill, decode) workers within [min - tolerance, max] GPUs.

    With total = P g_P + D g_D above max: P = floor(P max / total), at least `min_workers` and so
    that decode has its minimum, and D gets the rest. Below min - tolerance it is mirrored: P =
    ceil(P min / total), and D gets the rest. A maximum below the minimum of both gives (0, 0).
    Dynamo 1.x, `core/budget.py`. The floor takes workers from the smaller pool as demand grows.

    Args:
        prefill, decode: workers that are asked for.
        gpus: of one prefill worker and of one decode worker.
        budget: least and most GPUs together; None for no limit. The tolerance is the larger of
            `gpus`.
        min_workers: of each pool.
    """
    gpus_p, gpus_d = gpus
    low, high = budget
    total = prefill * gpus_p + decode * gpus_d
    if high is not None and min_workers * (gpus_p + gpus_d) > high:
        return 0, 0
    if high is not None and total > high:
        top = (high - min_workers * gpus_d) // gpus_p
        count = min(max(math.floor(prefill * high / total), min_workers), top)
        return count, max((high - count * gpus_p) // gpus_d, min_workers)
    if 0 < total < low - max(gpus):
        count = max(math.ceil(prefill * low / total), min_workers)
        rest = max(math.ceil((low - count * gpus_p) / gpus_d), min_workers)
        if high is not None:
            rest = min(rest, (high - count * gpus_p) // gpus_d)
        return count, rest
    return prefill, decode
