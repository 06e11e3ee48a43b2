"""Remote KV fetch: whether another worker's cache is the cheapest source of a prompt's beginning.

It is the fourth case of the access cost in the caching game (Georgiou 2026, Eq. 6). A block that
another worker has costs the link, d(i, j), and its access there. It is fetched where that is less
than the worker's own tiers cost, or computing it again.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel_over
from pigou.control.latency_model.estimates import (
    FETCH_BASE,
    FETCH_TOKEN,
    PREFILL_TOKEN,
    Numbers,
    prefill_law,
    prefill_s,
)
from pigou.control.messages import RemoteKVFetch
from pigou.control.routing.view import Counts, FleetView, RemoteFetches

Seconds: TypeAlias = NDArray[np.float64]
#: The fields of `RemoteFetches`, in order.
FetchArrays: TypeAlias = tuple[Counts, Counts, Counts, Counts, Seconds, Seconds]


@bare_kernel_over("control/routing", "control/latency_model")
def _best_sources(
    layout: Counts, device: Counts, pending_tokens: Counts, open_: NDArray[np.bool_], best: Counts
) -> bool:
    """Write which worker of each layout has most of a prompt on its device; False for none."""
    some = False
    for i in range(best.shape[0]):
        best[i] = -1
    for w in range(layout.shape[0]):
        if layout[w] == 0 or device[w] == 0 or not open_[w]:
            continue
        first = best[layout[w]]
        if (
            first < 0
            or device[w] > device[first]
            or (device[w] == device[first] and pending_tokens[w] < pending_tokens[first])
        ):
            best[layout[w]] = w
        some = True
    return some


@bare_kernel_over("control/routing", "control/latency_model")
def _choose_fetches(
    table: Numbers, layout: Counts, best: Counts, device: Counts, cached: Counts,
    block_size: Counts, prompt: int, restore: tuple[float, float],
    links: tuple[Counts, Numbers], fetches: FetchArrays,
) -> int:  # fmt: skip
    """Write what each worker would fetch, as `RemoteFetches`; return how many would.

    `best` is by layout (`_best_sources`), `device` leading blocks, `cached` tokens in any tier,
    `restore` the shares of a token's seconds that one from host and one from storage takes, `links`
    hosts of the workers and factors between them. Ready, host and storage are what the worker has
    itself when this is called.
    """
    source, ready, host, storage, seconds, saves = fetches
    host_restore, storage_restore = restore
    hosts, factors = links
    count = 0
    for w in range(layout.shape[0]):
        peer = best[layout[w]]
        if layout[w] == 0 or peer < 0 or peer == w:
            continue
        size = block_size[w]
        blocks = min(device[peer], (prompt - 1) // size)  # the last token is computed here
        if blocks <= device[w]:
            continue
        law, token_s = prefill_law(table, w), table[PREFILL_TOKEN, w]
        left = float(prompt - cached[w])
        below = host_restore * host[w] + storage_restore * storage[w]
        without_s = prefill_s(law, 1, left, left * (prompt - 0.5 * left)) + token_s * size * below
        left = float(prompt - blocks * size)
        token_link_s = table[FETCH_TOKEN, w] * factors[hosts[peer], hosts[w]]
        link_s = table[FETCH_BASE, w] + token_link_s * (blocks - device[w]) * size
        saved_s = without_s - prefill_s(law, 1, left, left * (prompt - 0.5 * left)) - link_s
        if saved_s > 0.0:
            count += 1
            source[w], seconds[w], saves[w] = peer, link_s, saved_s
            ready[w], host[w], storage[w] = blocks * size, 0, 0
    return count


def price_fetches(
    fleet: FleetView, prompt: int, open_: NDArray[np.bool_], restore: tuple[float, float]
) -> RemoteFetches | None:
    """Return what each worker would read if it computed a prompt; None where nobody would.

    Worker i, which has o tokens on its device and c in all of its tiers, reads the r tokens that
    worker j of its layout has on its own device, the most of all such, where

        service(prompt - r) + fetch_base + fetch_token (r - o) < service(prompt - c) + restore

    `service` being what computing takes there and `restore` what bringing back from its lower
    tiers does (both as in `Toll`). What the others in i's queue save by it comes on top, and is in
    the tolls. Copies in the lower tiers of j are left out: they would have to come up first.
    """
    layouts = int(fleet.layout.max(initial=0)) + 1
    if layouts == 1:
        return None
    best = np.empty(layouts, dtype=np.int64)
    if not _best_sources(fleet.layout, fleet.device, fleet.prefill_tokens, open_, best):
        return None
    count, own = len(fleet.layout), fleet.cached(prompt)
    fetches = RemoteFetches(
        np.full(count, -1, dtype=np.int64), own.copy(), fleet.host.copy(), fleet.storage.copy(),
        np.zeros(count), np.zeros(count),
    )  # fmt: skip
    links = fleet.estimates.link_table
    readers = _choose_fetches(
        fleet.estimates.table, fleet.layout, best, fleet.device, own, fleet.block_size, prompt,
        restore, (links.hosts, links.factors), (
            fetches.source, fetches.ready, fetches.host, fetches.storage, fetches.seconds,
            fetches.saves,
        ),
    )  # fmt: skip
    return fetches if readers else None


def fetch_of(fleet: FleetView, row: int) -> RemoteKVFetch | None:
    """Return what the worker of this row would read; None where it would not."""
    reads = fleet.fetches
    if reads is None or reads.source.item(row) < 0:
        return None
    depth = reads.ready.item(row)
    mine = fleet.device.item(row) * fleet.block_size.item(row)
    return RemoteKVFetch(
        fleet.ids[reads.source.item(row)], depth, depth - mine, reads.seconds.item(row),
        reads.saves.item(row),
    )  # fmt: skip
