"""Terms: what a candidate costs, as a sum of five, in seconds.

    cost = private + urgency + toll_stream + toll_queue + toll_memory

Each takes the columns of all candidates, shape (candidates,), and returns one of that shape. The
kernel compiles the same functions for one candidate at a time.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Numbers: TypeAlias = NDArray[np.float64]
#: Names of the parts of a cost, in order; the first four are the private term.
PARTS = (
    "wait", "prefill", "transfer", "decode", "urgency", "toll_stream", "toll_queue", "toll_memory",
)  # fmt: skip


class Prospect(NamedTuple):
    """What is expected of each candidate, (candidates,); seconds where a name ends in `_s`."""

    wait_s: Numbers  # until the computing worker has computed the prompts before this one
    prefill_s: Numbers  # to compute its uncached tokens, and to bring others back from lower tiers
    transfer_s: Numbers  # to bring KV to the worker that computes, and on to the one that decodes
    decode_s: Numbers  # to decode all output tokens, beside prompts that wait on the decode worker
    streams: Numbers  # streams on the decode worker now (n)
    growth_s: Numbers  # added to each of these streams by this one: N (f(n+1) - f(n))
    stall_s: Numbers  # added to each of them by its prompt (z); 0 where prefill is remote
    delay_s: Numbers  # added to each prompt behind it
    arrivals: Numbers  # prompts a second that come to the computing worker (l)
    # loss of the next of these prompts if it goes elsewhere (e); infinity if it cannot.
    elsewhere_s: Numbers
    prefill_stored_s: Numbers  # to compute again what a remote prefill worker stores of it; else 0
    # to compute again what the decode worker stores of it, output included.
    decode_stored_s: Numbers
    decode_stored_variance: Numbers  # squared seconds, as the output's length is uncertain


class TollWeights(NamedTuple):
    """What the terms are weighed with, the same for all candidates."""

    toll: float  # share of the tolls that is charged
    rise: float  # extra weight of a second to the first token, for each second before it
    stalled: float  # seconds that streams of a decode worker lose for each second of prefill
    # blocks computed again for each that the prefill pool stores: r / (1 - r), where r of the
    # stored blocks displace one that returns, and that one displaces others.
    prefill_displaced: float
    decode_displaced: float  # the same of the decode pool


def private(p: Prospect) -> Numbers:
    """Seconds of the request itself (Georgiou 2026, Eq. 7)."""
    return p.wait_s + p.prefill_s + p.transfer_s + p.decode_s


def urgency(p: Prospect, w: TollWeights) -> Numbers:
    """Seconds before the first token weigh more, the more there are: rise T^2 / 2.

    A convex cost of delay (van Mieghem, "Dynamic Scheduling with Convex Delay Costs: The
    Generalized c-mu Rule", Annals of Applied Probability 1995).
    """
    ttft_s = p.wait_s + p.prefill_s + p.transfer_s
    return 0.5 * w.rise * ttft_s * ttft_s


def toll_stream(p: Prospect, w: TollWeights) -> Numbers:
    """Seconds that streams of the decode worker lose: n (N (f(n+1) - f(n)) + z).

    The marginal-cost toll of the routing game (Pigou 1920; Georgiou 2026, Eq. 7), and what a
    prompt that is computed among them takes from each.
    """
    return w.toll * p.streams * (p.growth_s + p.stall_s)


def toll_queue(p: Prospect, w: TollWeights) -> Numbers:
    """Seconds that later prompts lose: min(l w (Q + w / 2), e) (1 + rise (Q + w) / 2).

    Those who come while this one waits are delayed by w, those who come while it is computed by
    half of that in the mean. If the next goes elsewhere, all is as if this one had not come, so
    they lose no more than it does (Naor, "The Regulation of Queue Size by Levying Tolls",
    Econometrica 1969). Their seconds are as urgent as its own: in the mean they wait for half.
    """
    lost_s = np.minimum(p.arrivals * p.delay_s * (p.wait_s + 0.5 * p.delay_s), p.elsewhere_s)
    return w.toll * lost_s * (1.0 + 0.5 * w.rise * (p.wait_s + p.delay_s))


def toll_memory(p: Prospect, w: TollWeights) -> Numbers:
    """Seconds that are computed again for the blocks which this request's push out.

    They are taken to lie as deep in their prompts, and to be as urgent, as those stored here. The
    square of the decode worker's is a mean over the lengths that the output may have.
    """
    prefill_s = p.prefill_stored_s * (1.0 + w.stalled + 0.5 * w.rise * p.prefill_stored_s)
    decode_s = p.decode_stored_s * (1.0 + w.stalled + 0.5 * w.rise * p.decode_stored_s)
    decode_s += 0.5 * w.rise * p.decode_stored_variance
    return w.toll * (w.prefill_displaced * prefill_s + w.decode_displaced * decode_s)
