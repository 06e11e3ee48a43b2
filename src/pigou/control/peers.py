"""Reading from another worker's cache: whether it is the cheapest way to a prompt's beginning.

The fourth case of the access cost in the caching game (Georgiou 2026, Eq. 6): a block that another
worker has costs the link, d(i, j), and its access there; it is taken where that is less than the
worker's own tiers cost, or computing it again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pigou.control.messages import Read
from pigou.control.routing.remote_kv_fetch import RemoteFetches, best_sources, choose_fetches
from pigou.control.routing.view import FleetView


def price_fetches(
    fleet: FleetView, prompt: int, open_: NDArray[np.bool_], restore: tuple[float, float]
) -> RemoteFetches | None:
    """Return what each worker would read if it computed a prompt of so many tokens.

    Worker i, which has o tokens on its device and c in all of its tiers, reads the r tokens that
    worker j of its layout has on its own device, the most of all such, where

        service(prompt - r) + fetch_base + fetch_token (r - o) < service(prompt - c) + restore

    `service` being what computing takes there and `restore` what bringing back from its lower
    tiers does (both as in `Toll`). What the others in i's queue save by it comes on top, and is in
    the tolls. Copies in the lower tiers of j are left out: they would have to come up first.

    Args:
        fleet: as the request sees it.
        prompt: tokens.
        open_: workers that may be used, (workers,).
        restore: shares of a token's seconds that one from host and one from storage takes.

    Returns:
        None where nobody would.
    """
    layouts = int(fleet.layout.max(initial=0)) + 1
    if layouts == 1:
        return None
    best = np.empty(layouts, dtype=np.int64)
    if not best_sources(fleet.layout, fleet.device, fleet.prefill_tokens, open_, best):
        return None
    count, own = len(fleet.layout), fleet.cached(prompt)
    fetches = RemoteFetches(
        np.full(count, -1, dtype=np.int64), own.copy(), fleet.host.copy(), fleet.storage.copy(),
        np.zeros(count), np.zeros(count),
    )  # fmt: skip
    readers = choose_fetches(
        fleet.estimates.table, fleet.layout, best, fleet.device, own, fleet.block_size, prompt,
        restore, (
            fetches.source, fetches.ready, fetches.host, fetches.storage, fetches.seconds,
            fetches.saves,
        ),
    )  # fmt: skip
    return fetches if readers else None


def read_of(fleet: FleetView, row: int) -> Read | None:
    """Return what the worker of this row would read; None where it would not."""
    reads = fleet.fetches
    if reads is None or reads.source.item(row) < 0:
        return None
    depth = reads.ready.item(row)
    mine = fleet.device.item(row) * fleet.block_size.item(row)
    return Read(
        fleet.ids[reads.source.item(row)], depth, depth - mine, reads.seconds.item(row),
        reads.saves.item(row),
    )  # fmt: skip
