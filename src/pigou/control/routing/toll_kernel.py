"""The toll policy's formula, compiled: one pass over the candidates."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel
from pigou.control.routing.laws_kernel import alone, among, backlogs, beside, itl
from pigou.control.routing.queue_kernel import queues
from pigou.control.routing.slow_kernel import request_times, slowness

#: Names of the parts, in the order of the rows that `price` returns.
PARTS = (
    "wait", "prefill", "transfer", "decode", "toll_stream", "toll_queue", "toll_stall",
    "toll_memory", "toll_place", "tail",
)  # fmt: skip
#: The longest of so many requests is what `tail` is about.
_SOME = 10.0
#: What a second counts that others' first tokens are delayed, their waits left out: their sizes
#: add a third in the mean (`weigh`).
_OTHERS = 4.0 / 3.0


@bare_kernel
def weigh(size: float, sizes: NDArray[np.float64]) -> float:
    """Return how much more a second counts that a prompt of this size waits: 10 R^9 / 3.

    R is its place among prompts of late, from 0 (the shortest) to 1. Where it shares its places
    with prompts as long it is the mean over them, (u^10 - b^10) / (3 (u - b)), with b the share
    that is shorter, and u that which is no longer, itself among them.

    Args:
        size: tokens of it that are not cached.
        sizes: of the prompts before it, (prompts,).
    """
    shorter, alike = 0, 1
    for each in sizes:
        shorter += each < size
        alike += each == size
    b, u = shorter / (len(sizes) + 1), (shorter + alike) / (len(sizes) + 1)
    found: float = (u**_SOME - b**_SOME) / (3.0 * (u - b))
    return found


@bare_kernel
def waited(wait: float, scale: float) -> float:
    """Return a third of what a wait adds to the longest of ten that are exponential, in seconds.

    The integral over t from 0 to `wait` of 10 F(t)^9 / 3, with F = 1 - exp(-t / scale): the longest
    of ten is longer than t by as much for each of them as 10 F^9 says.

    Args:
        wait: seconds.
        scale: mean of such waits, in seconds.
    """
    share = -math.expm1(-wait / max(scale, 1e-9))
    found, power = wait / max(scale, 1e-9), 1.0
    for j in range(1, int(_SOME)):
        power *= share
        found -= power / j
    return _SOME / 3.0 * scale * max(0.0, found)


@bare_kernel
def usual_wait(table: NDArray[np.float64], w: int) -> float:
    """Return the scale of waits at worker `w` (`waited`): prompts there times their variances."""
    found: float = table[14, w] * (max(1.0, table[15, w]) + table[16, w])
    return found


@bare_kernel
def tails(table: NDArray[np.float64], ahead: NDArray[np.float64]) -> None:
    """Write what each worker's wait adds to the longest of ten (`waited`), in the fourth row.

    Args:
        table: `Estimates.table`.
        ahead: has the waits in its first row, in seconds, (5, workers).
    """
    for w in range(ahead.shape[1]):
        ahead[3, w] = waited(ahead[0, w], usual_wait(table, w)) if ahead[0, w] > 0.0 else 0.0


@bare_kernel
def others(wait: float, delay: float, scale: float) -> float:
    """Return what a second counts that those behind in a queue are delayed by one who joins it.

    They come to wait from `delay` to `wait` + `delay` seconds, as many for each second between: 4/3
    and the mean of 10 F^9 / 3 over those waits (`waited`).

    Args:
        wait: seconds of the queue that it joins, above 0.
        delay: seconds by which it delays them.
        scale: as of `waited`.
    """
    return _OTHERS + (waited(wait + delay, scale) - waited(delay, scale)) / wait


@bare_kernel
def joined(ahead: NDArray[np.float64], w: int, delay: float, scale: float) -> float:
    """Return what those behind lose to one who joins the queue of worker `w`, in seconds.

    Args:
        ahead: has the waits, whom one delays, and the most that it may cost, in its first rows.
        delay, scale: as of `others`.
    """
    wait, behind = ahead[0, w], ahead[1, w]
    if behind <= 0.0 or wait <= 0.0:
        return 0.0
    found: float = min(others(wait, delay, scale) * delay * behind, ahead[2, w])
    return found


@bare_kernel
def reach(prefill: NDArray[np.int32], found: NDArray[np.float64]) -> float:
    """Return how long the prompt of some candidates would have waited for a prefill worker.

    That is how much more its best local candidate costs than the best of the others would with
    nobody before it, `tail` left out. NaN where all are local, or none is.

    Args:
        prefill: of the candidates, -1 for local, (candidates,).
        found: their parts and sums (`price`), (11, candidates).
    """
    local, remote = math.inf, math.inf
    for i in range(prefill.shape[0]):
        cost = found[10, i] - found[9, i]
        if prefill[i] < 0:
            local = min(local, cost)
        else:
            remote = min(remote, cost - found[0, i] - found[5, i])
    return local - remote if max(local, remote) < math.inf else math.nan


@bare_kernel
def usual(table: NDArray[np.float64], w: int) -> tuple[float, float]:
    """Return tokens of a prompt of mean length, and what it takes from each stream of worker `w`.

    Pairs are counted as the tokens that they take as long as.
    """
    tokens = (table[14, w] - table[0, w]) / max(table[18, w], 1e-12)
    law = table[0, w], table[1, w], table[17, w]
    return tokens, among(law, (table[12, w], table[13, w]), 1, tokens, 0.0)


@bare_kernel
def place(
    table: NDArray[np.float64], prefills: NDArray[np.bool_], decodes: NDArray[np.bool_],
    waits: NDArray[np.float64], streams: NDArray[np.int64],
) -> tuple[int, float, float]:  # fmt: skip
    """Return the decode worker with the least stall, and what the next prompt loses with it.

    `Toll` has the formula. Without two decode workers it is nobody's (-1), and 0. The third is what
    the next prompt costs, itself and the streams, where no prefill worker computes it, less what
    bringing it from there would.

    Args:
        table: `Estimates.table`.
        prefills, decodes: roles of the workers, (workers,).
        waits: seconds of the prompts that each has to compute, (workers,).
        streams: of the workers, (workers,).
    """
    remote = math.inf
    for w in range(prefills.shape[0]):
        if prefills[w] and not decodes[w]:
            remote = min(remote, waits[w] + table[14, w])
    best, first, second, after, local = -1, math.inf, math.inf, math.inf, math.inf
    for w in range(decodes.shape[0]):
        if not decodes[w]:
            continue
        ours = waits[w] + table[14, w]
        most = max(0.0, remote - ours)
        tokens, stall = usual(table, w)
        local = min(local, ours + stall * streams[w] - table[2, w] - table[3, w] * tokens)
        lost = min(most, stall * streams[w])
        if lost < first:
            best, second, first, after = w, first, lost, min(most, stall * (streams[w] + 1))
        elif lost < second:
            second = lost
    if second == math.inf:
        return -1, 0.0, local
    return best, max(0.0, min(second, after) - first), local


@bare_kernel
def least(
    ready: NDArray[np.int64], prefill: NDArray[np.int32], decode: NDArray[np.int32], prompt: int,
    overlap_weight: float,
) -> float:  # fmt: skip
    """Return the tokens of the prompt that are left where most are ready; arguments as `price`."""
    found = math.inf
    for i in range(decode.shape[0]):
        where = decode[i] if prefill[i] < 0 else prefill[i]
        found = min(found, prompt - overlap_weight * ready[where])
    return found


@bare_kernel
def price(
    table: NDArray[np.float64],
    prefills: NDArray[np.bool_],
    decodes: NDArray[np.bool_],
    prefill_requests: NDArray[np.int64],
    prefill_tokens: NDArray[np.int64],
    prefill_pairs: NDArray[np.int64],
    first_tokens: NDArray[np.int64],
    first_pairs: NDArray[np.int64],
    since: NDArray[np.int64],
    now: int,
    decode_requests: NDArray[np.int64],
    decode_tokens: NDArray[np.int64],
    cached: NDArray[np.int64],
    ready: NDArray[np.int64],
    host: NDArray[np.int64],
    storage: NDArray[np.int64],
    reading: NDArray[np.float64],
    block_size: NDArray[np.int64],
    again: NDArray[np.float64],
    sizes: NDArray[np.float64],
    reaches: NDArray[np.float64],
    prefill: NDArray[np.int32],
    decode: NDArray[np.int32],
    prompt: int,
    output: float,
    toll: float,
    overlap_weight: float,
    fairness: float,
    restore: tuple[float, float],
    ahead: NDArray[np.float64],
    found: NDArray[np.float64],
) -> None:
    """Write the parts of each candidate's cost, and in the last row their sum.

    `Toll` says what the parts are.

    Args:
        table: `Estimates.table`.
        prefills, decodes: roles of the workers, (workers,).
        prefill_requests, prefill_tokens, prefill_pairs, decode_requests, decode_tokens: of the
            workers, (workers,).
        first_tokens, first_pairs, since, now: as of `backlogs`.
        cached: tokens of the prompt that each worker holds, (workers,).
        ready: tokens of the prompt that each would not compute, (workers,).
        host, storage: blocks of them that it would bring back to its device, (workers,).
        reading: seconds until it has read the others from another worker, (workers,); or empty.
        block_size: tokens in a block, (workers,).
        again: blocks computed again for each that is stored, (workers,).
        sizes: uncached tokens of the prompts of late, (prompts,).
        reaches: seconds that they would have waited (`reach`), (prompts with a choice,).
        prefill, decode: of the candidates, (candidates,); prefill is -1 for local.
        prompt: tokens.
        output: tokens expected.
        toll, overlap_weight, fairness: parameters of the policy.
        restore: shares of a token's seconds that one from host and one from storage takes.
        ahead: to work in, (5, workers).
        found: takes the parts in the order of `PARTS`, and the sum, shape (11, candidates).
    """
    base, token, move_base, move_token = table[0], table[1], table[2], table[3]
    a, b, d, n_sat, beta, floor = table[6], table[7], table[8], table[9], table[10], table[11]
    stall_base, stall_token, pair, each = table[12], table[13], table[17], table[18]
    held, usually, holds = table[22], table[23], prompt + 0.5 * output
    late = weigh(least(ready, prefill, decode, prompt, overlap_weight), sizes)
    backlogs(
        table, prefill_requests, prefill_tokens, prefill_pairs, first_tokens, first_pairs, since,
        now, ahead[0],
    )  # fmt: skip
    best, lost, elsewhere = place(table, prefills, decodes, ahead[0], decode_requests)
    queues(table, prefills, decodes, reaches, elsewhere, ahead)
    tails(table, ahead)
    mean = request_times(
        table, decodes, prefill_requests, prefill_tokens, prefill_pairs, decode_requests,
        decode_tokens, output, ahead[0], ahead[4],
    )  # fmt: skip
    for i in range(decode.shape[0]):
        there = decode[i]
        local = prefill[i] < 0
        where = there if local else prefill[i]
        prompts = base[where], token[where], pair[where]
        wait = ahead[0, where]
        uncached = float(prompt - overlap_weight * ready[where])
        pairs = uncached * (prompt - 0.5 * uncached)
        service = alone(prompts, 1, uncached, pairs)
        back = (
            overlap_weight
            * token[where]
            * block_size[where]
            * (restore[0] * host[where] + restore[1] * storage[where])
        )
        n = float(decode_requests[there])
        law = a[there], b[there], d[there], n_sat[there], beta[there], floor[there]
        more = held[there] * (decode_tokens[there] - usually[there] * n)
        pace = itl(law, n) + more
        slower = itl(law, n + 1.0) + more + held[there] * (holds - usually[there])
        count, slow = slowness(ahead[4, there], output * (slower - pace), mean, fairness)
        stalls = stall_base[there], stall_token[there]
        stall, delay, waiting = 0.0, service, 0.0
        transfer = reading[where] if reading.shape[0] else 0.0
        stored = prompt - overlap_weight * cached[where]
        pushed = again[where] * each[where] * stored + again[there] * each[there] * output
        if local:
            taken = among(prompts, stalls, 1, uncached, pairs)
            stall = toll * count * taken * n
            if n > 0.0:  # the rest of the step that runs, and its own
                delay, service = taken, max(service, 1.5 * pace + taken)
        else:
            missing = prompt - overlap_weight * cached[there]
            pushed += again[there] * each[there] * missing
            transfer += move_base[there] + move_token[there] * missing
            waiting = beside(
                (base[there], token[there], pair[there]), stalls, prefill_requests[there],
                float(prefill_tokens[there]), float(prefill_pairs[there]),
                wait + service + back + transfer,
            )  # fmt: skip
        streams = output * slower + waiting
        stream = toll * count * output * n * (slower - pace)
        queue = toll * joined(ahead, where, delay, usual_wait(table, where))
        memory = toll * pushed * (service + queue + stall) / max(service, 1e-12)
        parts = (
            wait, service + back, transfer, streams, stream, queue, stall, memory,
            toll * lost if there == best else 0.0,
            late * (wait + service + back + transfer) + ahead[3, where] + slow,
        )  # fmt: skip
        # In the order of the rows, as whoever adds them up again does: sums must be the same.
        total = 0.0
        for row in range(10):
            found[row, i] = parts[row]
            total += parts[row]
        found[10, i] = total
