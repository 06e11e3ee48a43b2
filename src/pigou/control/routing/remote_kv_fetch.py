"""Remote KV fetch: whether to read a prompt's beginning from another worker's cache.

Fourth case of the access cost in the caching game (Georgiou 2026, Eq. 6): a fetch pays if it costs
less than the worker's own tiers or recomputing.
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
from pigou.control.routing.view import FleetView, RemoteFetches
from pigou.request import Counts

Seconds: TypeAlias = NDArray[np.float64]
#: The fields of `RemoteFetches`, in order.
FetchArrays: TypeAlias = tuple[Counts, Counts, Counts, Counts, Seconds, Seconds]


@bare_kernel_over("control/routing", "control/latency_model")
def _best_sources(
    layout: Counts, device: Counts, pending_tokens: Counts, open_: NDArray[np.bool_], best: Counts
) -> bool:
    """Write the worker of each layout with most of a prompt on its device; False for none."""
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

    `best` is by layout, `device` in blocks, `cached` in tokens of any tier; `restore` has the
    seconds per token from host and storage, relative to prefill.
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
    """Return each worker's best fetch for a prompt; None if no fetch pays.

        service(prompt - r) + fetch_base + fetch_token (r - o) < service(prompt - c) + restore

    The worker has o tokens on its device and c in all tiers; r are on the device of the worker of
    its layout that has most. `restore` is the time to load from its own lower tiers.
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
    """Return the fetch of the worker in this row; None for none."""
    reads = fleet.fetches
    if reads is None or reads.source.item(row) < 0:
        return None
    depth = reads.ready.item(row)
    mine = fleet.device.item(row) * fleet.block_size.item(row)
    return RemoteKVFetch(
        fleet.ids[reads.source.item(row)], depth, depth - mine, reads.seconds.item(row),
        reads.saves.item(row),
    )  # fmt: skip
