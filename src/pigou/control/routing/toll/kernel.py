"""Prospects of each candidate, and the terms compiled: one pass over the candidates.

Groups are passed as plain tuples, which numba recognises faster than named ones.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel_over, inlined
from pigou.control.latency_model.estimates import (
    ARRIVALS,
    CONTEXT_TOKEN,
    FLEET_ARRIVALS,
    INTERFERENCE_TOKEN,
    MEAN_CONTEXT,
    MEAN_PREFILL,
    PREFILL_BASE,
    PREFILL_PER_TOKEN,
    PREFILL_TOKEN,
    TRANSFER_BASE,
    TRANSFER_TOKEN,
    Numbers,
    interference_law,
    interference_s,
    itl_law,
    itl_s,
    later_interference_s,
    prefill_law,
    prefill_s,
)
from pigou.control.routing.toll import terms
from pigou.control.routing.toll.terms import PARTS, Prospect, TollWeights
from pigou.control.routing.view import Candidates, FleetView
from pigou.control.state import PrefillBacklog
from pigou.request import Counts, Flags, Request

Indices: TypeAlias = NDArray[np.int32]
_OVER = ("control/routing/toll", "control/latency_model")
#: Share of stored blocks that displace one which returns, at most: at 1 the series has no end.
_MAX_DISPLACED = 0.9
_PARTS = len(PARTS)
#: The terms, for one candidate.
_urgency: Any = inlined(terms.urgency)
_toll_stream: Any = inlined(terms.toll_stream)
_toll_queue: Any = inlined(terms.toll_queue)
_toll_memory: Any = inlined(terms.toll_memory)


_NO_FETCHES: Numbers = np.zeros(0)
_NO_BACKLOG = PrefillBacklog()
LoadArrays: TypeAlias = tuple[Flags, Flags, Counts, Counts, Counts, Counts, Counts, Numbers]
UnderWayArrays: TypeAlias = tuple[Counts, Counts, Counts]
#: Hosts of the workers, (workers,), and factors of the links between hosts, (hosts, hosts).
LinkArrays: TypeAlias = tuple[Counts, Numbers]
CacheArrays: TypeAlias = tuple[Counts, Counts, Counts, Counts, Numbers, Counts]
#: Workers of the candidates that prefill (-1 for local) and that decode, (candidates,) each.
PairArrays: TypeAlias = tuple[Indices, Indices]
#: Expected output tokens of the request, and their variance.
OutputValues: TypeAlias = tuple[float, float]
SettingValues: TypeAlias = tuple[float, float, float, float]


class WorkerLoad(NamedTuple):
    """Load of each worker, as in `FleetView`, (workers,) each."""

    prefills: Flags
    decodes: Flags
    prefill_requests: Counts
    prefill_tokens: Counts
    prefill_pairs: Counts
    decode_requests: Counts
    decode_tokens: Counts
    recomputed_share: Numbers


class PromptsUnderWay(NamedTuple):
    """Prompt under prefill on each worker, (workers,) each; empty if unknown."""

    tokens: Counts
    pairs: Counts
    since_ns: Counts  # when it began


class PromptCaches(NamedTuple):
    """Cached parts of the prompt on each worker, (workers,) each."""

    cached: Counts  # tokens that it holds
    ready: Counts  # tokens that it would not compute
    host: Counts  # blocks of these that it would bring back from host memory
    storage: Counts  # the same from disk and object storage
    fetch_s: Numbers  # seconds until it has fetched the others from another worker; or empty
    block_size: Counts  # tokens in a block


class TollSetting(NamedTuple):
    """Parameters of the policy (`TollParams`); `rise` is urgency over the mean TTFT."""

    toll: float
    rise: float
    host_restore: float
    storage_restore: float


def cost_rows(
    request: Request, fleet: FleetView, candidates: Candidates, setting: SettingValues
) -> Numbers:
    """Return the parts of each candidate's cost by `PARTS`, then their sum, in seconds."""
    rows = np.empty((_PARTS + 1, len(candidates)))
    cached, backlog, fetches = fleet.cached(request.prompt), fleet.backlog, fleet.fetches
    first, links = backlog or _NO_BACKLOG, fleet.estimates.link_table
    price(
        fleet.estimates.table,
        (
            fleet.prefills, fleet.decodes, fleet.prefill_requests, fleet.prefill_tokens,
            fleet.prefill_pairs, fleet.decode_requests, fleet.decode_tokens,
            fleet.recomputed_share,
        ),
        (first.tokens, first.pairs, first.since),
        fleet.now,
        (cached, cached, fleet.host, fleet.storage, _NO_FETCHES, fleet.block_size)
        if fetches is None
        else (
            cached, fetches.ready, fetches.host, fetches.storage, fetches.seconds,
            fleet.block_size,
        ),
        (candidates.prefill, candidates.decode), request.prompt,
        (fleet.output, 0.0 if fleet.lengths is None else fleet.lengths.variance), setting,
        (links.hosts, links.factors), np.empty(len(fleet.prefills)), rows,
    )  # fmt: skip
    return rows


