"""The toll policy's kernel equals its terms, over prospects that NumPy makes of the fleet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pigou.control.latency_model.estimates import Estimates, pairs
from pigou.control.lengths import Prediction
from pigou.control.routing.toll import terms
from pigou.control.routing.toll.policy import Toll, TollParams
from pigou.control.routing.toll.terms import PARTS, Prospect, TollWeights
from pigou.control.routing.view import Candidates, FleetView
from pigou.control.state import PrefillBacklog
from pigou.games.latency import LatencyLaw
from pigou.request import SECOND, Request


@dataclass(frozen=True)
class Case:
    """A request before a fleet."""

    fleet: FleetView
    candidates: Candidates
    prompt: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Fleets of two to six workers of all roles, with loads, caches and prompts under way."""
    workers = draw(st.integers(2, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    known = Estimates.prior(workers, LatencyLaw(0.0008, 0.02, 0.05, 40.0, 1.5))
    for name in ("prefill_token", "prefill_pair", "interference_token", "context_token"):
        column = getattr(known, name)
        column[:] = rng.uniform(0, {"prefill_pair": 1e-8, "context_token": 1e-7}.get(name, 3e-4),
                                workers)  # fmt: skip
    known.prefill_token[:] += 1e-6
    known.arrivals[:] = rng.uniform(0, 5, workers)
    known.fleet_arrivals[:] = rng.uniform(0, 20)
    known.mean_prefill[:] = rng.uniform(0.01, 0.5, workers)
    known.mean_context[:] = 3000.0
    prompts = rng.integers(0, 4, workers)
    backlog = PrefillBacklog()
    for row in range(workers):
        backlog.up()
        if prompts[row]:
            backlog.add(row, "under way", 700, 10**5, int(rng.integers(0, 2 * SECOND)))
    prompt, decodes = draw(st.integers(16, 50_000)), rng.random(workers) < 0.7
    decodes[0], prefills = True, rng.random(workers) < 0.7
    held = rng.integers(0, 1 + prompt // 16, workers)
    host = rng.integers(0, 1 + held)
    fleet = FleetView.of(
        workers, estimates=known, output=float(rng.integers(1, 400)), backlog=backlog,
        now=2 * SECOND, prefills=prefills, decodes=decodes, prefill_requests=prompts,
        prefill_tokens=prompts * 900, prefill_pairs=prompts * 10**6,
        decode_requests=rng.integers(0, 30, workers), decode_tokens=rng.integers(0, 10**5, workers),
        overlap=held, device=held - host, host=host,
        recomputed_share=rng.uniform(0, 1, workers),
        lengths=Prediction(0.0, 0.0, float(rng.choice((0, 10**5)))),
    )  # fmt: skip
    offered = [(-1, d) for d in np.flatnonzero(decodes)]
    offered += [(p, d) for p in np.flatnonzero(prefills) for _, d in offered if p != d]
    array = np.array(offered, dtype=np.int32)
    return Case(fleet, Candidates(array[:, 0].copy(), array[:, 1].copy()), prompt)


def prospect(case: Case, params: TollParams) -> Prospect:
    """What is expected of each candidate, as the documentation says it."""
    fleet, known, prompt, output = case.fleet, case.fleet.estimates, case.prompt, case.fleet.output
    d, p, local = case.candidates.decode, case.candidates.computes, case.candidates.local
    held, first = fleet.cached(prompt), fleet.backlog
    assert first is not None
    work = known.work(fleet.prefill_requests, fleet.prefill_tokens, fleet.prefill_pairs)
    first_s = known.prefill_base + known.prefill_token * first.tokens
    first_s = first_s + known.prefill_pair * first.pairs
    elapsed = np.minimum(first_s, (fleet.now - first.since) / SECOND)
    wait = np.maximum(0.0, work - np.where(fleet.prefill_requests > 0, elapsed, 0.0))[p]

    def taken(rows: np.ndarray, prompts: object, tokens: object, pair_count: object) -> np.ndarray:
        size = tokens + known.prefill_pair[rows] / known.prefill_token[rows] * pair_count
        return known.interference_base[rows] * prompts + known.interference_token[rows] * size

    uncached = (prompt - held[p]).astype(float)
    service = known.service(p, uncached, prompt)
    stall = taken(d, 1, uncached, pairs(uncached, prompt))
    n, mean = fleet.decode_requests[d].astype(float), known.mean_context[d]
    reads = known.context_token[d]
    step = known.itl(d, n) + reads * (fleet.decode_tokens[d] - mean * n)
    longer = known.itl(d, n + 1) + reads * (fleet.decode_tokens[d] - mean * n)
    longer = longer + reads * (prompt + output / 2 - mean)
    beside = local & (n > 0)
    restored = 16 * (params.host_restore * fleet.host[p] + params.storage_restore * 0)
    computed = np.where(beside, np.maximum(service, 1.5 * step + stall), service)
    prefill = computed + known.prefill_token[p] * restored
    missing = prompt - held[d]
    transfer = np.where(local, 0.0, known.transfer(d, missing))
    ahead = work[d]
    left = np.maximum(0.0, ahead - (wait + prefill + transfer))
    all_taken = taken(d, fleet.prefill_requests[d], fleet.prefill_tokens[d], fleet.prefill_pairs[d])
    later = np.minimum(left, left / np.maximum(ahead, 1e-300) * all_taken)
    assert fleet.lengths is not None
    variance = fleet.lengths.variance
    longer_s = 0.5 * reads * variance
    each_s = known.prefill_token[d] + known.prefill_pair[d] * (prompt + output)
    stored = np.where(local, 0.0, known.service(p, (prompt - held[p]).astype(float), prompt))
    return Prospect(
        wait, prefill, transfer, output * longer + longer_s + np.where(local, 0.0, later), n,
        output * (longer - step) + longer_s, np.where(local, stall, 0.0),
        np.where(beside, stall, service),
        *later_prompts(fleet, p, wait), stored,
        known.service(d, missing + output, prompt + output)
        + 0.5 * known.prefill_pair[d] * variance,
        each_s**2 * variance,
    )  # fmt: skip


def later_prompts(fleet: FleetView, p: np.ndarray, wait: np.ndarray) -> tuple[np.ndarray, ...]:
    """Prompts a second that come to the computing worker, and what the next loses elsewhere."""
    known, alone = fleet.estimates, fleet.prefills & ~fleet.decodes
    tokens = (known.mean_prefill - known.prefill_base) / known.prefill_per_token
    size = known.interference_base + known.interference_token * tokens
    backlog = known.work(fleet.prefill_requests, fleet.prefill_tokens, fleet.prefill_pairs)
    first = fleet.backlog
    assert first is not None
    first_s = known.prefill_base + known.prefill_token * first.tokens
    first_s = np.minimum(
        first_s + known.prefill_pair * first.pairs, (fleet.now - first.since) / SECOND
    )
    backlog = np.maximum(0.0, backlog - np.where(fleet.prefill_requests > 0, first_s, 0.0))
    local = backlog + known.mean_prefill + fleet.decode_requests * size
    local = local - known.transfer_base - known.transfer_token * tokens
    rate = known.fleet_arrivals / max(1, alone.sum())
    other_s = local[fleet.decodes].min() - known.mean_prefill[p]
    other_s = np.maximum(0.0, other_s - np.maximum(0.0, wait - 1.0 / np.maximum(rate[p], 1e-9)))
    return np.where(alone[p], rate[p], known.arrivals[p]), np.where(alone[p], other_s, np.inf)


def weights(case: Case, params: TollParams, mean_s: float) -> TollWeights:
    """The weights, as the documentation says them."""
    fleet, known = case.fleet, case.fleet.estimates

    def again(pool: np.ndarray) -> float:
        share = min(0.9, fleet.recomputed_share[pool].mean()) if pool.any() else 0.0
        return float(share / (1.0 - share))

    taken = np.minimum(1.0, known.interference_token / known.prefill_token)[fleet.decodes]
    stalled = fleet.decode_requests[fleet.decodes].mean() * taken.mean()
    return TollWeights(params.toll, params.urgency / mean_s if mean_s else 0.0, float(stalled),
                   again(fleet.prefills), again(fleet.decodes))  # fmt: skip


@given(cases(), st.floats(0, 2), st.floats(0, 4), st.sampled_from((0.0, 0.05, 3.0)))
def test_the_kernel_is_the_sum_of_the_terms(
    case: Case, toll: float, urgency: float, mean_s: float
) -> None:
    params = TollParams(toll=toll, urgency=urgency)
    policy = Toll(params)
    if mean_s:
        policy.recent_ttft.add(mean_s)
    found = policy.parts(Request("r", case.prompt, 9), case.fleet, case.candidates)
    p, w = prospect(case, params), weights(case, params, mean_s)
    expected = (
        p.wait_s, p.prefill_s, p.transfer_s, p.decode_s, terms.urgency(p, w),
        terms.toll_stream(p, w), terms.toll_queue(p, w), terms.toll_memory(p, w),
    )  # fmt: skip
    for name, part in zip(PARTS, expected, strict=True):
        assert found[name] == pytest.approx(part, rel=1e-9, abs=1e-12), name
    assert found.total == pytest.approx(sum(expected), rel=1e-9)
    assert terms.private(p) == pytest.approx(sum(expected[:4]))
