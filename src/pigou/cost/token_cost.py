"""Cost of tokens: dollars for a million of them, and the shares of a step that streams have."""

from __future__ import annotations

import math
from collections.abc import Sequence

MILLION = 1e6


def usd_per_million(usd: float, tokens: float) -> float:
    """Return dollars for a million tokens; NaN for no tokens."""
    return usd / tokens * MILLION if tokens > 0 else math.nan


def usd_per_million_at(
    usd_per_gpu_hour: float, gpus: float, tok_s: float, attained: float = 1.0
) -> float:
    """Return dollars for a million tokens that are served inside the objective.

    Price of a GPU-hour x GPUs / 3600 / (tokens a second) x 10^6 / attained share.

    Args:
        tok_s: tokens a second of all.
        attained: share of the requests inside the objective, above 0.
    """
    return usd_per_million(usd_per_gpu_hour * gpus / 3600.0, tok_s) / attained


def number_or_none(value: float) -> float | None:
    """Return a number as JSON has it: None for NaN."""
    return None if math.isnan(value) else value


def step_shares(kv_bytes: Sequence[float], weight_bytes: float) -> list[float]:
    """Return the share of a decode step that each of its streams pays, (streams,); they sum to 1.

    (KV bytes + W/B) / (all KV bytes + W): a stream pays what is read for it alone, and an equal
    part of the weights W, which are read once for the batch of B.
    """
    total, equal = sum(kv_bytes) + weight_bytes, weight_bytes / len(kv_bytes)
    return [(size + equal) / total for size in kv_bytes]


def step_tolls(kv_bytes: Sequence[float], weight_bytes: float) -> list[float]:
    """Return the share of a decode step that each stream adds to it, (streams,).

    KV bytes / (all KV bytes + W): the marginal price, W being read without the stream, too. The
    sum is below 1 by the weights' part: marginal prices do not pay the bill.
    """
    total = sum(kv_bytes) + weight_bytes
    return [size / total for size in kv_bytes]


def storage_usd_per_reuse(
    byte_second_usd: float, size: float, residency_s: float, reuses: float
) -> float:
    """Return dollars of storage for each reuse: bytes x seconds x price / reuses."""
    return byte_second_usd * size * residency_s / reuses