@inlined
def _write_backlogs(
    table: Numbers, load_arrays: LoadArrays, under_way: UnderWayArrays, now_ns: int,
    waits_s: Numbers,
) -> None:  # fmt: skip
    """Write the seconds of pending prompts of each worker, (workers,)."""
    load, first = WorkerLoad(*load_arrays), PromptsUnderWay(*under_way)
    for w in range(waits_s.shape[0]):
        law, prompts = prefill_law(table, w), load.prefill_requests[w]
        left = prefill_s(law, prompts, float(load.prefill_tokens[w]), float(load.prefill_pairs[w]))
        if first.since_ns.shape[0] and prompts > 0:
            whole = prefill_s(law, 1, float(first.tokens[w]), float(first.pairs[w]))
            left -= min(whole, max(0, now_ns - first.since_ns[w]) * 1e-9)
        waits_s[w] = max(0.0, left)


@inlined
def _displaced_blocks(share: Numbers, pool: Flags) -> float:
    """Return r / (1 - r), r the share of stored blocks that displace a returning one."""
    total, workers = 0.0, 0
    for w in range(pool.shape[0]):
        if pool[w]:
            total += share[w]
            workers += 1
    mean = min(total / max(workers, 1), _MAX_DISPLACED)
    return mean / (1.0 - mean)


@inlined
def _stalled_streams(table: Numbers, load_arrays: LoadArrays) -> float:
    load = WorkerLoad(*load_arrays)
    streams, share, workers = 0.0, 0.0, 0
    for w in range(load.decodes.shape[0]):
        if load.decodes[w]:
            streams += load.decode_requests[w]
            share += min(1.0, table[INTERFERENCE_TOKEN, w] / max(table[PREFILL_TOKEN, w], 1e-300))
            workers += 1
    return streams * share / max(workers, 1) ** 2


@inlined
def _fleet_weights(
    table: Numbers, load_arrays: LoadArrays, toll: float, rise: float
) -> tuple[float, float, float, float, float]:
    load = WorkerLoad(*load_arrays)
    return (
        toll, rise, _stalled_streams(table, load_arrays),
        _displaced_blocks(load.recomputed_share, load.prefills),
        _displaced_blocks(load.recomputed_share, load.decodes),
    )  # fmt: skip


@inlined
def _way_round(table: Numbers, load_arrays: LoadArrays, waits_s: Numbers) -> tuple[int, float]:
    """Return the number of pure prefill workers, and the cost of a prompt without them."""
    load = WorkerLoad(*load_arrays)
    pool, around_s = 0, math.inf
    for w in range(load.prefills.shape[0]):
        pool += load.prefills[w] and not load.decodes[w]
        if load.decodes[w]:
            computed_s = table[MEAN_PREFILL, w] - table[PREFILL_BASE, w]
            tokens = computed_s / max(table[PREFILL_PER_TOKEN, w], 1e-12)
            law, interference = prefill_law(table, w), interference_law(table, w)
            stalls_s = load.decode_requests[w] * interference_s(law, interference, 1, tokens, 0.0)
            transfer_s = table[TRANSFER_BASE, w] + table[TRANSFER_TOKEN, w] * tokens
            around_s = min(around_s, waits_s[w] + table[MEAN_PREFILL, w] + stalls_s - transfer_s)
    return pool, around_s


@inlined
def later_prompts(
    table: Numbers, decodes: Flags, wait_s: float, p: int, around: tuple[int, float]
) -> tuple[float, float]:
    """Return arrivals per second at worker `p`, and the next prompt's loss elsewhere."""
    if decodes[p]:
        return table[ARRIVALS, p], math.inf
    pool, around_s = around
    rate = table[FLEET_ARRIVALS, p] / max(pool, 1)
    left_s = max(0.0, wait_s - 1.0 / max(rate, 1e-9))
    return rate, max(0.0, around_s - table[MEAN_PREFILL, p] - left_s)


@inlined
def service_s(table: Numbers, w: int, tokens: float, prompt: float) -> float:
    """Return the seconds for worker `w` to compute the last tokens of a prompt."""
    return prefill_s(prefill_law(table, w), 1, tokens, tokens * (prompt - 0.5 * tokens))


