"""TTFT and ITL percentiles of a pool by load and size, and the inverse."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from scipy.special import ndtr, ndtri

from pigou.games.queueing import max_utilisation, mgc_wait, response_quantile
from pigou.objectives import Slo
from pigou.performance.speed import (
    DecodeSpeed,
    DecodeTable,
    PrefillSpeed,
    PrefillTable,
    RequestMix,
    crossing,
    elasticity,
    halved,
    largest_batch,
    step_below,
)
from pigou.request import Role

#: Deviation of a request's mean neighbours over that of their number at an instant: averaging over
#: T a process that forgets in T multiplies the variance by 2 / e.
AVERAGING = math.sqrt(2.0 / math.e)
#: Steps that queueing results are cached by: of a limit, and of variances.
_LIMIT_STEP, _SCV_STEP = 0.005, 0.05
#: The same for a mixed worker, whose prompts slow down with each stream.
_COARSE_STEP = 0.02
#: Utilisations from here on are overload.
FULL = 1.0 - 1e-6


@dataclass(frozen=True, slots=True)
class PoolLatency:
    """Latency of a pool at a load."""

    ttft_s: float
    itl_s: float
    utilisation: float  # busy share of prefill, or used share of decode slots: the larger
    mean_ttft_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PerformanceModel:
    """Latency of a pool of equal workers by load.

    | symbol | meaning |
    |---|---|
    | c | workers |
    | lambda | requests a second to the pool |
    | D | mean seconds of a prompt's uncached tokens on one worker |
    | n | streams of one worker, mean lambda osl ITL(n) / c (Little) |
    | q | share of requests that shall be inside |

    Prefill: M/G/c with mean service D, q-quantile (`pigou.games.queueing.response_quantile`).
    Decode: the number N of streams deviates by sqrt(N / (1 - e)), e the elasticity of ITL (linear
    noise; close to the exact station, Cohen 1979), a request's mean over its life by `AVERAGING` as
    much. Mixed: chunked prefill in decode steps, so ITL grows by 1 / (1 - lambda D / c), and a
    prompt of k chunks takes D + k ITL(n).
    """

    prefill: PrefillSpeed  # seconds of prompts
    decode: DecodeSpeed  # seconds between tokens
    kv_tokens: float = math.inf
    max_seqs: int = 256  # most streams of one worker
    chunk_tokens: int = 2048  # most prompt tokens of one step of a mixed worker
    # TTFT besides queue and prefill: KV transfer, network, first decode step
    overhead_s: float = 0.0
    transfer_token_s: float = 0.0  # TTFT per prompt token sent to a decode worker
    prefill_factor: float = 1.0  # observed over predicted seconds
    decode_factor: float = 1.0
    wait_factor: float = 1.0  # observed over predicted waits
    pooled: bool = True  # False: c queues of one server (random routing)

    @classmethod
    def from_points(
        cls,
        prefill: Iterable[tuple[float, float]],
        decode: Iterable[tuple[float, float, float]],
        kv_tokens: float = math.inf,
        max_seqs: int = 256,
    ) -> PerformanceModel:
        """Make a model of points: (prompt tokens, s), and (streams, tokens of each, ITL in s)."""
        table = PrefillTable(tuple(sorted(prefill)))
        return cls(table, DecodeTable.of(decode), kv_tokens, max_seqs)

    def corrected(
        self, prefill_factor: float, decode_factor: float, wait_factor: float, more_s: float = 0.0
    ) -> PerformanceModel:
        """Return the model with these factors and `more_s` added overhead."""
        return replace(
            self,
            overhead_s=self.overhead_s + more_s,
            prefill_factor=prefill_factor,
            decode_factor=decode_factor,
            wait_factor=wait_factor,
        )

    # --- one worker ------------------------------------------------------------------------

    def service_s(self, mix: RequestMix) -> float:
        """Return mean prefill seconds of a prompt's uncached tokens."""
        return self.prefill_factor * self.prefill.seconds(mix.computed, mix.isl)

    def service_scv(self, mix: RequestMix) -> float:
        """Return the squared coefficient of variation of `service_s`, from its slope in length."""
        mean = self.service_s(mix)
        if mix.isl_scv <= 0 or mean <= 0:
            return 0.0
        longer = self.service_s(replace(mix, isl=1.01 * mix.isl))
        return mix.isl_scv * ((longer - mean) / (0.01 * mean)) ** 2

    def itl_at(self, streams: float, mix: RequestMix) -> float:
        """Return the ITL in seconds at `streams` streams per worker."""
        return self.decode_factor * self.decode.itl_s(max(streams, 1.0), mix.context)

    def max_streams(self, mix: RequestMix) -> float:
        """Return the streams one worker can hold."""
        return max(min(float(self.max_seqs), self.kv_tokens / mix.context), 1.0)

    def batch(self, mix: RequestMix, itl_s: float) -> float:
        """Return the most streams per worker with ITL within `itl_s`; 0.0 for none."""
        return largest_batch(
            self.decode, mix.context, itl_s / self.decode_factor, self.max_streams(mix)
        )

    def throughput_rps(self, role: Role, mix: RequestMix) -> float:
        """Return the most requests a second of one worker, whatever the wait."""
        prefill = 1.0 / self.service_s(mix) if role.prefills else math.inf
        if not role.decodes:
            return prefill
        batch = self.batch(mix, math.inf)
        return min(prefill, batch / (mix.osl * self.itl_at(batch, mix)))

    # --- latency by load -------------------------------------------------------------------

    def latency(
        self, role: Role, rps: float, workers: int, mix: RequestMix, share: float
    ) -> PoolLatency:
        """Return TTFT and ITL of a pool at a load; 0 for a figure outside its role."""
        if rps <= 0:
            service = self.service_s(mix) + self._overhead(mix) if role.prefills else 0.0
            itl = self.itl_at(1.0, mix) if role.decodes else 0.0
            return PoolLatency(service, itl, 0.0, service)
        if workers < 1:
            return PoolLatency(math.inf, math.inf, math.inf, math.inf)
        if role is Role.PREFILL:
            return self._prefill_latency(rps, workers, mix, share, self.service_s(mix))
        streams = self.streams(role, rps, workers, mix)
        if math.isinf(streams):
            return PoolLatency(math.inf, math.inf, math.inf, math.inf)
        itl = self._itl_quantile(role, rps, workers, mix, streams, share)
        busy = streams / self.max_streams(mix)
        if role is Role.DECODE:
            return PoolLatency(0.0, itl, busy)
        service = self._chunked_s(mix, streams)
        prompts = self._prefill_latency(rps, workers, mix, share, service)
        return PoolLatency(prompts.ttft_s, itl, max(prompts.utilisation, busy), prompts.mean_ttft_s)

    def _prefill_latency(
        self, rps: float, workers: int, mix: RequestMix, share: float, service: float
    ) -> PoolLatency:
        utilisation = rps * service / workers
        if utilisation >= FULL:
            return PoolLatency(math.inf, 0.0, utilisation, math.inf)
        servers, scv, arrival_scv = self._queue(workers, mix)
        overhead = self._overhead(mix)
        ttft = service * response_quantile(servers, utilisation, share, scv, arrival_scv) + overhead
        wait = 0.5 * (arrival_scv + scv) * mgc_wait(servers, utilisation, 1.0)
        return PoolLatency(ttft, 0.0, utilisation, service * (1.0 + wait) + overhead)

    def streams(self, role: Role, rps: float, workers: int, mix: RequestMix) -> float:
        """Return mean streams per worker by Little's law; infinity in overload."""
        rho = rps * self.service_s(mix) / workers if role is Role.BOTH else 0.0
        if rho >= FULL:
            return math.inf
        demand = rps * mix.osl / (workers * (1.0 - rho))
        limit = self.max_streams(mix)
        if limit < demand * self.itl_at(limit, mix):
            peak = self.batch(mix, math.inf)
            if peak < demand * self.itl_at(peak, mix):
                return math.inf
            limit = peak
        return crossing(lambda n: n - demand * self.itl_at(n, mix), limit)

    def _itl_quantile(
        self, role: Role, rps: float, workers: int, mix: RequestMix, streams: float, share: float
    ) -> float:
        more = streams + self._deviations(share) * self._stream_deviation(streams, workers, mix)
        if role is Role.DECODE:
            return self.itl_at(more, mix)
        rate, service = rps / workers, self.service_s(mix)
        itl = self.itl_at(more, mix) / (1.0 - rate * service)
        prompts = rate * mix.osl * itl  # computed during a request's life
        return itl + self._deviations(share) * math.sqrt(prompts) * service / mix.osl

    def inside_share(
        self, role: Role, rps: float, workers: int, mix: RequestMix, slo: Slo
    ) -> float:
        """Return the share of requests within the role's part of the objective."""
        if rps <= 0:
            return 1.0
        if workers < 1:
            return 0.0
        if role is Role.PREFILL:
            return self._prefill_share(rps, workers, mix, slo.ttft_s)
        streams, batch = self.streams(role, rps, workers, mix), self.batch(mix, slo.itl_s)
        if math.isinf(streams) or batch <= 0:
            return 0.0
        deviation = AVERAGING * self._stream_deviation(streams, workers, mix)
        return float(ndtr((batch - streams) / max(deviation, 1e-9)))

    def _prefill_share(self, rps: float, workers: int, mix: RequestMix, ttft_s: float) -> float:
        service = self.service_s(mix)
        utilisation = rps * service / workers
        if utilisation >= FULL:
            return 0.0
        limit = (ttft_s - self._overhead(mix)) / service
        servers, scv, arrival_scv = self._queue(workers, mix)

        def is_inside(share: float) -> bool:
            return response_quantile(servers, utilisation, share, scv, arrival_scv) <= limit

        return halved(0.0, 1.0 - 1e-6, is_inside, 11)[0]

    # --- the inverse -----------------------------------------------------------------------

    def limit_rps(self, role: Role, workers: int, mix: RequestMix, slo: Slo, share: float) -> float:
        """Return the most requests a second with `share` inside the role's objectives."""
        if workers < 1:
            return 0.0
        if role is Role.PREFILL:
            return self._prefill_limit(workers, mix, slo.ttft_s, share, self.service_s(mix))
        if role is Role.DECODE:
            return self._decode_limit(workers, mix, slo.itl_s, share)
        high = self._decode_limit(workers, mix, slo.itl_s, share)
        high = min(high, workers / self.service_s(mix))  # prompts only take from either
        inside = lambda rps: self._both_inside(rps, workers, mix, slo, share)  # noqa: E731
        return halved(0.0, high, inside, 12)[0]

    def _both_inside(
        self, rps: float, workers: int, mix: RequestMix, slo: Slo, share: float
    ) -> bool:
        streams = self.streams(Role.BOTH, rps, workers, mix)
        if math.isinf(streams):
            return False
        if self._itl_quantile(Role.BOTH, rps, workers, mix, streams, share) > slo.itl_s:
            return False
        service = self._chunked_s(mix, streams)
        limit = self._prefill_limit(workers, mix, slo.ttft_s, share, service, _COARSE_STEP)
        return rps <= limit

    def _chunked_s(self, mix: RequestMix, streams: float) -> float:
        chunks = math.ceil(mix.computed / self.chunk_tokens)
        return self.service_s(mix) + chunks * self.itl_at(streams, mix)

    def _prefill_limit(
        self, workers: int, mix: RequestMix, ttft_s: float, share: float, service: float,
        step: float = _LIMIT_STEP,
    ) -> float:  # fmt: skip
        limit = (ttft_s - self._overhead(mix)) / service
        servers, scv, arrival_scv = self._queue(workers, mix)
        limit = step_below(min(limit, 1e3), step)
        return workers / service * max_utilisation(servers, limit, share, scv, arrival_scv)

    def _decode_limit(self, workers: int, mix: RequestMix, itl_s: float, share: float) -> float:
        limit = self.batch(mix, itl_s)
        if limit <= 0.0:
            return 0.0
        deviations = self._deviations(share)

        def is_inside(streams: float) -> bool:
            return streams + deviations * self._stream_deviation(streams, workers, mix) <= limit

        low, _ = halved(0.0, limit, is_inside, 18)
        return workers * low / (mix.osl * self.itl_at(low, mix))

    # --- parts -----------------------------------------------------------------------------

    def _overhead(self, mix: RequestMix) -> float:
        return self.overhead_s + self.transfer_token_s * mix.isl

    def _queue(self, workers: int, mix: RequestMix) -> tuple[int, float, float]:
        """Return servers, and variances of service and of arrivals, scaled so that waits match."""
        scv = step_below(self.service_scv(mix) + 0.5 * _SCV_STEP, _SCV_STEP)
        arrival = self.wait_factor * (mix.arrival_scv + scv) - scv
        arrival = max(step_below(arrival + 0.5 * _SCV_STEP, _SCV_STEP), 0.0)
        return workers if self.pooled else 1, scv, arrival

    def _deviations(self, share: float) -> float:
        return AVERAGING * max(float(ndtri(share)), 0.0) if share > 0.5 else 0.0

    def _stream_deviation(self, streams: float, workers: int, mix: RequestMix) -> float:
        if streams <= 0:
            return 0.0
        left = max(1.0 - elasticity(self.decode, max(streams, 1.0), mix.context), 0.05)
        return math.sqrt(streams / (workers * left))


def joint_share(slo: Slo) -> float:
    """Return the share that each of two objectives must keep: 1 - (1 - p) / 2 (Bonferroni)."""
    if math.isinf(slo.ttft_s) or math.isinf(slo.itl_s):
        return slo.share
    return 0.5 * (1.0 + slo.share)
