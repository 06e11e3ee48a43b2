"""Auctions: a round of Themis' partial auction, and the double Dutch auction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from pigou.games import Floats, checked
from pigou.games.fisher import fisher
from pigou.games.partial_allocation import partial_allocation


@dataclass(frozen=True, slots=True)
class ThemisRound:
    """A round's outcome; `fractions` is nan for who did not bid."""

    allocation: Floats  # (apps, goods)
    bidders: tuple[int, ...]  # worst-off first
    fractions: Floats  # (apps,): kept by bidders
    idle: Floats  # (goods,): wanted by no other app


def themis_round(
    values: ArrayLike, finish_ratios: ArrayLike, supplies: ArrayLike | None = None, *,
    fairness: float = 0.8,
) -> ThemisRound:  # fmt: skip
    """Offer goods to the worst-off apps, and what they do not keep to the others (NSDI 2020).

    `finish_ratios` (apps,) are rho = T_shared / T_alone. The 1 - `fairness` of the apps with the
    highest rho bid (one at least), by their `values` (apps, goods); `partial_allocation` decides.
    The remainder is split proportionally fair between those that did not bid.
    """
    v = checked("values", values, (None, None))
    apps, goods = v.shape
    rho = checked("finish_ratios", finish_ratios, (apps,))
    supply = checked("supplies", np.ones(goods) if supplies is None else supplies, (goods,))
    if not 0.0 <= fairness <= 1.0:
        raise ValueError(f"fairness is {fairness}: give a number from 0 to 1")
    count = min(apps, max(1, math.ceil((1.0 - fairness) * apps - 1e-9)))
    bidders = np.argsort(-rho, kind="stable")[:count]
    won = partial_allocation(v[bidders], supply)
    allocation, fractions = np.zeros_like(v), np.full(apps, np.nan)
    allocation[bidders], fractions[bidders] = won.allocation, won.fractions
    others = np.setdiff1d(np.arange(apps), bidders)
    allocation[others] = fisher(v[others], supplies=won.burnt).allocation
    idle = np.maximum(supply - allocation.sum(axis=0), 0.0)
    return ThemisRound(allocation, tuple(bidders.tolist()), fractions, idle)


@dataclass(frozen=True, slots=True)
class Trades:
    """Pairs (buyer, seller) that trade a unit each at one price; None without a trade."""

    pairs: tuple[tuple[int, int], ...]
    price: float | None
    surplus: float  # sum of bids less asks of the pairs


def double_dutch(bids: Sequence[float], asks: Sequence[float], *, tick: float = 0.0) -> Trades:
    """Trade by two clocks: the buyers' falls and the sellers' rises, in turn, until they cross.

    A buyer accepts at the first price at or below its bid, a seller at or above its ask; ties go
    to the first. `tick` rounds the clocks' prices. All pairs pay the price at which they cross.
    """
    offers = checked("bids", list(bids), (None,)), checked("asks", list(asks), (None,))
    if not 0.0 <= tick < math.inf:
        raise ValueError(f"tick is {tick}: give a price step of at least 0; 0 is continuous")
    down = np.floor(offers[0] / tick) * tick if tick else offers[0]
    up = np.ceil(offers[1] / tick) * tick if tick else offers[1]
    buyers, sellers = np.argsort(-down, kind="stable"), np.argsort(up, kind="stable")
    falls, rises = [*down[buyers].tolist(), -math.inf], [*up[sellers].tolist(), math.inf]
    rising, count = 0.0, 0
    while True:
        falling = falls[count]
        if falling < rising:
            price = rising  # the buyers' clock meets the sellers' before anybody accepts
            break
        if rises[count] > falling:
            price = falling
            break
        rising = rises[count]
        count += 1
    pairs = tuple(zip(buyers[:count].tolist(), sellers[:count].tolist(), strict=True))
    surplus = float(sum(offers[0][b] - offers[1][s] for b, s in pairs))
    return Trades(pairs, price if pairs else None, surplus)
