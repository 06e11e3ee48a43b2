"""Replay of requests through a fleet of prefill and decode workers, in one compiled pass.

One process for all waits: a prompt goes where the toll policy's price is least; prompts on a worker
that decodes take chunks of its steps, and its streams wait for them; KV joins at a step's end.

| symbol | meaning |
|---|---|
| f | seconds of a step by streams and the tokens that they hold |
| s, z | prefill seconds of a prompt alone, and those it takes from streams beside it |
| Q | seconds of the prompts before this one on the worker that computes it |
| n | requests on the worker that decodes, arrivals under way included |
| T, rise | expected TTFT, and its urgency: 2 over the mean of recent ones |

The prices are those of `pigou.control.routing.toll.terms`, without memory, at known speeds.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import inlined, kernel

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
#: Steps of a busy worker before a request's KV has come (it is seen, and planned ahead, twice), and
#: before a prompt begins; steps of joining that the router's law of transfers has learned.
_JOINING, _AHEAD, _KNOWN = 2.5, 1.0, 2.0
#: Exponent by which the router's law of stalls, common to the fleet, leans to prefill workers.
_COMMON = 0.2
#: Share of a mean prompt's stall that the router sees in what the next prompt would lose elsewhere:
#: it counts tokens there, not pairs.
_SEEN = 0.5
#: Requests over which the router takes the mean TTFT; urgency of the toll policy.
_MEMORY, _URGENCY = 128.0, 2.0
#: When all requests have ended, in seconds.
_END_S = 1e15


class ReplayedPrompts(NamedTuple):
    """Requests in order of their arrival, (requests,) each."""

    arrival_s: Floats
    prompt: Floats  # tokens
    output: Floats  # tokens
    computed: Floats  # uncached prompt tokens
    prefill_s: Floats  # on a prefill worker
    transfer_s: Floats  # to the decode worker, without steps
    local_s: Floats  # on a worker that decodes, without streams
    stall_s: Floats  # seconds of `local_s` beyond its steps without it


class StepTable(NamedTuple):
    """Seconds of decode steps, (contexts, streams)."""

    streams: Floats
    contexts: Floats
    seconds: Floats


class ReplayedFleet(NamedTuple):
    """Workers and their limits; `prefill` is 0 where all workers do both."""

    prefill: int
    decode: int
    prefill_chunk: float  # tokens of a step
    chunk: float
    max_seqs: int
    kv_tokens: float


class WaitingPrompts(NamedTuple):
    """Requests that wait at each worker, and since when; entries head to tail count."""

    ids: Counts  # (workers, requests)
    at_s: Floats
    head: Counts  # (workers,)
    tail: Counts


class ReplayStreams(NamedTuple):
    """Streams of each worker, (workers, slots); the first `running` slots are used."""

    clock_s: Floats  # end of the last step, (workers,)
    running: Counts
    held: Floats  # tokens
    assigned: Counts  # requests routed here that have not ended
    ids: Counts
    left: Floats  # tokens to generate


class ReplayState(NamedTuple):
    """Where all requests are."""

    remote: WaitingPrompts  # prompts of prefill workers
    local: WaitingPrompts  # prompts of workers that decode
    joining: WaitingPrompts  # requests whose KV comes, by decode worker
    streams: ReplayStreams
    clock_s: Floats  # end of each prefill worker's last step, (prefill workers,)
    left: Floats  # prompt tokens to compute, (requests,)
    owner: Counts  # decode worker of each request, (requests,)
    times_s: Floats  # first and last token of each request, (requests, 2)


@inlined
def _bracket(axis: Floats, x: float) -> int:
    low, high = 0, axis.shape[0] - 2
    while low < high:
        middle = (low + high + 1) // 2
        if axis[middle] <= x:
            low = middle
        else:
            high = middle - 1
    return low


@inlined
def _step_s(steps: StepTable, streams: float, held: float) -> float:
    """Seconds of a step, bilinear in streams and in the tokens of each."""
    n = max(streams, 1.0)
    i, j = _bracket(steps.streams, n), _bracket(steps.contexts, held / n)
    a = (n - steps.streams[i]) / (steps.streams[i + 1] - steps.streams[i])
    b = (held / n - steps.contexts[j]) / (steps.contexts[j + 1] - steps.contexts[j])
    b = max(b, 0.0)
    low = steps.seconds[j, i] * (1.0 - a) + steps.seconds[j, i + 1] * a
    high = steps.seconds[j + 1, i] * (1.0 - a) + steps.seconds[j + 1, i + 1] * a
    return float(low * (1.0 - b) + high * b)


@inlined
def _push(queue: WaitingPrompts, w: int, request: int, at_s: float) -> None:
    """Insert a request by its time."""
    i = queue.tail[w]
    while i > queue.head[w] and queue.at_s[w, i - 1] > at_s:
        queue.at_s[w, i], queue.ids[w, i] = queue.at_s[w, i - 1], queue.ids[w, i - 1]
        i -= 1
    queue.at_s[w, i], queue.ids[w, i] = at_s, request
    queue.tail[w] += 1


@inlined
def _chunk(
    queue: WaitingPrompts, w: int, now_s: float, budget: float, slots: int, left: Floats,
    computed: Floats, seconds: Floats,
) -> tuple[int, float]:  # fmt: skip
    """Compute the next tokens of waiting prompts; return the first that remains, and seconds."""
    i, taken_s = queue.head[w], 0.0
    end = min(queue.tail[w], i + slots)
    while i < end and budget > 0.0 and queue.at_s[w, i] <= now_s:
        r = queue.ids[w, i]
        tokens = min(left[r], budget)
        taken_s += seconds[r] * tokens / computed[r]
        left[r] -= tokens
        budget -= tokens
        if left[r] > 0.0:
            break
        i += 1
    return i, taken_s


@inlined
def _backlog_s(
    queue: WaitingPrompts, w: int, left: Floats, computed: Floats, seconds: Floats
) -> float:
    total = 0.0
    for i in range(queue.head[w], queue.tail[w]):
        r = queue.ids[w, i]
        total += seconds[r] * left[r] / computed[r]
    return total


@inlined
def _prefill_until(
    p: int,
    until_s: float,
    prompts: ReplayedPrompts,
    steps: StepTable,
    fleet: ReplayedFleet,
    state: ReplayState,
) -> None:
    """Run the steps of a prefill worker that begin before `until_s`."""
    waiting, streams = state.remote, state.streams
    while waiting.head[p] < waiting.tail[p]:
        begin_s = max(state.clock_s[p], waiting.at_s[p, waiting.head[p]])
        if begin_s >= until_s:
            return
        slots = waiting.tail[p] - waiting.head[p]
        done, taken_s = _chunk(
            waiting,
            p,
            begin_s,
            fleet.prefill_chunk,
            slots,
            state.left,
            prompts.computed,
            prompts.prefill_s,
        )
        state.clock_s[p] = begin_s + taken_s
        for i in range(waiting.head[p], done):
            r = waiting.ids[p, i]
            d, at_s = state.owner[r], state.clock_s[p] + prompts.transfer_s[r]
            if streams.running[d] > 0:
                step_s = _step_s(steps, float(streams.running[d]), streams.held[d])
                at_s += _JOINING * step_s
            _push(state.joining, d, r, at_s)
        waiting.head[p] = done


@inlined
def _add(streams: ReplayStreams, d: int, request: int, held: float, left: float) -> None:
    i = streams.running[d]
    streams.ids[d, i], streams.left[d, i] = request, left
    streams.held[d] += held
    streams.running[d] += 1


@inlined
def _join(d: int, prompts: ReplayedPrompts, fleet: ReplayedFleet, state: ReplayState) -> None:
    """Make streams of requests whose KV has come, while there are slots and memory."""
    joining, streams = state.joining, state.streams
    while joining.head[d] < joining.tail[d]:
        r, n = joining.ids[d, joining.head[d]], streams.running[d]
        if joining.at_s[d, joining.head[d]] > streams.clock_s[d] or n >= fleet.max_seqs:
            return
        size = prompts.prompt[r] + prompts.output[r]
        if n and streams.held[d] + size > fleet.kv_tokens:
            return
        _add(streams, d, r, prompts.prompt[r], prompts.output[r])
        joining.head[d] += 1


@inlined
def _generate(
    d: int, count: float, first_s: float, end_s: float, prompts: ReplayedPrompts, state: ReplayState
) -> None:
    """Give each stream `count` tokens, and end those that are complete."""
    streams, times_s = state.streams, state.times_s
    streams.held[d] += streams.running[d] * count
    i = 0
    while i < streams.running[d]:
        r = streams.ids[d, i]
        if times_s[r, 0] == 0.0:
            times_s[r, 0] = first_s
        streams.left[d, i] -= count
        if streams.left[d, i] > 0.5:
            i += 1
            continue
        times_s[r, 1] = end_s
        streams.held[d] -= prompts.prompt[r] + prompts.output[r]
        streams.assigned[d] -= 1
        streams.running[d] -= 1
        last = streams.running[d]
        streams.ids[d, i], streams.left[d, i] = streams.ids[d, last], streams.left[d, last]


@inlined
def _next_s(queue: WaitingPrompts, d: int) -> float:
    return float(queue.at_s[d, queue.head[d]]) if queue.head[d] < queue.tail[d] else math.inf


@inlined
def _decode_until(
    d: int,
    until_s: float,
    prompts: ReplayedPrompts,
    steps: StepTable,
    fleet: ReplayedFleet,
    state: ReplayState,
) -> None:
    """Run the steps of a worker that decodes which begin before `until_s`."""
    waiting, streams = state.local, state.streams
    while True:
        _join(d, prompts, fleet, state)
        now_s, n, held = streams.clock_s[d], streams.running[d], streams.held[d]
        prompt_s, joined_s = _next_s(waiting, d), _next_s(state.joining, d)
        if n == 0 and prompt_s > now_s:
            next_s = min(prompt_s, joined_s)
            if next_s >= until_s:
                return
            streams.clock_s[d] = max(next_s, now_s)
            continue
        if now_s >= until_s:
            return
        step_s, done = _step_s(steps, float(n), held), waiting.head[d]
        if prompt_s <= now_s and n < fleet.max_seqs:
            r = waiting.ids[d, done]
            if n == 0 or held + prompts.prompt[r] + prompts.output[r] <= fleet.kv_tokens:
                done, taken_s = _chunk(
                    waiting,
                    d,
                    now_s,
                    fleet.chunk - n,
                    fleet.max_seqs - n,
                    state.left,
                    prompts.computed,
                    prompts.stall_s,
                )
                streams.clock_s[d] = now_s + step_s + taken_s
        if streams.clock_s[d] > now_s:
            _generate(d, 1.0, streams.clock_s[d], streams.clock_s[d], prompts, state)
        else:
            next_s = min(until_s, prompt_s if prompt_s > now_s else until_s)
            next_s = min(next_s, joined_s if joined_s > now_s else next_s)
            count = float(math.ceil((next_s - now_s) / step_s))
            for i in range(n):
                count = min(count, streams.left[d, i])
            count = max(count, 1.0)
            end_s = now_s + count * _step_s(steps, float(n), held + 0.5 * n * count)
            streams.clock_s[d] = end_s
            _generate(d, count, now_s + step_s, end_s, prompts, state)
        for i in range(waiting.head[d], done):
            r = waiting.ids[d, i]
            state.times_s[r, 0] = state.times_s[r, 1] = streams.clock_s[d]
            if prompts.output[r] > 1.0:
                _add(streams, d, r, prompts.prompt[r] + 1.0, prompts.output[r] - 1.0)
            else:
                streams.assigned[d] -= 1
        waiting.head[d] = done


@inlined
def _toll_s(rate: float, wait_s: float, delay_s: float, elsewhere_s: float, rise: float) -> float:
    """Seconds that later prompts lose (`toll_queue`)."""
    lost_s = min(rate * delay_s * (wait_s + 0.5 * delay_s), elsewhere_s)
    return lost_s * (1.0 + 0.5 * rise * (wait_s + delay_s))


@inlined
def _first_cost_s(first_s: float, rise: float) -> float:
    return first_s + 0.5 * rise * first_s * first_s


class RouteMeans(NamedTuple):
    """Means that prices are made of."""

    output: float  # tokens
    context: float  # tokens of a stream
    step_s: float  # seconds of a step of one stream
    local_s: float  # seconds of a prompt on a worker that decodes
    remote_s: float  # seconds on a prefill worker, transfer included


@inlined
def _choose(
    r: int, p: int, wait_s: float, rates: tuple[float, float], rise: float, means: RouteMeans,
    prompts: ReplayedPrompts, steps: StepTable, state: ReplayState,
) -> tuple[int, bool, float]:  # fmt: skip
    """Return the decode worker of the least price, whether `p` computes, and the TTFT expected."""
    streams, local, workers = state.streams, state.local, state.streams.running.shape[0]
    mean_s, step_s, prompt_s = means.local_s, means.step_s, prompts.local_s[r]
    known_s = prompt_s * (prompts.prefill_s[r] / prompt_s) ** _COMMON
    stall_s = max(known_s - step_s, 0.0)
    around_s = math.inf
    for d in range(workers):
        lost_s = _backlog_s(local, d, state.left, prompts.computed, prompts.local_s)
        lost_s += streams.assigned[d] * _SEEN * (mean_s - step_s)
        around_s = min(around_s, lost_s + mean_s - means.remote_s)
    around_s = max(around_s - max(0.0, wait_s - 1.0 / max(rates[0], 1e-9)), 0.0)
    lowest_s, chosen, is_remote, expected_s = math.inf, 0, False, 0.0
    for d in range(workers):
        n = float(streams.assigned[d])
        own_s = _step_s(steps, n, max(n, 1.0) * means.context)
        next_s = _step_s(steps, n + 1.0, (n + 1.0) * means.context)
        shared_s = means.output * (next_s + n * (next_s - own_s))
        queued_s = _backlog_s(local, d, state.left, prompts.computed, prompts.local_s)
        first_s, delay_s = queued_s + prompt_s, prompt_s
        if n > 0.0:
            first_s, delay_s = queued_s + max(prompt_s, 1.5 * own_s + stall_s), stall_s
        cost_s = shared_s + n * stall_s + _first_cost_s(first_s, rise)
        cost_s += _toll_s(rates[1], queued_s, delay_s, math.inf, rise)
        if cost_s < lowest_s:
            lowest_s, chosen, is_remote, expected_s = cost_s, d, False, first_s
        if p >= 0:
            taken_s = prompts.prefill_s[r]
            first_s = wait_s + taken_s + prompts.transfer_s[r] + _KNOWN * step_s
            cost_s = shared_s + _first_cost_s(first_s, rise)
            cost_s += _toll_s(rates[0], wait_s, taken_s, around_s, rise)
            if cost_s < lowest_s:
                lowest_s, chosen, is_remote, expected_s = cost_s, d, True, first_s
    return chosen, is_remote, expected_s


@kernel
def _replay(
    prompts: ReplayedPrompts,
    steps: StepTable,
    fleet: ReplayedFleet,
    state: ReplayState,
    rate_rps: float,
    means: RouteMeans,
) -> None:
    ttft_s, seen, computed_here = 0.0, 0.0, 0.0
    for r in range(prompts.prompt.shape[0]):
        now_s, p, wait_s = prompts.arrival_s[r], -1, math.inf
        for i in range(fleet.prefill):
            _prefill_until(i, now_s, prompts, steps, fleet, state)
            waits_s = max(state.clock_s[i] - now_s, 0.0)
            waits_s += _backlog_s(state.remote, i, state.left, prompts.computed, prompts.prefill_s)
            if waits_s < wait_s:
                p, wait_s = i, waits_s
        for d in range(fleet.decode):
            _decode_until(d, now_s, prompts, steps, fleet, state)
        own_rate = rate_rps
        if p >= 0:
            own_rate = computed_here / max(now_s - prompts.arrival_s[0], 1e-3)
        rates = (rate_rps / max(fleet.prefill, 1), own_rate / fleet.decode)
        rise = _URGENCY / ttft_s if ttft_s > 0.0 else 0.0
        d, is_remote, expected_s = _choose(
            r, p, wait_s, rates, rise, means, prompts, steps, state
        )  # fmt: skip
        seen = min(_MEMORY, seen + 1.0)
        ttft_s += (expected_s - ttft_s) / seen
        state.owner[r] = d
        state.streams.assigned[d] += 1
        if is_remote:
            _push(state.remote, p, r, now_s)
            continue
        computed_here += 1.0
        count, held = float(state.streams.running[d]), state.streams.held[d]
        _push(state.local, d, r, now_s + (_AHEAD * _step_s(steps, count, held) if count else 0.0))
    for p in range(fleet.prefill):
        _prefill_until(p, _END_S, prompts, steps, fleet, state)
    for d in range(fleet.decode):
        _decode_until(d, _END_S, prompts, steps, fleet, state)


def replay(
    prompts: ReplayedPrompts, steps: StepTable, fleet: ReplayedFleet, rate_rps: float
) -> Floats:
    """Return the seconds of each request's first and last token, (requests, 2)."""
    requests, first, second = len(prompts.prompt), fleet.prefill, fleet.decode
    slots = (second, fleet.max_seqs + 1)
    state = ReplayState(
        _queue(first, requests), _queue(second, requests), _queue(second, requests),
        ReplayStreams(
            np.zeros(second), np.zeros(second, np.int64), np.zeros(second),
            np.zeros(second, np.int64), np.zeros(slots, np.int64), np.zeros(slots),
        ),
        np.zeros(first), prompts.computed.copy(), np.zeros(requests, np.int64),
        np.zeros((requests, 2)),
    )  # fmt: skip
    output = prompts.output
    context = float(output @ (prompts.prompt + 0.5 * output) / output.sum())
    step_s = float(np.interp(context, steps.contexts, steps.seconds[:, 0]))
    remote_s = float((prompts.prefill_s + prompts.transfer_s).mean()) + _KNOWN * step_s
    local_s = float(prompts.local_s.mean())
    means = RouteMeans(float(output.mean()), context, step_s, local_s, remote_s)
    _replay(prompts, steps, fleet, state, rate_rps, means)
    return state.times_s


def _queue(workers: int, requests: int) -> WaitingPrompts:
    shape = (workers, requests)
    zeros = np.zeros(workers, np.int64)
    return WaitingPrompts(np.zeros(shape, np.int64), np.zeros(shape), zeros, zeros.copy())
