"""The toll policy's formula, compiled: one pass over the candidates. `Toll` says what it is."""

from __future__ import annotations

import math

from pigou.compiled import bare_kernel_over
from pigou.control.latency_model.estimates import (
    CONTEXT_TOKEN,
    MEAN_CONTEXT,
    MEAN_PREFILL,
    PREFILL_BASE,
    PREFILL_PER_TOKEN,
    PREFILL_TOKEN,
    TRANSFER_BASE,
    TRANSFER_TOKEN,
    interference_law,
    interference_s,
    itl_law,
    itl_s,
    later_interference_s,
    prefill_law,
    prefill_s,
)
from pigou.control.routing.toll.columns import (
    PARTS,
    REQUEST_S,
    TOTAL,
    WAIT_S,
    WAIT_TAIL_S,
    CacheArrays,
    Counts,
    Flags,
    Indices,
    LoadArrays,
    Numbers,
    PairArrays,
    PromptCaches,
    RecentArrays,
    TollWeights,
    UnderWayArrays,
    Weights,
    WorkerLoad,
)
from pigou.control.routing.toll.fairness import fairness_terms, write_request_times
from pigou.control.routing.toll.queue import queue_toll, write_queue_tolls, write_waits
from pigou.control.routing.toll.tail import rank_weight, wait_scale, write_wait_tails

_PARTS = len(PARTS)


@bare_kernel_over("control/routing/toll", "control/latency_model")
def mean_prompt(table: Numbers, w: int) -> tuple[float, float]:
    """Return tokens of a prompt of mean length, and what it takes from each stream of worker `w`.

    Pairs are counted as the tokens that they take as long as.
    """
    computed_s = table[MEAN_PREFILL, w] - table[PREFILL_BASE, w]
    tokens = computed_s / max(table[PREFILL_PER_TOKEN, w], 1e-12)
    return tokens, interference_s(prefill_law(table, w), interference_law(table, w), 1, tokens, 0.0)


@bare_kernel_over("control/routing/toll", "control/latency_model")
def slot_rent(
    table: Numbers, prefills: Flags, decodes: Flags, wait_s: Numbers, streams: Counts
) -> tuple[int, float, float]:
    """Return the decode worker with the least stall, and what the next prompt loses with it.

    `Toll` has the formula. Without two decode workers it is -1, and 0. The third result
    is what the next prompt costs, itself and the streams, where no prefill worker computes it, less
    what bringing it from there would.

    Args:
        table: `Estimates.table`.
        prefills, decodes: roles of the workers, (workers,).
        wait_s: seconds of the prompts that each has to compute, (workers,).
        streams: of the workers, (workers,).
    """
    remote_s = math.inf
    for w in range(prefills.shape[0]):
        if prefills[w] and not decodes[w]:
            remote_s = min(remote_s, wait_s[w] + table[MEAN_PREFILL, w])
    best, first, second, after, local_s = -1, math.inf, math.inf, math.inf, math.inf
    for w in range(decodes.shape[0]):
        if not decodes[w]:
            continue
        prefilled_s = wait_s[w] + table[MEAN_PREFILL, w]
        limit = max(0.0, remote_s - prefilled_s)
        tokens, stall = mean_prompt(table, w)
        base_s, tokens_s = table[TRANSFER_BASE, w], table[TRANSFER_TOKEN, w] * tokens
        local_s = min(local_s, prefilled_s + stall * streams[w] - base_s - tokens_s)
        loss = min(limit, stall * streams[w])
        if loss < first:
            best, second, first, after = w, first, loss, min(limit, stall * (streams[w] + 1))
        elif loss < second:
            second = loss
    if second == math.inf:
        return -1, 0.0, local_s
    return best, max(0.0, min(second, after) - first), local_s


@bare_kernel_over("control/routing/toll", "control/latency_model")
def min_uncached(
    ready: Counts, prefill: Indices, decode: Indices, prompt: int, overlap_weight: float
) -> float:
    """Return the tokens of the prompt that are left where most are ready; arguments as `price`."""
    tokens = math.inf
    for i in range(decode.shape[0]):
        computes = decode[i] if prefill[i] < 0 else prefill[i]
        tokens = min(tokens, prompt - overlap_weight * ready[computes])
    return tokens


@bare_kernel_over("control/routing/toll", "control/latency_model")
def _write_queues(
    table: Numbers, load_arrays: LoadArrays, under_way: UnderWayArrays, now_ns: int,
    patience: Numbers, output: float, queues: Numbers,
) -> tuple[int, float, float]:  # fmt: skip
    """Write all rows of `queues`; return the slot with a rent, that rent, and a mean request.

    Arguments are those of `price`, the results a row of workers (-1 for none) and seconds.
    """
    load = WorkerLoad(*load_arrays)
    write_waits(table, load_arrays, under_way, now_ns, queues)
    best, rent_s, elsewhere_s = slot_rent(
        table, load.prefills, load.decodes, queues[WAIT_S], load.decode_requests
    )
    write_queue_tolls(table, load.prefills, load.decodes, patience, elsewhere_s, queues)
    write_wait_tails(table, queues)
    return best, rent_s, write_request_times(table, load_arrays, output, queues)