@inlined
def _prospect_of(
    table: Numbers, load_arrays: LoadArrays, cache_arrays: CacheArrays, waits_s: Numbers,
    pair: tuple[int, int], prompt: int, outputs: OutputValues, restore: tuple[float, float],
    around: tuple[int, float], links: LinkArrays,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the fields of `Prospect` for one candidate pair."""
    load, caches = WorkerLoad(*load_arrays), PromptCaches(*cache_arrays)
    p, d = pair
    output, variance = outputs
    local = p == d
    wait_s, n = waits_s[p], float(load.decode_requests[d])
    uncached = float(prompt - caches.ready[p])
    computed_s = delay_s = service_s(table, p, uncached, float(prompt))
    token_s, mean = table[CONTEXT_TOKEN, d], table[MEAN_CONTEXT, d]
    held_s = token_s * (load.decode_tokens[d] - mean * n)
    step_s = itl_s(itl_law(table, d), n) + held_s
    next_step_s = itl_s(itl_law(table, d), n + 1.0) + held_s
    next_step_s += token_s * (prompt + 0.5 * output - mean)
    longer_s = 0.5 * token_s * variance  # mean of N^2 above the mean squared
    transfer_s = caches.fetch_s[p] if caches.fetch_s.shape[0] else 0.0
    stall_s, stored_s, later_s, missing = 0.0, 0.0, 0.0, float(prompt - caches.cached[d])
    law, interference = prefill_law(table, d), interference_law(table, d)
    if local:
        pairs = uncached * (prompt - 0.5 * uncached)
        stall_s = interference_s(law, interference, 1, uncached, pairs)
        if n > 0.0:  # the rest of the step that runs, and its own
            delay_s, computed_s = stall_s, max(computed_s, 1.5 * step_s + stall_s)
    else:
        hosts, factors = links
        transfer_s += table[TRANSFER_BASE, d]
        transfer_s += table[TRANSFER_TOKEN, d] * missing * factors[hosts[p], hosts[d]]
        stored_s = service_s(table, p, float(prompt - caches.cached[p]), float(prompt))
    computed_s += table[PREFILL_TOKEN, p] * caches.block_size[p] * (
        restore[0] * caches.host[p] + restore[1] * caches.storage[p]
    )  # fmt: skip
    if not local:
        later_s = later_interference_s(
            law, interference, load.prefill_requests[d], float(load.prefill_tokens[d]),
            float(load.prefill_pairs[d]), wait_s + computed_s + transfer_s,
        )  # fmt: skip
    output_s = law.token + law.pair * (prompt + output)  # to compute one more of its tokens
    return (
        wait_s, computed_s, transfer_s, output * next_step_s + longer_s + later_s, n,
        output * (next_step_s - step_s) + longer_s, stall_s, delay_s,
        *later_prompts(table, load.decodes, wait_s, p, around), stored_s,
        service_s(table, d, missing + output, prompt + output) + 0.5 * law.pair * variance,
        output_s * output_s * variance,
    )  # fmt: skip


@bare_kernel_over(*_OVER)
def price(
    table: Numbers, load_arrays: LoadArrays, under_way: UnderWayArrays, now_ns: int,
    cache_arrays: CacheArrays, candidates: PairArrays, prompt: int, outputs: OutputValues,
    setting_values: SettingValues, links: LinkArrays, waits_s: Numbers, costs: Numbers,
) -> None:  # fmt: skip
    """Write the parts of each candidate's cost, then their sum: (9, candidates)."""
    setting = TollSetting(*setting_values)
    prefill, decode = candidates
    restore = setting.host_restore, setting.storage_restore
    _write_backlogs(table, load_arrays, under_way, now_ns, waits_s)
    around = _way_round(table, load_arrays, waits_s)
    w = TollWeights(*_fleet_weights(table, load_arrays, setting.toll, setting.rise))
    for i in range(decode.shape[0]):
        d = int(decode[i])
        pair = (d if prefill[i] < 0 else int(prefill[i])), d
        p = Prospect(*_prospect_of(
            table, load_arrays, cache_arrays, waits_s, pair, prompt, outputs, restore, around, links
        ))  # fmt: skip
        parts = (
            p.wait_s, p.prefill_s, p.transfer_s, p.decode_s, _urgency(p, w), _toll_stream(p, w),
            _toll_queue(p, w), _toll_memory(p, w),
        )  # fmt: skip
        costs[_PARTS, i] = 0.0
        for row in range(_PARTS):
            costs[row, i] = parts[row]
            costs[_PARTS, i] += costs[row, i]
