"""Attacks of a tenant under each admission order, by the lie that gains it most.

Three victims send a fifth of the fleet's capacity each, the attacker half, and honest play is the
reference. An attack has the work of honest play: what it sends beside its jobs replaces some.
All lies of a grid are searched by own gain (by harm, where that is the aim) on seed 101, and the
best is reported on others.

| figure | meaning |
|---|---|
| victim_ratio | TTFT P99 of the victims over that at honest play |
| goodput_ratio | their requests per second with a first token within a second, likewise |
| gain, latency_gain | tokens of its jobs, and its inverse median TTFT, over honest play |
| cost | fleet seconds charged to the attacker at the default prices, over honest play |
| gpu_ratio, workers | GPU time of a planned fleet over that without junk, and its most workers |
| attempts | requests that the attacker sent for each of its jobs |
| hit_ratio | prompt tokens found in a prefix cache, of honest play or of a victim beside quotas |
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from random import Random
from typing import Any, TypeAlias

import msgspec
import numpy as np

from pigou.cli.plan import processes
from pigou.control.admission.usage_prices import FleetRates
from pigou.request import POOL, SECOND
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import ScalingConfig, read_fleet
from pigou.sim.request_run import RequestRun, RunOutcome
from pigou.sim.setup import Setup
from pigou.sim.simulation import Simulation, unlimited
from pigou.sim.virtual_clock import EPOCH
from pigou.sim.workload import OpenLoop, RequestSession, RequestSpec
from pigou_lab.experiments.fleets import PaperFleet, Reading
from pigou_lab.experiments.results import COMPARED, Row, logs_requests, run_simulation

#: Orders by name, with credits and quanta of about a second of the fleet.
ORDERS: Mapping[str, Mapping[str, Any]] = {
    "fcfs": {},
    "edf": {"patience_ms": 2000},
    "fair": {"credit": 2048.0},
    "priority-fair": {"credit": 2048.0},
    "drf": {},
    "karma": {},
    "dlpm": {"quantum": 2048.0},
    "d2lpm": {"quantum": 2048.0},
    "market": {},
}
#: Orders that are another one where nobody claims a deadline or priority, and so are not run.
EQUAL = {"edf": "fcfs", "priority-fair": "fair"}
VICTIMS, ATTACKER = ("v0", "v1", "v2"), "x"
#: Seconds of arrivals, requests per second that the fleet serves, parts of the tenants.
HOLD_S, CAPACITY_RPS, VICTIM_PART, ATTACKER_PART = 16.0, 18.0, 0.2, 0.5
#: Tokens of a prompt that its template shares, tokens of its own; output; templates of a tenant.
SHARED, OWN, OUTPUT, TEMPLATES = 1024, 128, (128, 384), 4
SEARCH_SEED, TTFT_SLO_S = 101, 1.0
#: Clients of all: as OpenAI's, but for more patience.
CLIENT = ClientConfig(retries=8, backoff=0.5, max_backoff=8.0)
#: Scopes of the attacker's jobs and of what it sends beside them.
_JOBS, _JUNK = 1000, 2000
_SETUP = Setup(model="llama-3.1-8b", gpu="H100", blocks=2048)
_RATES = FleetRates()

Lie: TypeAlias = Mapping[str, float]


@dataclass
class Play:
    """What the attacker does."""

    sessions: list[RequestSession]
    client: ClientConfig | None = None  # attacker's client; None for the victims'
    weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Attack:
    """A way to deviate from honest play, and the parameters to search."""

    play: Callable[[list[RequestSession], Lie, Random], Play]
    grid: Mapping[str, Sequence[float]] = field(default_factory=dict)
    harms: bool = False  # it wants the victims' TTFT P99 up, and no service


def jobs(
    tenant: str, scope: int, part: float, seed: int, seconds: tuple[float, float] | None = None
) -> list[RequestSession]:
    """Return honest requests: Poisson arrivals, prompts that share a template."""
    rng, sessions = Random(f"{tenant}/{seed}"), []
    at, end = seconds or (0.0, HOLD_S)
    while (at := at + rng.expovariate(part * CAPACITY_RPS)) < end:
        ids = (rng.randrange(TEMPLATES), rng.getrandbits(40))
        spec = RequestSpec(SHARED + OWN, rng.randint(*OUTPUT), ids, scope, SHARED, tenant=tenant)
        sessions.append(RequestSession(round(at * SECOND), (spec,)))
    return sessions


def price(prompt: float, output: float) -> float:
    """Return fleet seconds of uncached prompt tokens and output."""
    return _RATES.prefill_s * prompt + _RATES.output_s * output


def _each(change: Callable[[RequestSpec], RequestSpec]) -> Callable[..., list[RequestSession]]:
    return lambda honest: [
        RequestSession(one.start_ns, tuple(change(spec) for spec in one.requests)) for one in honest
    ]


def _at(honest: list[RequestSession], when: Callable[[float], float]) -> list[RequestSession]:
    moved = ((when(one.start_ns / SECOND), one.requests) for one in honest)
    return [RequestSession(round(at * SECOND), specs) for at, specs in moved]


def _beside(
    honest: list[RequestSession], part: float, rng: Random, made: Callable[[], list[RequestSpec]]
) -> list[RequestSession]:
    """Replace a part of the work by what `made` makes, at random times."""
    budget = part * sum(price(OWN, one.requests[0].output_tokens) for one in honest)
    kept = [one for one in honest if rng.random() >= part]
    while budget > 0:
        specs = made()
        budget -= sum(price(spec.prompt_tokens, spec.output_tokens) for spec in specs)
        kept.append(RequestSession(round(rng.uniform(0, HOLD_S) * SECOND), specs))
    return kept


def _junk(rng: Random, prompt: float, output: float) -> RequestSpec:
    ids = (rng.getrandbits(40),)
    return RequestSpec(int(prompt), int(output), ids, _JUNK, prompt, tenant=ATTACKER)


def _over_claim(honest: list[RequestSession], lie: Lie, _: Random) -> Play:
    change = _each(lambda s: replace(s, max_tokens=int(s.output_tokens * lie["times"])))
    return Play(change(honest))


def _urgent(honest: list[RequestSession], lie: Lie, _: Random) -> Play:
    priority, deadline_ns = -int(lie["priority"]), round(lie["deadline_s"] * SECOND)
    claim = _each(lambda spec: replace(spec, priority=priority, deadline_ns=deadline_ns))
    return Play(claim(honest))


def _hold_back(honest: list[RequestSession], lie: Lie, _: Random) -> Play:
    return Play(_at(honest, lambda at: max(at, lie["until_s"])))


def _warm(honest: list[RequestSession], lie: Lie, rng: Random) -> Play:
    def made() -> list[RequestSpec]:
        ids = (rng.randrange(TEMPLATES),)
        return [RequestSpec(SHARED, 1, ids, _JOBS, SHARED, tenant=ATTACKER)]

    return Play(_beside(honest, lie["part"], rng, made))


def _bursts(honest: list[RequestSession], lie: Lie, _: Random) -> Play:
    period, phase = lie["period_s"], lie["phase"]
    return Play(_at(honest, lambda at: (math.ceil(at / period) + phase) * period))


def _flood(honest: list[RequestSession], lie: Lie, rng: Random) -> Play:
    return Play(_beside(honest, lie["part"], rng, lambda: [_junk(rng, lie["prompt"], 1)]))


def _squeeze(honest: list[RequestSession], lie: Lie, rng: Random) -> Play:
    """Fill the KV with long outputs, then press with short requests (arXiv 2602.07878)."""

    def made() -> list[RequestSpec]:
        fill = _junk(rng, 64, lie["fill"])
        return [fill, *(_junk(rng, 64, 8) for _ in range(4))]

    return Play(_beside(honest, lie["part"], rng, made))


def _bomb(honest: list[RequestSession], lie: Lie, rng: Random) -> Play:
    """Loops of an agent whose context grows with each turn."""

    def made() -> list[RequestSpec]:
        turns, step = int(lie["turns"]), 512
        return [_junk(rng, step * (turn + 1), 128) for turn in range(turns)]

    return Play(_beside(honest, lie["part"], rng, made))


def _sybil(honest: list[RequestSession], lie: Lie, rng: Random) -> Play:
    keys = int(lie["keys"])
    change = _each(lambda spec: replace(spec, tenant=f"{ATTACKER}{rng.randrange(keys)}"))
    return Play(change(honest))


def _pooled_sybil(honest: list[RequestSession], lie: Lie, rng: Random) -> Play:
    """The same names, whose payer nobody knows: they share one weight."""
    play = _sybil(honest, lie, rng)
    play.weights = _POOLED
    return play


_POOLED = {**dict.fromkeys(VICTIMS, 1.0), POOL: 1.0}


def _storm(honest: list[RequestSession], lie: Lie, _: Random) -> Play:
    """Try again at once, and for as long as jobs arrive; 0 seconds never give an answer up."""
    timeout_s, wait_s = lie["timeout_s"], 0.1
    client = ClientConfig(
        timeout=timeout_s, retries=int(HOLD_S / (timeout_s + wait_s)), backoff=wait_s,
        max_backoff=wait_s, heeds_retry_after=bool(lie["heeds"]),
    )  # fmt: skip
    return Play(honest, client)


_PART = (0.25, 0.5, 0.75)
#: Attacks by name; their numbers, from 1, are the levels.
ATTACKS: Mapping[str, Attack] = {
    "over-claim": Attack(_over_claim, {"times": (2, 8, 32)}),
    "urgent": Attack(_urgent, {"priority": (0, 10), "deadline_s": (0.05, 1.0)}),
    "hold-back": Attack(_hold_back, {"until_s": (1, 2, 4, 8)}),
    "dummy-prefill": Attack(_warm, {"part": (0.05, 0.1, 0.2, 0.4)}),
    "bursts": Attack(_bursts, {"period_s": (0.5, 1, 2, 4), "phase": (0.0, 0.25, 0.5)}),
    "cache-flood": Attack(_flood, {"prompt": (2048, 4096, 8192), "part": _PART}, True),
    "fill-and-squeeze": Attack(_squeeze, {"fill": (512, 1024, 2048), "part": _PART}, True),
    "cost-bomb": Attack(_bomb, {"turns": (4, 8, 16), "part": _PART}, True),
    "sybil": Attack(_sybil, {"keys": (2, 4, 8, 32)}),
    "sybil-pooled": Attack(_pooled_sybil, {"keys": (2, 4, 8, 32)}),
    "retry-storm": Attack(_storm, {"timeout_s": (0.0, 2.0, 4.0), "heeds": (0, 1)}),
}
#: The last levels: the timing side channel, a planner that junk makes start workers, KV quotas.
LEVELS = tuple(range(1, len(ATTACKS) + 4))


def simulation(order: str, play: Play, seed: int) -> Simulation:
    """Return a run of victims and attacker under an order."""
    sessions = [
        session
        for number, victim in enumerate(VICTIMS)
        for session in jobs(victim, number, VICTIM_PART, seed)
    ]
    made = _made(order, sessions + play.sessions, play.weights, seed)
    if play.client is not None:
        made.client.own[ATTACKER] = play.client
    return made


def _made(
    order: str, sessions: list[RequestSession], weights: Mapping[str, float], seed: int,
    scaling: ScalingConfig | None = None,
) -> Simulation:  # fmt: skip
    """Return a run of two workers, more if a planner adds them."""
    loop = OpenLoop(sorted(sessions, key=lambda one: one.start_ns))
    limits = {"max_inflight": 16, "max_queued": 48, "queue_timeout": 60 * SECOND}
    admission = {"order": order, **ORDERS[order]}
    control = unlimited(seed=seed, admission=admission, tenant_weights=dict(weights), **limits)
    fleet = read_fleet("2xboth")
    return Simulation(loop, fleet, _SETUP, control, CLIENT, seed=seed, scaling=scaling)


@dataclass(frozen=True)
class Figures:
    """What a run, or several together, came to."""

    ttfts: tuple[float, ...]  # seconds to first token of the victims' requests
    good: int  # victims' first tokens within the objective
    own_ttfts: tuple[float, ...]
    tokens: float  # output of the attacker's jobs within the time of arrivals
    cost: float  # fleet seconds of what the attacker was served
    work: float  # fleet seconds of all within the time of arrivals
    attempts: float  # attempts of the attacker's requests, in all
    own_jobs: float
    prompts: float  # prompt tokens of all that was served
    hits: float  # prompt tokens found in a cache


Case: TypeAlias = tuple[str, str, tuple[tuple[str, float], ...], int]  # order, attack, lie, seed


def figures_of_all(cases: Sequence[Case]) -> list[Figures]:
    """Return the figures of many runs, made by as many processes as there are CPUs."""
    cases = [_run_of(case) for case in cases]
    made = dict.fromkeys(case for case in cases if case not in _FIGURES)
    with processes(1 if logs_requests() or len(made) < 2 else 0) as pool:
        runs = map(_run, made) if pool is None else pool.map(_run, made)
        _FIGURES.update(zip(made, runs, strict=True))
    return [_FIGURES[case] for case in cases]


_FIGURES: dict[Case, Figures] = {}


def _run_of(case: Case) -> Case:
    """Return the run that tells a case's figures."""
    order, attack, lie, seed = case
    return (order if attack == "urgent" else EQUAL.get(order, order), attack, lie, seed)


