"""Latency model: learns each worker's speed from the control plane's observations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

import pigou.control.latency_model.estimates as fields
from pigou.control.latency_model.affine_fit import AffineFit, FetchFit
from pigou.control.latency_model.demand import (
    RATE_S,
    ArrivalGaps,
    ContextLength,
    FleetRate,
    OutputLength,
    PromptSizes,
    decay_rates,
)
from pigou.control.latency_model.estimates import (
    MIN_SLOPE,
    PRIOR_LAW,
    PRIOR_PREFILL,
    PRIOR_TRANSFER,
    Estimates,
    fill,
    pairs,
    prior_column,
)
from pigou.control.latency_model.link_factors import LinkFactors
from pigou.control.latency_model.prefill_interference import PrefillInterference
from pigou.control.latency_model.throughput_sampler import (
    COMMON_ITL,
    CONTEXT,
    STREAMS,
    TRUST,
    ThroughputSample,
    ThroughputSampler,
    learn_from_samples,
    sample_table,
    subtract_prompts,
)
from pigou.control.latency_model.worker_factors import StartupReference, WorkerFactors
from pigou.games.latency import LatencyLaw, OnlineFit
from pigou.request import SECOND, UNKNOWN_LOCATION, Location, Rehearsed

#: Most streams that the law of ITL is fitted to; it extrapolates beyond.
_MAX_STREAMS = 256.0
#: Tokens that may double a step by being held. Without grouped queries a model's cache has as many
#: bytes as its weights at 30,000; with them there are more.
_DOUBLING_TOKENS = 20_000.0
#: Tokens below which a transfer tells nothing of the tokens of longer ones.
_SHORT = 256
_MAX_AGE_NS = SECOND // 100  # maximum age of arrival rates
#: Prompts of one report of another gateway that count: the rates remember no more.
_MAX_PEER_PROMPTS = 128


class LatencyModel:
    """Speeds of the workers: laws common to the fleet times a factor per worker (`WorkerFactors`).

    Prefill: seconds since the prompt was sent or the one before ended, by uncached tokens and
    pairs. Transfer: from a remote prefill's end to the first token, by tokens (`LinkFactors`). ITL:
    `ThroughputSampler` and `LatencyLaw`, less `PrefillInterference`. Remote fetch: `FetchFit`.

    Example:
        model = LatencyModel()
        model.add_worker()
        model.prompt_sent(0, now)
        model.prompt_computed(0, 1000, now, now + SECOND)
        model.estimates(now).prefill_token  # seconds a token, of each worker
    """

    def __init__(self) -> None:
        self._prefill = AffineFit()
        self._transfer = AffineFit()
        self._longest_transfer = 0.0
        self._fetch = FetchFit()
        self._itl = OnlineFit(_MAX_STREAMS, doubling=_DOUBLING_TOKENS)
        self._context = ContextLength()
        self._interference = PrefillInterference()
        self._gaps = ArrivalGaps()
        self._fleet_rate = FleetRate()
        self._startup = StartupReference()
        self._prompts = PromptSizes()
        self.outputs = OutputLength()
        self._last_sent = self._last_own = 0
        self._prefill_factors = WorkerFactors()
        self._transfer_factors = WorkerFactors()
        self._itl_factors = WorkerFactors()
        self._links = LinkFactors()
        self._rate = np.zeros(0)
        self._rated_at = np.zeros(0, dtype=np.int64)
        self._last_done = np.zeros(0, dtype=np.int64)
        self._mean_prefill = np.zeros(0)
        self.sampler = ThroughputSampler()
        self._estimates: Estimates | None = None
        self._rates_at = 0

    @property
    def _factors(self) -> tuple[WorkerFactors, WorkerFactors, WorkerFactors]:
        return self._prefill_factors, self._transfer_factors, self._itl_factors

    def add_worker(
        self, startup: Sequence[Rehearsed] = (), now: int = 0,
        location: Location = UNKNOWN_LOCATION,
    ) -> None:  # fmt: skip
        """Add a worker as the last row, and learn its startup profile."""
        for factors in self._factors:
            factors.add_worker()
        self._links.add_worker(location)
        self._rate = np.append(self._rate, 0.0)
        self._rated_at = np.append(self._rated_at, 0)
        self._last_done = np.append(self._last_done, 0)
        self.sampler.add_worker()
        self._estimates = None
        if startup:
            self._learn_startup(len(self._rate) - 1, startup, now)

    def move_worker(self, row: int, location: Location) -> None:
        """Change the labels of worker `row`."""
        self._links.move_worker(row, location)
        self._estimates = None

    def remove_worker(self, row: int) -> None:
        """Remove a worker."""
        for factors in self._factors:
            factors.remove_worker(row)
        self._links.remove_worker(row)
        self._rate = np.delete(self._rate, row)
        self._rated_at = np.delete(self._rated_at, row)
        self._last_done = np.delete(self._last_done, row)
        self.sampler.remove_worker(row)
        self._estimates = None

    def prompt_sent(self, row: int, now: int) -> None:
        """Record that a prompt was sent to worker `row`."""
        if self._last_own:
            self._gaps.observe(max(0, now - self._last_own) / SECOND)
        self._last_own = now
        self._count_sent(row, now)

    def peer_prompts(self, row: int, count: int, now: int) -> None:
        """Record prompts sent to worker `row` by other gateways."""
        for _ in range(min(count, _MAX_PEER_PROMPTS)):
            self._count_sent(row, now)

    def _count_sent(self, row: int, now: int) -> None:
        if self._last_sent:
            self._fleet_rate.observe(max(0, now - self._last_sent) / SECOND)
        self._last_sent = now
        age = (now - self._rated_at.item(row)) / SECOND / RATE_S
        self._rate[row] = self._rate.item(row) * math.exp(-max(0.0, age)) + 1.0 / RATE_S
        self._rated_at[row] = now

    def prompt_computed(
        self, row: int, tokens: int, sent: int, now: int, prompt: int | None = None
    ) -> None:
        """Learn from a prompt of length `prompt`; the sampler must be at `now`."""
        began = max(sent, self._last_done.item(row))
        self._last_done[row] = now
        token_pairs = float(pairs(tokens, tokens if prompt is None else prompt))
        self._count_prompt(row, tokens, token_pairs, max(0, now - began) / SECOND)
        if now > began:
            self._learn(
                self._prefill, self._prefill_factors, row, tokens, now - began, now, token_pairs
            )

    def prompt_shared(self, row: int, tokens: int, now: int, prompt: int) -> bool:
        """Count a prompt computed beside other gateways' prompts; return if it counts."""
        if not self._prefill.observed:
            return False
        self._last_done[row] = now
        rows, uncached = np.array([row]), np.array([float(tokens)])
        seconds = self.estimates(now).service(rows, uncached, float(prompt)).item()
        self._count_prompt(row, tokens, float(pairs(tokens, prompt)), seconds)
        return True

    def prompt_fetched(
        self, row: int, tokens: int, fetched: int, sent: int, now: int, prompt: int,
        was_idle: bool, source: int | None = None,
    ) -> None:  # fmt: skip
        """Learn from a prompt with tokens fetched from `source`, if the worker `was_idle`."""
        began = max(sent, self._last_done.item(row))
        clean = was_idle and began == sent
        self._last_done[row] = now
        rows, uncached = np.array([row]), np.array([float(tokens)])
        service_s = self.estimates(now).service(rows, uncached, float(prompt)).item()
        elapsed_s = max(0, now - began) / SECOND
        self._count_prompt(row, tokens, float(pairs(tokens, prompt)), min(elapsed_s, service_s))
        if clean:
            link = 1.0 if source is None else self._links.factor(source, row)
            self._fetch.observe(link * fetched, elapsed_s - service_s, now)

    def _count_prompt(self, row: int, tokens: int, token_pairs: float, seconds: float) -> None:
        size = tokens + self._prefill.ratio * token_pairs
        self.sampler.add_prompt(row, size, seconds)
        self._prompts.observe(tokens, token_pairs)

    def transferred(
        self, row: int, tokens: int, began_ns: int, now: int, source: int | None = None
    ) -> None:
        """Learn from a transfer to `row`, idle at `began_ns` and now; `source` None if gone."""
        if now > began_ns >= self._last_done.item(row):
            size = float(tokens)
            if source is not None and self._links.located:
                size *= self._links.factor(source, row)
                law = self._transfer.law if self._transfer.observed else PRIOR_TRANSFER
                took_s = (now - began_ns) / SECOND / self._transfer_factors.factor(row, now)
                self._links.learn(source, row, took_s, law, tokens, now)
            self._learn(self._transfer, self._transfer_factors, row, size, now - began_ns, now)
            self._longest_transfer = max(self._longest_transfer, size)

    def sample(self, now: int) -> None:
        """Learn from the throughput since the last call; call it a few times a second."""
        self._fetch.tick(now)
        samples = list(self.sampler.take_samples())
        if samples:
            self._learn_samples(samples, now)
        self._estimates = None

    def estimates(self, now: int) -> Estimates:
        """Return the estimates, with arrival rates decayed to `now`."""
        estimates = self._estimates
        if estimates is None:
            estimates = self._estimates = self._solve(now)
        elif 0 <= now - self._rates_at < _MAX_AGE_NS:
            return estimates
        self._rates_at = now
        self._write_rates(estimates, now)
        return estimates

    def peek(self, now: int) -> Estimates:
        """Return a copy of the estimates without changing later ones."""
        estimates = self._solve(now) if self._estimates is None else self._estimates.copy()
        self._write_rates(estimates, now)
        return estimates

    def _learn_startup(self, row: int, startup: Sequence[Rehearsed], now: int) -> None:
        prompts = [step for step in startup if step.tokens and not step.streams]
        streams = [step for step in startup if not step.tokens]
        prefill_ratio = self._startup.ratio(prompts)
        for _ in prompts:
            self._prefill_factors.observe(row, prefill_ratio, now)
        itl_ratio = self._startup.ratio(streams)
        for _ in streams:
            self._itl_factors.observe(row, itl_ratio, now)
        if self.outputs.observed:
            return
        for step in prompts:
            token_pairs = float(pairs(step.tokens, step.tokens))
            self._prefill.observe(float(step.tokens), step.seconds / prefill_ratio, token_pairs)
        for step in streams:
            self._itl.observe(float(step.streams), step.seconds / step.steps / itl_ratio)
        if not self._itl.weight:
            return
        for step in startup:
            if not (step.tokens and step.streams):
                continue
            expected = step.steps * self._itl_law()(float(step.streams)) * itl_ratio
            size = step.tokens + self._prefill.ratio * float(pairs(step.tokens, step.tokens))
            self._interference.observe(step.seconds / expected, 1.0 / expected, size / expected)

    def _learn_samples(self, samples: Sequence[ThroughputSample], now: int) -> None:
        interference, prefill_alone = self._interference, self._prefill_alone(now)
        own = self._itl_factors.factors(now)[1]
        table = sample_table(samples)
        decode = np.empty((3, len(samples)))
        taken = self._interference_law(prefill_alone, self._itl_law())
        subtract_prompts(table, own, taken, interference.variance(*prefill_alone), decode)
        streams, context = table[STREAMS], table[CONTEXT]
        self._context.observe(streams, context)
        self._itl.observe_all(streams, decode[COMMON_ITL], decode[TRUST], context)
        law = self._itl.law()
        learn_from_samples(
            table, decode, own, (law.a, law.b, law.d, law.n_sat, law.beta), law.floor,
            self._itl.held_s, now, self._itl_factors.arrays, interference.arrays,
            interference.keep,
        )  # fmt: skip

    def _write_rates(self, estimates: Estimates, now: int) -> None:
        decay_rates(
            self._rate, self._rated_at, self._mean_prefill, now, self._fleet_rate.per_second,
            estimates.table,
        )  # fmt: skip

    def _learn(
        self, fit: AffineFit, factors: WorkerFactors, row: int, size: float, nanos: int, now: int,
        token_pairs: float = 0.0,
    ) -> None:  # fmt: skip
        seconds = nanos / SECOND
        own = factors.factor(row, now)
        fit.observe(float(size), seconds / own, token_pairs)
        factors.observe(row, seconds / max(fit(float(size), token_pairs), 1e-9), now)

    def _prefill_alone(self, now: int) -> tuple[float, float]:
        """Return base and token seconds of a prompt alone, at a factor of 1."""
        if not self._prefill.observed:
            return PRIOR_PREFILL
        common, (base, token) = self._prefill_factors.factors(now)[0], self._prefill.law
        return base * common, token * common

    def _itl_law(self) -> LatencyLaw:
        """Return the fleet's ITL law, for streams with empty contexts."""
        return self._itl.law() if self._itl.weight > 0 else PRIOR_LAW

    def _interference_law(
        self, prefill_alone: tuple[float, float], law: LatencyLaw
    ) -> tuple[float, float]:
        return self._interference.law(*prefill_alone, max(law.toll(1.0), MIN_SLOPE * law(1.0)))

    def _solve(self, now: int) -> Estimates:
        law, prefill_alone = self._itl_law(), self._prefill_alone(now)
        column, min_slope = prior_column(law), MIN_SLOPE * law(1.0)
        if self._prefill.observed:
            column[fields.PREFILL_BASE], column[fields.PREFILL_TOKEN] = self._prefill.law
        if self._transfer.observed:
            base, token = self._transfer.law
            if self._longest_transfer < _SHORT:
                base, token = base + token * self._longest_transfer, PRIOR_TRANSFER[1]
            column[fields.TRANSFER_BASE], column[fields.TRANSFER_TOKEN] = base, token
        column[fields.FETCH_BASE], column[fields.FETCH_TOKEN] = self._fetch.law
        column[fields.PREFILL_PAIR] = self._prefill.pair
        column[fields.PREFILL_PER_TOKEN] = column[fields.PREFILL_TOKEN]
        column[fields.PREFILL_PER_TOKEN] += self._prefill.pair * self._prompts.pairs_per_token
        column[fields.INTERFERENCE_BASE], column[fields.INTERFERENCE_TOKEN] = (
            self._interference_law(prefill_alone, law)
        )
        context_token, mean_context = self._itl.held_s, self._context.mean
        column[fields.CONTEXT_TOKEN], column[fields.MEAN_CONTEXT] = context_token, mean_context
        column[fields.ITL_A] += context_token * mean_context
        column[fields.ARRIVAL_CV2] = self._gaps.cv2
        prompt = [
            column.item(row)
            for row in (fields.PREFILL_BASE, fields.PREFILL_TOKEN, fields.PREFILL_PAIR)
        ]
        column[fields.MEAN_PREFILL] = self._prompts.mean(*prompt)
        column[fields.PREFILL_CV2] = self._prompts.cv2(*prompt)
        prefill, transfer, itl = (factors.factors(now) for factors in self._factors)
        estimates = Estimates(np.empty((fields.ROWS, len(self._rate))), self._links.table(now))
        common = (prefill[0], transfer[0], itl[0])
        fill(estimates.table, column, prefill[1], transfer[1], itl[1], common, min_slope)
        self._mean_prefill = estimates.mean_prefill
        return estimates