@bare_kernel_over("control/routing/toll", "control/latency_model")
def price(
    table: Numbers,
    load_arrays: LoadArrays,
    under_way: UnderWayArrays,
    now_ns: int,
    cache_arrays: CacheArrays,
    recent: RecentArrays,
    candidates: PairArrays,
    prompt: int,
    output: float,
    weight_values: Weights,
    queues: Numbers,
    costs: Numbers,
) -> None:
    """Write the parts of each candidate's cost, and in the last row their sum.

    `Toll` says what the parts are.

    Args:
        table: `Estimates.table`.
        load_arrays: `WorkerLoad`.
        under_way: `PromptsUnderWay`.
        now_ns: nanoseconds.
        cache_arrays: `PromptCaches`.
        recent: uncached tokens of recent prompts, and their patience (`RecentPrompts`).
        candidates: their workers that prefill (-1 for local) and that decode, (candidates,).
        prompt: tokens.
        output: tokens expected.
        weight_values: `TollWeights`.
        queues: to work in; rows are named in `columns`, (5, workers).
        costs: takes the parts in the order of `PARTS`, and the sum, shape (11, candidates).
    """
    load, caches, weights = (
        WorkerLoad(*load_arrays), PromptCaches(*cache_arrays), TollWeights(*weight_values),
    )  # fmt: skip
    toll, overlap_weight = weights.toll, weights.overlap_weight
    prefill, decode = candidates
    sizes, patience = recent
    held_token, mean_context = table[CONTEXT_TOKEN], table[MEAN_CONTEXT]
    context = prompt + 0.5 * output
    rank = rank_weight(min_uncached(caches.ready, prefill, decode, prompt, overlap_weight), sizes)
    best, rent_s, mean_request_s = _write_queues(
        table, load_arrays, under_way, now_ns, patience, output, queues
    )
    for i in range(decode.shape[0]):
        decoder = decode[i]
        local = prefill[i] < 0
        computer = decoder if local else prefill[i]
        law, interference = prefill_law(table, computer), interference_law(table, decoder)
        wait_s = queues[WAIT_S, computer]
        uncached = float(prompt - overlap_weight * caches.ready[computer])
        pairs = uncached * (prompt - 0.5 * uncached)
        service_s = prefill_s(law, 1, uncached, pairs)
        restore_s = (
            overlap_weight
            * table[PREFILL_TOKEN, computer]
            * caches.block_size[computer]
            * (
                weights.host_restore * caches.host[computer]
                + weights.storage_restore * caches.storage[computer]
            )
        )
        n = float(load.decode_requests[decoder])
        itl = itl_law(table, decoder)
        excess = load.decode_tokens[decoder] - mean_context[decoder] * n
        held_s = held_token[decoder] * excess
        step_s = itl_s(itl, n) + held_s
        next_step_s = (
            itl_s(itl, n + 1.0) + held_s + held_token[decoder] * (context - mean_context[decoder])
        )
        second, slow_s = fairness_terms(
            queues[REQUEST_S, decoder], output * (next_step_s - step_s), mean_request_s,
            weights.fairness,
        )  # fmt: skip
        stall_s, delay_s, waiting_s = 0.0, service_s, 0.0
        transfer_s = caches.fetch_s[computer] if caches.fetch_s.shape[0] else 0.0
        stored = prompt - overlap_weight * caches.cached[computer]
        share, token_s = caches.recomputed_share, table[PREFILL_PER_TOKEN]
        pushed_out = (
            share[computer] * token_s[computer] * stored
            + share[decoder] * token_s[decoder] * output
        )  # fmt: skip
        if local:
            taken_s = interference_s(law, interference, 1, uncached, pairs)
            stall_s = toll * second * taken_s * n
            if n > 0.0:  # the rest of the step that runs, and its own
                delay_s, service_s = taken_s, max(service_s, 1.5 * step_s + taken_s)
        else:
            missing = prompt - overlap_weight * caches.cached[decoder]
            pushed_out += share[decoder] * token_s[decoder] * missing
            transfer_s += table[TRANSFER_BASE, decoder] + table[TRANSFER_TOKEN, decoder] * missing
            waiting_s = later_interference_s(
                prefill_law(table, decoder), interference, load.prefill_requests[decoder],
                float(load.prefill_tokens[decoder]), float(load.prefill_pairs[decoder]),
                wait_s + service_s + restore_s + transfer_s,
            )  # fmt: skip
        decode_s = output * next_step_s + waiting_s
        stream_toll = toll * second * output * n * (next_step_s - step_s)
        wait_toll = toll * queue_toll(queues, computer, delay_s, wait_scale(table, computer))
        memory_toll = (
            toll * pushed_out * (service_s + wait_toll + stall_s) / max(service_s, 1e-12)
        )  # fmt: skip
        ttft_s = wait_s + service_s + restore_s + transfer_s
        parts = (
            wait_s, service_s + restore_s, transfer_s, decode_s, stream_toll, wait_toll, stall_s,
            memory_toll, toll * rent_s if decoder == best else 0.0,
            rank * ttft_s + queues[WAIT_TAIL_S, computer] + slow_s,
        )  # fmt: skip
        # In the order of the rows, so that later sums of the parts are the same.
        total = 0.0
        for row in range(_PARTS):
            costs[row, i] = parts[row]
            total += parts[row]
        costs[TOTAL, i] = total