def _run(case: Case) -> Figures:
    return figures_of(*case)


def figures_of(order: str, attack: str, lie: tuple[tuple[str, float], ...], seed: int) -> Figures:
    """Return figures of one seed; attack "" is honest play."""
    honest = jobs(ATTACKER, _JOBS, ATTACKER_PART, seed)
    play = Play(honest)
    if attack:
        play = ATTACKS[attack].play(honest, dict(lie), Random(f"lie/{seed}"))
    result = run_simulation(simulation(order, play, seed), attack=attack, order=order, seed=seed)
    end = EPOCH + round(HOLD_S * SECOND)
    ttfts: list[float] = []
    own: list[float] = []
    tokens = cost = work = attempts = own_jobs = prompts = hits = 0.0
    for run in result.runs:
        is_own = run.spec.tenant.startswith(ATTACKER)
        attempts, own_jobs = attempts + is_own * run.attempts, own_jobs + is_own
        if run.first_token_ns:
            is_job = not is_own or (run.spec.hash_scope == _JOBS and len(run.spec.block_ids) == 2)
            if is_job:
                (own if is_own else ttfts).append((run.first_token_ns - run.intended_ns) / SECOND)
        elif not is_own:
            ttfts.append(_waited(run))
        paid = price(run.spec.prompt_tokens - run.cached_tokens, run.output_tokens)
        if run.outcome is RunOutcome.DONE:
            prompts, hits = prompts + run.spec.prompt_tokens, hits + run.cached_tokens
            cost += paid * is_own
            if run.last_token_ns <= end:
                work += paid
                tokens += run.output_tokens * (is_own and run.spec.hash_scope == _JOBS)
    good = sum(ttft <= TTFT_SLO_S for ttft in ttfts)
    sums = (tokens, cost, work, attempts, own_jobs, prompts, hits)
    return Figures(tuple(ttfts), good, tuple(own), *sums)


