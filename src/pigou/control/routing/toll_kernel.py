"""The toll policy's formula, compiled: one pass over the candidates."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel

#: Names of the parts, in the order of the rows that `price` returns.
PARTS = (
    "wait", "prefill", "transfer", "decode", "toll_stream", "toll_queue", "toll_stall",
    "toll_memory", "toll_place", "tail",
)  # fmt: skip


#: Variances that are taken for none at all would make some tolls infinite.
_LEAST_SPREAD = 0.05
_MOST_POWER = 50.0
#: The longest of so many requests is what `tail` is about.
_SOME = 10.0


@bare_kernel
def delayed(ahead: float, rho: float, spread: float) -> float:
    """Return how many are delayed by one who joins a queue, itself not counted.

    With v = `spread` / 2 and k = 1 + `ahead` / v, v times the sum of (k - i) rho^i over
    i = 1, 2, ... below k, in the closed form that goes for any k. v is 1 for an M/M/1 queue.

    Args:
        ahead: how many are before it.
        rho: seconds of work that come a second, at most.
        spread: squared coefficients of variation, of gaps and of services, added up.
    """
    v = 0.5 * max(spread, _LEAST_SPREAD)
    place = 1.0 + ahead / v
    if rho > 0.999 and rho < 1.001:
        return v * 0.5 * place * (place - 1.0)
    rest = 1.0 - rho
    power = math.exp(min(place * math.log(rho), _MOST_POWER)) if rho > 0.0 else 0.0
    return v * max(0.0, rho * (place * rest - 1.0 + power) / (rest * rest))


@bare_kernel
def behind(
    wait: float, mean: float, rate: float, everybody: float, bursts: float, uneven: float
) -> float:
    """Return how many a prompt delays that joins a queue of so many seconds.

    Args:
        wait: seconds of the queue.
        mean: of a prompt.
        rate: prompts a second that could come.
        everybody: prompts a second of the whole fleet, whose gaps have the spread `bursts`.
        uneven: spread of the prompts' seconds.
    """
    share = rate / max(everybody, 1e-9)
    return delayed(wait / mean, rate * mean, share * bursts + 1.0 - share + uneven)


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
    shorter, others = 0, 1
    for each in sizes:
        shorter += each < size
        others += each == size
    b, u = shorter / (len(sizes) + 1), (shorter + others) / (len(sizes) + 1)
    found: float = (u**_SOME - b**_SOME) / (3.0 * (u - b))
    return found


@bare_kernel
def joining(wait: float, reaches: NDArray[np.float64]) -> float:
    """Return the share of prompts that would come to a queue, the mean over waits from 0 to `wait`.

    Args:
        wait: seconds of the queue.
        reaches: seconds that prompts of late would have waited rather than go the other way,
            (prompts,). Without any, everybody comes.
    """
    if wait <= 0.0 or len(reaches) == 0:
        return 1.0
    found = 0.0
    for each in reaches:
        found += min(1.0, max(0.0, each / wait))
    return found / len(reaches)


@bare_kernel
def forgone(wait: float, mean: float, rate: float, gain: float) -> float:
    """Return what the next prompt would lose that went the other way: no toll of a queue is more.

    Args:
        wait: seconds of the queue.
        mean: of a prompt.
        rate: prompts a second that would come.
        gain: seconds that a prompt of mean length gains by coming to no queue at all.
    """
    gap = 1.0 / max(rate, 1e-9)
    found = max(0.0, gain - max(0.0, wait - gap))
    if rate * mean < 1.0:
        return found
    idle = gap * math.exp(-min(wait / gap, _MOST_POWER))
    return found * max(0.0, 1.0 - idle / mean)


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
def itl(law: tuple[float, float, float, float, float, float], n: float) -> float:
    """Return the seconds between tokens of n streams; `law` is (a, b, d, n_sat, beta, floor)."""
    a, b, d, n_sat, beta, floor = law
    found = a * n + b
    if d > 0.0:
        gap = n_sat - n
        near = max(gap, floor)
        found += d * near**-beta * (1.0 + (near - gap) * beta / near)
    return found


@bare_kernel
def alone(law: tuple[float, float, float], prompts: int, tokens: float, pairs: float) -> float:
    """Return the seconds that prompts take where nobody streams; `law` is (base, token, pair)."""
    base, token, pair = law
    return base * prompts + token * tokens + pair * pairs


@bare_kernel
def among(
    law: tuple[float, float, float], taken: tuple[float, float], prompts: int, tokens: float,
    pairs: float,
) -> float:  # fmt: skip
    """Return the seconds that prompts take from each stream beside them.

    A pair counts as so many tokens as it takes by `law`, (base, token, pair); `taken` is (base,
    token).
    """
    _, token, pair = law
    base, each = taken
    size = tokens if pair <= 0.0 else tokens + pair / token * pairs
    return base * prompts + each * size


@bare_kernel
def beside(
    law: tuple[float, float, float], taken: tuple[float, float], prompts: int, tokens: float,
    pairs: float, begins: float,
) -> float:  # fmt: skip
    """Return the seconds that prompts take from a stream that comes in `begins` seconds.

    Those before then do not delay it. (Hits that count for more than their prompts may have it come
    before now.)
    """
    ahead = alone(law, prompts, tokens, pairs)
    left = ahead - max(begins, 0.0)
    if left <= 0.0:
        return 0.0
    return min(left, left / ahead * among(law, taken, prompts, tokens, pairs))


@bare_kernel
def done(
    table: NDArray[np.float64], prefill_requests: NDArray[np.int64],
    prefill_tokens: NDArray[np.int64], prefill_pairs: NDArray[np.int64], w: int,
) -> float:  # fmt: skip
    """Return the seconds after which worker `w` would have computed a prompt of mean length."""
    law = table[0, w], table[1, w], table[17, w]
    wait = alone(law, prefill_requests[w], float(prefill_tokens[w]), float(prefill_pairs[w]))
    found: float = wait + table[14, w]
    return found


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
    prefill_requests: NDArray[np.int64], prefill_tokens: NDArray[np.int64],
    prefill_pairs: NDArray[np.int64], streams: NDArray[np.int64],
) -> tuple[int, float, float]:  # fmt: skip
    """Return the decode worker with the least stall, and what the next prompt loses with it.

    `Toll` has the formula. Without two decode workers it is nobody's (-1), and 0. The third is what
    the next prompt costs, itself and the streams, where no prefill worker computes it, less what
    bringing it from there would.

    Args:
        table: `Estimates.table`.
        prefills, decodes: roles of the workers, (workers,).
        prefill_requests, prefill_tokens, prefill_pairs, streams: of the workers, (workers,).
    """
    remote = math.inf
    for w in range(prefills.shape[0]):
        if prefills[w] and not decodes[w]:
            remote = min(remote, done(table, prefill_requests, prefill_tokens, prefill_pairs, w))
    best, first, second, after, local = -1, math.inf, math.inf, math.inf, math.inf
    for w in range(decodes.shape[0]):
        if not decodes[w]:
            continue
        ours = done(table, prefill_requests, prefill_tokens, prefill_pairs, w)
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
def queues(
    table: NDArray[np.float64], prefills: NDArray[np.bool_], decodes: NDArray[np.bool_],
    prefill_requests: NDArray[np.int64], prefill_tokens: NDArray[np.int64],
    prefill_pairs: NDArray[np.int64], reaches: NDArray[np.float64], local: float,
    ahead: NDArray[np.float64],
) -> None:  # fmt: skip
    """Write each worker's queue of prompts in seconds, how many one more delays, and its most toll.

    Other arguments as `price`.

    Args:
        local: what the next prompt costs that no prefill worker computes (`place`), in seconds.
        ahead: takes the result, (3, workers).
    """
    workers = prefills.shape[0]
    arrivals, mean, bursts, uneven = table[4], table[14], table[15], table[16]
    everybody, apart = 0.0, 0
    for w in range(workers):
        everybody += arrivals[w]
        apart += prefills[w] and not decodes[w]
    for w in range(workers):
        law = table[0, w], table[1, w], table[17, w]
        wait = alone(law, prefill_requests[w], float(prefill_tokens[w]), float(prefill_pairs[w]))
        if prefill_requests[w] > 0:  # one is under way, and not at its beginning
            wait = max(0.0, wait - 0.5 * mean[w] * max(0.0, 1.0 - uneven[w]))
        whole, rate, most = everybody, arrivals[w], math.inf
        if prefills[w] and not decodes[w]:
            whole = table[21, w]
            rate = whole / apart * joining(wait, reaches)
            most = forgone(wait, max(mean[w], 1e-9), rate, local - mean[w])
        ahead[0, w], ahead[2, w] = wait, most
        ahead[1, w] = behind(wait, max(mean[w], 1e-9), rate, whole, bursts[w], uneven[w])


@bare_kernel
def price(
    table: NDArray[np.float64],
    prefills: NDArray[np.bool_],
    decodes: NDArray[np.bool_],
    prefill_requests: NDArray[np.int64],
    prefill_tokens: NDArray[np.int64],
    prefill_pairs: NDArray[np.int64],
    decode_requests: NDArray[np.int64],
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
    restore: tuple[float, float],
    ahead: NDArray[np.float64],
    found: NDArray[np.float64],
) -> None:
    """Write the parts of each candidate's cost, and in the last row their sum.

    `Toll` says what the parts are.

    Args:
        table: `Estimates.table`.
        prefills, decodes: roles of the workers, (workers,).
        prefill_requests, prefill_tokens, prefill_pairs, decode_requests: of the workers,
            (workers,).
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
        toll, overlap_weight: parameters of the policy.
        restore: shares of a token's seconds that one from host and one from storage takes.
        ahead: to work in, (3, workers).
        found: takes the parts in the order of `PARTS`, and the sum, shape (11, candidates).
    """
    base, token, move_base, move_token = table[0], table[1], table[2], table[3]
    a, b, d = table[6], table[7], table[8]
    n_sat, beta, floor = table[9], table[10], table[11]
    stall_base, stall_token, pair, each = table[12], table[13], table[17], table[18]
    late = weigh(least(ready, prefill, decode, prompt, overlap_weight), sizes)
    best, lost, elsewhere = place(
        table, prefills, decodes, prefill_requests, prefill_tokens, prefill_pairs, decode_requests
    )
    queues(
        table, prefills, decodes, prefill_requests, prefill_tokens, prefill_pairs, reaches,
        elsewhere, ahead,
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
        below = restore[0] * host[where] + restore[1] * storage[where]
        back = overlap_weight * token[where] * block_size[where] * below
        n = float(decode_requests[there])
        law = a[there], b[there], d[there], n_sat[there], beta[there], floor[there]
        pace, slower = itl(law, n), itl(law, n + 1.0)
        stalls = stall_base[there], stall_token[there]
        stall, delay, others = 0.0, service, 0.0
        transfer = reading[where] if reading.shape[0] else 0.0
        stored = prompt - overlap_weight * cached[where]
        pushed = again[where] * each[where] * stored + again[there] * each[there] * output
        if local:
            taken = among(prompts, stalls, 1, uncached, pairs)
            stall = toll * taken * n
            if n > 0.0:  # the rest of the step that runs, and its own
                delay, service = taken, max(service, 1.5 * pace + taken)
        else:
            missing = prompt - overlap_weight * cached[there]
            pushed += again[there] * each[there] * missing
            transfer += move_base[there] + move_token[there] * missing
            others = beside(
                (base[there], token[there], pair[there]), stalls, prefill_requests[there],
                float(prefill_tokens[there]), float(prefill_pairs[there]),
                wait + service + back + transfer,
            )  # fmt: skip
        streams = output * slower + others
        stream = toll * output * n * (slower - pace)
        queue = toll * min(delay * ahead[1, where], ahead[2, where])
        memory = toll * pushed * (service + queue + stall) / max(service, 1e-12)
        parts = (
            wait, service + back, transfer, streams, stream, queue, stall, memory,
            toll * lost if there == best else 0.0, late * (wait + service + back + transfer),
        )  # fmt: skip
        # In the order of the rows, as whoever adds them up again does: sums must be the same.
        total = 0.0
        for row in range(10):
            found[row, i] = parts[row]
            total += parts[row]
        found[10, i] = total