def _waited(run: RequestRun) -> float:
    return max((run.ended_ns - run.intended_ns) / SECOND, HOLD_S)  # it was never served


def together(runs: Sequence[Figures]) -> Figures:
    """Return the figures of several runs as of one."""
    ttfts = tuple(value for run in runs for value in run.ttfts)
    own = tuple(value for run in runs for value in run.own_ttfts)
    names = ("tokens", "cost", "work", "attempts", "own_jobs", "prompts", "hits")
    sums = (math.fsum(getattr(run, name) for run in runs) for name in names)
    return Figures(ttfts, sum(run.good for run in runs), own, *sums)


def trials(order: str, attack: str) -> list[Case]:
    """Return the lies to search, on the search's seed."""
    grid = ATTACKS[attack].grid
    lies = [tuple(zip(grid, values, strict=True)) for values in product(*grid.values())]
    return [(order, attack, lie, SEARCH_SEED) for lie in lies]


def best_lie(order: str, attack: str) -> tuple[tuple[str, float], ...]:
    """Return the lie of most own gain, or most harm, of those searched."""
    cases = trials(order, attack)
    runs = {case[2]: run for case, run in zip(cases, figures_of_all(cases), strict=True)}
    if ATTACKS[attack].harms:
        return max(runs, key=lambda lie: ttft_p99(runs[lie]))
    return max(runs, key=lambda lie: (runs[lie].tokens, -_median(runs[lie].own_ttfts)))


def ttft_p99(figures: Figures) -> float:
    """Return the TTFT P99 of the victims, in seconds."""
    return float(np.percentile(figures.ttfts, 99))


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.inf


def tenants(
    _: PaperFleet, __: Reading, seeds: Sequence[int], levels: Sequence[int]
) -> Iterator[Row]:
    """Yield a row for each attack and order, then for the side channel by tenure."""
    names = list(ATTACKS)
    for level in levels:
        if level > len(names):
            last = (_side_channel, _planner, _quotas)
            yield from last[level - LEVELS[-3]](seeds)
            continue
        attack = names[level - 1]
        honest = [(order, "", (), seed) for order in ORDERS for seed in seeds]
        figures_of_all(honest + [case for order in ORDERS for case in trials(order, attack)])
        figures_of_all([case for order in ORDERS for case in _lied(order, attack, seeds)])
        for order in ORDERS:
            yield _row(level, attack, order, seeds)


def _lied(order: str, attack: str, seeds: Sequence[int]) -> list[Case]:
    lie = best_lie(order, attack)
    return [(order, attack, lie, seed) for seed in seeds]


def _row(level: int, attack: str, order: str, seeds: Sequence[int]) -> Row:
    lie = best_lie(order, attack)
    honest = together(figures_of_all([(order, "", (), seed) for seed in seeds]))
    lied = together(figures_of_all(_lied(order, attack, seeds)))
    fcfs = together(figures_of_all([("fcfs", "", (), seed) for seed in seeds]))
    p99, before = ttft_p99(lied), ttft_p99(honest)
    row: Row = {
        "experiment": "tenants", "concurrency": level, "level_name": attack, "order": order,
        "lie": [f"{name}={value:g}" for name, value in lie],
        "victim_ttft_p99_s": p99, "honest_ttft_p99_s": before, "victim_ratio": p99 / before,
        "goodput_ratio": lied.good / max(1, honest.good), "gain": lied.tokens / honest.tokens,
        "latency_gain": _median(honest.own_ttfts) / _median(lied.own_ttfts),
        "cost": lied.cost / honest.cost, "attempts": lied.attempts / lied.own_jobs,
        "throughput_ratio": honest.work / fcfs.work,
        "hit_ratio": honest.hits / honest.prompts,
        "credit_term": _credit(order, honest, len(seeds)),
    }  # fmt: skip
    return row | dict.fromkeys(COMPARED)


def _credit(order: str, honest: Figures, runs: int) -> float:
    """Return an order's credit over the attacker's honest service of a run."""
    params = ORDERS[order]
    tokens = params.get("credit", params.get("quantum", 0.0)) / 2.0  # output tokens, weight 2
    if order in ("drf", "market"):
        tokens = honest.work / runs / HOLD_S / _RATES.output_s
    return float(tokens * runs / honest.tokens)


#: Probes and prompts of the victim to guess in a run of the side channel.
_PROBES = 60


def _side_channel(seeds: Sequence[int]) -> Iterator[Row]:
    """Yield the accuracy of guessing by TTFT whether a victim sent a prompt, by tenure."""
    for shared in (True, False):
        threshold = _threshold(*_probed(shared, SEARCH_SEED))
        accuracies = []
        for seed in seeds:
            hits, misses = _probed(shared, seed)
            right = sum(t <= threshold for t in hits) / len(hits)
            accuracies.append((right + sum(t > threshold for t in misses) / len(misses)) / 2)
        row: Row = {"experiment": "tenants", "concurrency": LEVELS[-3], "level_name": "timing",
                    "order": "one tenure" if shared else "tenure of each tenant",
                    "accuracy": statistics.fmean(accuracies)}  # fmt: skip
        yield row | dict.fromkeys(COMPARED)


def _threshold(hits: Sequence[float], misses: Sequence[float]) -> float:
    """Return the TTFT that tells hits from misses best."""
    return max(
        sorted([*hits, *misses]),
        key=lambda at: sum(t <= at for t in hits) - sum(t <= at for t in misses),
    )


def _probed(shared: bool, seed: int) -> tuple[list[float], list[float]]:
    """Return TTFTs of probes for prompts that a victim sent a second before, and for others."""
    rng, sessions = Random(f"probe/{seed}"), []
    for number in range(_PROBES):
        at = round((0.5 + number * 1.5 + rng.random() / 4) * SECOND)
        sent = RequestSpec(SHARED + OWN, 16, (10_000 + number,), 0, SHARED + OWN, tenant="v0")
        sessions.append(RequestSession(at, (sent,)))
        guess = 10_000 + number if number % 2 else 20_000 + number
        scope = 0 if shared else _JOBS
        probe = RequestSpec(SHARED + OWN, 1, (guess,), scope, SHARED + OWN, tenant=ATTACKER)
        sessions.append(RequestSession(at + SECOND, (probe,)))
    result = run_simulation(simulation("fair", Play(sessions), seed), attack="timing", seed=seed)
    hits: list[float] = []
    misses: list[float] = []
    for run in result.runs:
        if run.spec.tenant == ATTACKER:
            sent_too = run.spec.block_ids[0] < 20_000
            found = (run.first_token_ns - run.intended_ns) / SECOND
            (hits if sent_too else misses).append(found)
    return hits, misses


#: Most workers of a planner; seconds of arrivals, and of junk; junk to search, in fleets of two.
_MAX_WORKERS, _PLANNED_S, _JUNK_S, _JUNK_PARTS = 8, (0.0, 150.0), (30.0, 110.0), (0.5, 1.0, 2.0)
_MADE_UP = tuple(f"{ATTACKER}{name}" for name in range(8))
#: Names of the junk's tenants, and weights. Under "no tenants" the planner sees one tenant.
_SENDERS: Mapping[str, tuple[tuple[str, ...], Mapping[str, float]]] = {
    "no junk": ((), {}), "no tenants": ((ATTACKER,), {}), "one name": ((ATTACKER,), {}),
    "made-up names": (_MADE_UP, {}), "pooled names": (_MADE_UP, _POOLED),
}  # fmt: skip


def _planner(seeds: Sequence[int]) -> Iterator[Row]:
    """Yield GPU time and TTFT of victims beside junk that makes a planner start workers."""
    honest = _planned("no junk", 0.0, seeds)
    for who, (names, _) in _SENDERS.items():
        part, figures = 0.0, honest
        if names:
            hours = {part: _planned(who, part, [SEARCH_SEED])["gpu_hours"] for part in _JUNK_PARTS}
            part = max(hours, key=lambda part: hours[part])
            figures = _planned(who, part, seeds)
        row: Row = {"experiment": "tenants", "concurrency": LEVELS[-2], "level_name": "planner",
                    "order": who, "lie": [f"part={part:g}"], **figures,
                    "gpu_ratio": figures["gpu_hours"] / honest["gpu_hours"]}  # fmt: skip
        yield row | dict.fromkeys(COMPARED)


def _planned(who: str, part: float, seeds: Sequence[int]) -> Row:
    """Return GPU hours, most workers and the victims' TTFT P99 under the planner `price`."""
    names, weights = _SENDERS[who]
    scaling = ScalingConfig(slo=f"ttft={TTFT_SLO_S:g},itl=0.05", planner={"planner": "price"},
                            max_workers=_MAX_WORKERS, interval_s=5.0, start_up=5.0)  # fmt: skip
    hours, workers, ttfts = [], 0, list[float]()
    for seed in seeds:
        sent = [one for number, victim in enumerate(VICTIMS)
                for one in jobs(victim, number, VICTIM_PART, seed, _PLANNED_S)]  # fmt: skip
        for name in names:
            sent += jobs(name, _JUNK, part / len(names), seed, _JUNK_S)
        if who == "no tenants":
            sent = _each(lambda spec: replace(spec, tenant=""))(sent)
        result = run_simulation(_made("fair", sent, weights, seed, scaling), attack=who, seed=seed)
        planner = result.document()["planner"]
        hours.append(planner["gpu_hours"])
        workers = max(workers, planner["peak_workers"])
        ttfts += [(run.first_token_ns - run.intended_ns) / SECOND for run in result.runs
                  if run.spec.hash_scope != _JUNK and run.first_token_ns]  # fmt: skip
    p99 = float(np.percentile(ttfts, 99))
    return {"gpu_hours": math.fsum(hours), "workers": workers, "victim_ttft_p99_s": p99}


#: A victim's requests per second and templates; the flood's; tokens of their prompts.
_VICTIM_RPS, _VICTIM_TEMPLATES, _FLOOD_RPS = 2.0, 4, 3.0
_LONG_SHARED, _LONG = 2048, 4096
#: Quotas beside which the flood is sent, the same without a floor, and with none at all.
_QUOTAS = {"flood": (), "ceiling": ("*=0:0.25",), "floor and ceiling": ("v0=0.7:1", "*=0:0.25")}


def _quotas(seeds: Sequence[int]) -> Iterator[Row]:
    """Yield hits and TTFT of a victim of long templates, without and with a cache flood."""
    for who, quotas in {"no flood": (), **_QUOTAS}.items():
        runs = [run for seed in seeds for run in _flooded(who, quotas, seed)]
        ttfts = [(run.first_token_ns - run.intended_ns) / SECOND for run in runs]
        prompts = sum(run.spec.prompt_tokens for run in runs)
        row: Row = {"experiment": "tenants", "concurrency": LEVELS[-1], "level_name": "kv-quotas",
                    "order": who, "victim_ttft_p99_s": float(np.percentile(ttfts, 99)),
                    "hit_ratio": sum(run.cached_tokens for run in runs) / prompts}  # fmt: skip
        yield row | dict.fromkeys(COMPARED)


def _flooded(who: str, quotas: tuple[str, ...], seed: int) -> list[RequestRun]:
    """Return the victim's requests to one worker of 1,024 blocks."""
    rng, sent = Random(f"quotas/{seed}"), []
    for tenant, rate in ((VICTIMS[0], _VICTIM_RPS), (ATTACKER, _FLOOD_RPS * (who != "no flood"))):
        at = 0.0
        while rate and (at := at + rng.expovariate(rate)) < HOLD_S:
            ids = (rng.randrange(_VICTIM_TEMPLATES), rng.getrandbits(40))
            spec = RequestSpec(_LONG_SHARED + OWN, 64, ids, 0, _LONG_SHARED, tenant=tenant)
            spec = _junk(rng, _LONG, 1) if tenant == ATTACKER else spec
            sent.append(RequestSession(round(at * SECOND), (spec,)))
    loop = OpenLoop(sorted(sent, key=lambda one: one.start_ns))
    setup = msgspec.structs.replace(_SETUP, blocks=1024, kv_quotas=quotas)
    made = Simulation(loop, read_fleet("1xboth"), setup, unlimited(seed=seed), CLIENT, seed=seed)
    runs = run_simulation(made, attack="kv-quotas", order=who, seed=seed).runs
    return [run for run in runs if run.spec.tenant == VICTIMS[0]]


def verdict(rows: Sequence[Row]) -> Mapping[str, Any]:
    """Return for each order what meets the target, and the worst attack."""
    summary: dict[str, Any] = {}
    for order in dict.fromkeys(row["order"] for row in rows if "gain" in row):
        mine = [row for row in rows if row["order"] == order]
        missed = [row["level_name"] for row in mine if not meets(row)]
        worst = max(mine, key=lambda row: row["victim_ratio"])
        summary[order] = {
            "meets": "all" if not missed else f"{len(mine) - len(missed)}/{len(mine)}",
            "missed": missed or "none",
            "worst_victim_ratio": worst["victim_ratio"],
            "worst_gain": max(row["gain"] for row in mine),
        }
    return summary | {f"accuracy, {r['order']}": r["accuracy"] for r in rows if "accuracy" in r}


def meets(row: Row) -> bool:
    """True if victims, gain and throughput are within the target."""
    return bool(
        row["victim_ratio"] <= 1.2
        and row["gain"] <= 1.0 + row["credit_term"]
        and row["throughput_ratio"] >= 0.98
    )
